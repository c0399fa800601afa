"""What is recorded, how often, and what happens when the disk is slower than training."""

import os
import time
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from moe_core import MoELayer, Routing, SwitchAuxLoss
from recorder import RoutingRecorder
from recorder.adapters import Observation, RouterAdapter, register_adapter
from recorder.background import Background
from recorder.sampling import Sampling


def table(path, name):
    return pq.read_table(path / name).to_pandas()


def two_layers():
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.ModuleList(MoELayer(8, 8, 4, 2) for _ in range(2))})


def forward(model, x):
    for layer in model["layers"]:
        x = layer(x).hidden


def test_statistics_and_decisions_every_n_steps(tmp_path):
    model = two_layers()
    with RoutingRecorder(model, tmp_path / "run", stats_every=2, decisions_every=3) as recorder:
        for step in range(7):
            with recorder.step(step):
                forward(model, torch.randn(2, 5, 8))
        with recorder.step(5, phase="probe"):
            forward(model, torch.randn(2, 5, 8))
    stats, decisions, steps = (table(tmp_path / "run", t) for t in ("layer_stats", "decisions", "steps"))
    assert sorted(set(stats[stats.phase == "train"].step)) == [0, 2, 4, 6]
    assert sorted(set(decisions[decisions.phase == "train"].step)) == [0, 3, 6]
    assert steps[steps.phase == "train"].tokens.tolist() == [10] * 7
    assert set(stats[stats.phase == "probe"].step) == set(decisions[decisions.phase == "probe"].step) == {5}
    recorded = recorder.writer.manifest["recorded"]
    assert (recorded["stats_every"], recorded["decisions_every"], recorded["decisions_share"]) == (2, 3, 1.0)


def test_a_share_of_sequences_is_the_same_in_every_layer_and_run(tmp_path):
    chosen = []
    for name in ("first", "second"):
        model = two_layers()
        with RoutingRecorder(model, tmp_path / name, decisions_share=0.25) as recorder:
            for step in range(40):
                with recorder.step(step, token_ids=np.arange(80)):
                    for _ in range(2):
                        forward(model, torch.randn(8, 5, 8))
        decisions, tokens = table(tmp_path / name, "decisions"), table(tmp_path / name, "tokens")
        of_layer = [decisions[decisions.layer == layer] for layer in (0, 1)]
        pairs = [set(zip(of.step, of.token, strict=True)) for of in of_layer]
        assert pairs[0] == pairs[1] == set(zip(tokens.step, tokens.token, strict=True))
        lengths = tokens.groupby(["step", "sequence"]).size()
        assert set(lengths) == {5}  # whole sequences
        assert 0.15 < len(lengths) / (40 * 16) < 0.35
        assert (tokens.token_id == tokens.token).all()
        chosen.append(pairs[0])
    assert chosen[0] == chosen[1]
    assert set(table(tmp_path / "first", "layer_stats").tokens) == {80}  # statistics are of all


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_the_share_comes_out(share):
    sampling = Sampling(decisions_share=share)
    taken = sum(sampling.chosen(step, "train", 4 * step % 7, 4).sum() for step in range(5000))
    assert taken / 20000 == pytest.approx(share, rel=0.2)
    assert sampling.chosen(0, "eval", 0, 4) is None


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"stats_every": 0}, "stats_every must be a whole number, at least 1, got 0"),
        ({"decisions_share": 0}, "decisions_share=0 is not above 0 and at most 1"),
        ({"decisions_share": float("nan")}, "decisions_share=nan"),
        ({"max_buffer_mb": 0}, "max_buffer_mb must be a finite number, above 0, got 0"),
        ({"when_full": "later"}, "when_full='later' is unknown; choose one of wait, drop"),
    ],
)
def test_wrong_options_are_named_before_anything_is_written(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        RoutingRecorder(two_layers(), tmp_path / "run", **option)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that takes 50 ms for each file."""
    fsync = os.fsync

    def slowly(descriptor):
        time.sleep(0.05)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slowly)


@pytest.mark.parametrize("when_full", ["wait", "drop"])
def test_a_disk_slower_than_training(tmp_path, slow_disk, when_full):
    model = two_layers()
    # a step holds 2 layers x 2000 tokens x 2 choices x 5 bytes, and 4 bytes a token: 48 kB
    options = {"max_buffer_mb": 0.1, "when_full": when_full, "flush_steps": 1, "flush_seconds": 1e9}
    longest = 0.0
    with RoutingRecorder(model, tmp_path / "run", **options) as recorder:
        for step in range(12):
            with torch.no_grad():
                x = torch.randn(2, 1000, 8)
            started = time.perf_counter()
            with recorder.step(step):
                forward(model, x)
            longest = max(longest, time.perf_counter() - started)
        closing = time.perf_counter()
    stats, decisions = table(tmp_path / "run", "layer_stats"), table(tmp_path / "run", "decisions")
    steps, tokens = table(tmp_path / "run", "steps"), table(tmp_path / "run", "tokens")
    assert sorted(stats.step) == sorted([*range(12)] * 2)  # statistics are never dropped
    assert steps.step.tolist() == list(range(12))
    kept = sorted(set(decisions.step))
    assert set(tokens.step) == set(kept)
    assert decisions.groupby("step").size().eq(4000).all()  # a step is there as a whole or not at all
    recorded = recorder.writer.manifest["recorded"]
    if when_full == "wait":
        assert kept == list(range(12))
        assert longest > 0.2
        assert not (tmp_path / "run" / "events").exists()
    else:
        assert 2 <= len(kept) < 12
        events = table(tmp_path / "run", "events")
        assert set(events.kind) == {"decisions_dropped"}
        assert sorted(events.step) == sorted(set(range(12)) - set(kept))
        assert recorded["decisions_dropped"] == 12 - len(kept)
        assert recorded.get("errors", 0) == 0
    assert recorder.writer.manifest["status"] == "finished"
    assert time.perf_counter() - closing < 60


def test_the_queue_is_bounded_and_lets_a_giant_through():
    done, waiting = [], []
    queue = Background(lambda item: (time.sleep(0.02), done.append(item)), max_bytes=100)
    for item in range(5):
        queue.put(item, 60)
        waiting.append(item + 1 - len(done))
    assert max(waiting) <= 2
    queue.put("giant", 1000)
    assert not queue.put("no room", 60, wait=False)
    queue.drain()
    assert done == [0, 1, 2, 3, 4, "giant"]
    queue.close()
    queue.close()


class _ChoosesMore(nn.Module):
    """Takes k from its input's size: as expert-choice routers do, its K varies."""

    top_k = None

    def forward(self, x):
        logits = x[:, :4]
        weights, ids = logits.softmax(-1).topk(1 + len(x) % 2, dim=-1)
        return logits, weights, ids


class _ChoosesMoreAdapter(RouterAdapter):
    classes = ("_ChoosesMore",)

    def describe(self, module, model):
        return {"num_experts": 4, "top_k": module.top_k, "score_function": "softmax"}

    def read(self, module, args, kwargs, output):
        logits, weights, ids = output
        return Observation(routing=Routing(logits, logits.softmax(-1), ids, weights))


def test_micro_batches_of_different_k(tmp_path):
    register_adapter(_ChoosesMoreAdapter())
    model = _ChoosesMore()
    with RoutingRecorder(model, tmp_path / "run") as recorder, recorder.step(0):
        model(torch.randn(3, 8))
        model(torch.randn(4, 8))
    decisions = table(tmp_path / "run", "decisions")
    assert decisions.token.tolist() == list(range(7))
    lists = [list(ids) for ids in decisions.experts]
    assert all(len(ids) == 2 for ids in lists)
    assert [ids[1] == -1 for ids in lists] == [False] * 3 + [True] * 4
    assert table(tmp_path / "run", "layer_stats").load[0].sum() == 3 * 2 + 4


def test_an_adapter_that_reads_another_k_than_it_describes(tmp_path):
    register_adapter(_ChoosesMoreAdapter())
    model = _ChoosesMore()
    model.top_k = 2
    recorder = RoutingRecorder(model, tmp_path / "run")
    for step in range(2):
        with (
            pytest.warns(RuntimeWarning, match="chose 1 experts.*top_k=2") if not step else nullcontext(),
            recorder.step(step),
        ):
            model(torch.randn(4, 8))
    recorder.close()
    assert table(tmp_path / "run", "events").kind.tolist() == ["recorder_error"]


def test_micro_batches_weigh_losses_by_their_tokens(tmp_path):
    layer = MoELayer(8, 8, 4, 1, balancer=SwitchAuxLoss(0.5))
    with RoutingRecorder(layer, tmp_path / "run") as recorder, recorder.step(0):
        outs = [layer(torch.randn(n, 8)) for n in (6, 0, 3)]
    losses = [out.losses["aux_loss"].item() / 0.5 for out in outs]
    found = table(tmp_path / "run", "layer_stats").aux_loss[0]
    assert found == pytest.approx((6 * losses[0] + 3 * losses[2]) / 9, rel=1e-6)


def test_memory_does_not_grow_with_the_steps(tmp_path):
    model = two_layers()
    x = torch.randn(2, 64, 8)

    def steps(numbers):
        for step in numbers:
            with recorder.step(step), torch.no_grad():
                forward(model, x)
        recorder.flush()

    recorder = RoutingRecorder(model, tmp_path / "run", flush_steps=50)
    steps(range(50))
    tracemalloc.start()
    steps(range(50, 150))
    before = tracemalloc.get_traced_memory()[0]
    steps(range(150, 450))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    recorder.close()
    assert grown < 300 * 1000  # below 1 kB a step: the memory of which steps there were
