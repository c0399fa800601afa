"""RoutingRecorder on our own layers: what stands in the run equals the model's own tensors."""

import copy
import math
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_core import MoELayer, MoETransformer, MoETransformerConfig, SwitchAuxLoss
from moe_core.balancers import attach_balancers, make_balancer
from recorder import RoutingRecorder, Run
from recorder.describe import describe_model


def table(path, name):
    return pq.read_table(path / name).to_pandas()


def transformer(**changes):
    torch.manual_seed(0)
    options = {"vocab_size": 50, "d_model": 16, "num_heads": 2, "d_ff": 24, "num_experts": 4, **changes}
    return MoETransformer(MoETransformerConfig(**options))


def test_decisions_stats_and_losses_equal_the_models_tensors(tmp_path):
    model = transformer(top_k=2, balancer="sign-bias+aux+z", capacity_factor=0.5, num_layers=4)
    ids = torch.randint(50, (3, 7))
    with (
        RoutingRecorder(model, tmp_path / "run", domains=("a", "b"), full_weights=True) as recorder,
        recorder.step(0, token_ids=ids, domains=["a", "b", "a"], text=[f"t{i}" for i in range(21)]),
    ):
        out = model(ids, labels=ids)
        recorder.log(loss=out.loss, **out.losses)

    stats, decisions, tokens = (table(tmp_path / "run", t) for t in ("layer_stats", "decisions", "tokens"))
    assert stats.layer.tolist() == [1, 3]
    assert stats.router.tolist() == [0, 1]
    for layer in (1, 3):
        routing, row = out.routings[layer], stats[stats.layer == layer].iloc[0]
        here = decisions[decisions.layer == layer]
        assert here.token.tolist() == list(range(21))
        assert np.stack(here.experts).tolist() == routing.expert_ids_TK.tolist()
        np.testing.assert_array_equal(np.stack(here.weights), routing.weights_TK.detach().numpy())
        assert np.stack(here.kept).tolist() == routing.kept_TK.tolist()
        assert row.tokens == 21
        counted = np.bincount(routing.expert_ids_TK.flatten().numpy(), minlength=4)
        assert row.load.tolist() == counted.tolist()
        lost = routing.expert_ids_TK[~routing.kept_TK].numpy()
        assert len(lost) > 0
        assert row.dropped.tolist() == np.bincount(lost, minlength=4).tolist()
        probs = routing.logits_TE.detach().double().softmax(-1).numpy()
        np.testing.assert_allclose(row.mean_prob, probs.mean(0), rtol=1e-5)
        entropy = -(probs * np.log(probs)).sum(-1).mean() / math.log(4)
        assert row.router_entropy == pytest.approx(entropy, rel=1e-5)
        mass = [routing.weights_TK[routing.expert_ids_TK == e].sum().item() for e in range(4)]
        np.testing.assert_allclose(row.gate_mass, mass, rtol=1e-5)
        assert row.aux_loss == pytest.approx(4 * (counted / 42 * probs.mean(0)).sum(), rel=1e-5)
        assert row.z_loss == pytest.approx(routing.logits_TE.logsumexp(-1).square().mean().item(), rel=1e-5)
        assert row.expert_bias.tolist() == [0, 0, 0, 0]
        assert row.rerouted == 0
    step = table(tmp_path / "run", "steps").iloc[0]
    for name, value in {"loss": out.loss, **out.losses}.items():
        assert step[name] == pytest.approx(value.item(), rel=1e-6), name
    assert tokens.token_id.tolist() == ids.flatten().tolist()
    assert tokens.text.tolist() == [f"t{i}" for i in range(21)]
    assert tokens.domain.tolist() == ["a"] * 7 + ["b"] * 7 + ["a"] * 7
    assert tokens.sequence.tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert tokens.position.tolist() == list(range(7)) * 3


def test_no_loss_of_a_kind_is_null_and_not_zero(tmp_path):
    model = transformer()
    ids = torch.randint(50, (1, 5))
    with RoutingRecorder(model, tmp_path / "run") as recorder, recorder.step(0):
        out = model(ids, labels=ids)
        recorder.log(loss=out.loss)
    stats = pq.read_table(tmp_path / "run" / "layer_stats")
    for column in ("aux_loss", "z_loss", "expert_bias", "rerouted", "dropped"):
        assert stats[column].null_count == len(stats), column
    steps = pq.read_table(tmp_path / "run" / "steps")
    assert steps["aux_loss"].null_count == 1


def test_r13_the_bias_recorded_is_the_one_of_its_step(tmp_path):
    layer = MoELayer(8, 8, 4, 1, balancer=make_balancer("sign-bias", 4, 1))
    move = torch.tensor([-0.001, 0.001, 0.001, -0.001])
    with RoutingRecorder(layer, tmp_path / "run") as recorder:
        for step in range(3):
            layer.balancer.expert_bias += move
            with recorder.step(step):
                layer(torch.randn(6, 8))
    first = [bias[0] for bias in table(tmp_path / "run", "layer_stats").expert_bias]
    assert first == pytest.approx([-0.001, -0.002, -0.003], abs=1e-7)


def test_the_quantile_bias_recorded_is_the_one_that_routed(tmp_path):
    layer = MoELayer(8, 8, 4, 1, balancer=make_balancer("quantile", 4, 1))
    used = []
    with RoutingRecorder(layer, tmp_path / "run") as recorder:
        for step in range(3):
            used.append(layer.balancer.expert_bias.tolist())
            with recorder.step(step):
                layer(torch.randn(64, 8))
    stats = table(tmp_path / "run", "layer_stats")
    assert [bias.tolist() for bias in stats.expert_bias] == used
    assert used[1] != used[0]
    assert stats.rerouted[0] == 0
    assert stats.rerouted[1] > 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_activations_are_recorded_once(tmp_path, use_reentrant):
    layers = nn.ModuleList(MoELayer(8, 8, 4, 2) for _ in range(2))
    model = nn.ModuleDict({"layers": layers})
    with RoutingRecorder(model, tmp_path / "run") as recorder, recorder.step(0):
        x = torch.randn(6, 8, requires_grad=True)
        h = checkpoint(lambda x: layers[0](x).hidden, x, use_reentrant=use_reentrant)
        layers[1](h).hidden.square().sum().backward()
    stats = table(tmp_path / "run", "layer_stats")
    assert stats.layer.tolist() == [0, 1]
    assert [load.sum() for load in stats.load] == [12, 12]
    assert len(table(tmp_path / "run", "decisions")) == 12


@pytest.mark.parametrize("told", ["layer", "recorder"])
def test_r6_padding_is_left_out(tmp_path, told):
    layer = MoELayer(8, 8, 4, 2)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    ids = torch.arange(10).view(2, 5)
    with (
        RoutingRecorder(layer, tmp_path / "run") as recorder,
        recorder.step(0, token_ids=ids, attention_mask=mask if told == "recorder" else None),
    ):
        layer(torch.randn(2, 5, 8), token_mask=mask.bool() if told == "layer" else None)
    stats = table(tmp_path / "run", "layer_stats").iloc[0]
    assert stats.tokens == 8
    assert stats.load.sum() == 16
    tokens = table(tmp_path / "run", "tokens")
    assert tokens.token_id.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert tokens.position.tolist() == [2, 3, 4, 0, 1, 2, 3, 4]
    assert table(tmp_path / "run", "decisions").token.tolist() == tokens.token.tolist()
    assert table(tmp_path / "run", "steps").tokens.tolist() == [8]


def test_micro_batches_of_one_step_are_numbered_on_and_summed(tmp_path):
    torch.manual_seed(0)
    layer = MoELayer(8, 8, 4, 1, balancer=SwitchAuxLoss(0.5))
    batches = [torch.randn(2, 3, 8), torch.randn(1, 3, 8)]
    outs = []
    with RoutingRecorder(layer, tmp_path / "run") as recorder, recorder.step(7, token_ids=np.arange(9)):
        outs = [layer(x) for x in batches]
    stats = table(tmp_path / "run", "layer_stats").iloc[0]
    assert stats.step == 7
    assert stats.load.tolist() == (outs[0].routing.load() + outs[1].routing.load()).tolist()
    per_batch = [out.losses["aux_loss"].item() / 0.5 for out in outs]
    assert stats.aux_loss == pytest.approx((6 * per_batch[0] + 3 * per_batch[1]) / 9, rel=1e-6)
    tokens = table(tmp_path / "run", "tokens")
    assert tokens.token.tolist() == list(range(9))
    assert tokens.sequence.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_forwards_outside_a_step_are_not_recorded_and_close_leaves_no_trace(tmp_path):
    model = transformer()
    hooks_before = [len(m._forward_hooks) for m in model.modules()]
    ids = torch.randint(50, (1, 5))
    recorder = RoutingRecorder(model, tmp_path / "run")
    model(ids)
    with recorder.step(0):
        model(ids)
    recorder.close()
    recorder.close()
    assert [len(m._forward_hooks) for m in model.modules()] == hooks_before
    assert table(tmp_path / "run", "layer_stats").step.tolist() == [0, 0]


def test_invalid_rows_are_counted_apart(tmp_path):
    layer = MoELayer(8, 8, 4, 1)
    x = torch.randn(5, 8)
    x[3] = math.nan
    with RoutingRecorder(layer, tmp_path / "run") as recorder, recorder.step(0):
        layer(x)
    stats = table(tmp_path / "run", "layer_stats").iloc[0]
    assert (stats.tokens, stats.invalid, stats.load.sum()) == (4, 1, 4)
    assert np.isfinite(stats.mean_prob).all()
    assert np.stack(table(tmp_path / "run", "decisions").experts)[3].tolist() == [-1]


def test_a_failing_step_writes_nothing_and_marks_the_run_failed(tmp_path):
    layer = MoELayer(8, 8, 4, 1)
    recorder = RoutingRecorder(layer, tmp_path / "run")

    def train():
        with recorder:
            for step in range(2):
                with recorder.step(step):
                    layer(torch.randn(5, 8))
                    _ = 1 / (1 - step)

    with pytest.raises(ZeroDivisionError):
        train()
    assert table(tmp_path / "run", "layer_stats").step.tolist() == [0]
    manifest = recorder.writer.manifest
    assert (manifest["status"], manifest["error"]) == ("failed", "ZeroDivisionError: division by zero")


def test_wrong_use_is_named(tmp_path):
    layer = MoELayer(8, 8, 4, 1)
    with pytest.raises(ValueError, match="Linear holds no MoELayer"):
        RoutingRecorder(nn.Linear(2, 2), tmp_path / "none")
    with pytest.raises(ValueError, match="decisions_every must be .* at least 1, got 0"):
        RoutingRecorder(layer, tmp_path / "none", decisions_every=0)
    assert not (tmp_path / "none").exists()
    recorder = RoutingRecorder(layer, tmp_path / "run")
    with pytest.raises(FileExistsError, match="run"):
        RoutingRecorder(layer, tmp_path / "run")
    with pytest.raises(RuntimeError, match="open step"):
        recorder.log(loss=1.0)
    with (
        pytest.raises(ValueError, match=r"token_ids has shape \(2,\).*5 tokens in 1 sequences"),
        recorder.step(0, token_ids=[1, 2]),
    ):
        layer(torch.randn(5, 8))
    with pytest.raises(RuntimeError, match="step 2 was opened inside step 1"), recorder.step(1), recorder.step(2):
        pass
    recorder.close()


@pytest.mark.parametrize(
    "changes", [{}, {"num_shared_experts": 2, "top_k": 3, "expert_d_ff": 10, "activation": "gelu"}]
)
def test_parameter_counts_equal_the_model(changes):
    model = transformer(**changes)
    description = describe_model(model)
    assert [layer["kind"] for layer in description["layers"]] == ["dense", "moe", "dense", "moe"]
    assert description["parameters_total"] == sum(p.numel() for p in model.parameters())
    for layer in description["layers"]:
        block = model.layers[layer["index"]]
        assert layer["parameters_total"] == sum(p.numel() for p in block.mlp.parameters())
        assert layer["block_parameters_total"] == sum(p.numel() for p in block.parameters())
    # active = parameters with a gradient after one token (one parameter per expert); embedding rows aside
    model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]]))
    one = transformer(**changes)
    hidden = torch.randn(1, 1, 16)
    moe = one.layers[1].mlp
    moe(hidden).hidden.square().sum().backward()
    active = sum(p.numel() for p in moe.parameters() if p.grad is not None)
    assert description["layers"][1]["parameters_active"] == active
    saved = sum(layer["parameters_total"] - layer["parameters_active"] for layer in description["layers"])
    assert description["parameters_active"] == description["parameters_total"] - saved


def test_training_with_and_without_the_recorder_is_the_same(tmp_path):
    def train(recorder_path):
        model = transformer(balancer="quantile")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        attach_balancers(model, optimizer)
        recorder = RoutingRecorder(model, recorder_path) if recorder_path else None
        for step in range(5):
            torch.manual_seed(step)
            ids = torch.randint(50, (2, 9))
            if recorder:
                with recorder.step(step, token_ids=ids):
                    loss = model(ids, labels=ids).loss
                    loss.backward()
            else:
                loss = model(ids, labels=ids).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if recorder:
            recorder.close()
        return model.state_dict()

    plain, recorded = train(None), train(tmp_path / "run")
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)


def test_a_step_is_recorded_once(tmp_path):
    layer = MoELayer(8, 8, 4, 1)
    with RoutingRecorder(layer, tmp_path / "run") as recorder:
        for step in (3, 4, 1):
            with recorder.step(step):
                layer(torch.randn(5, 8))
        with pytest.raises(ValueError, match="step 3 of phase 'train' is recorded already"), recorder.step(3):
            pass
        with recorder.step(3, phase="eval"):
            layer(torch.randn(5, 8))
        with pytest.raises(ValueError, match="step 4 of phase 'train' is recorded already"):
            recorder.writer.log_step(4, tokens=1)
    assert recorder.writer.manifest["last_step"] == 4
    assert sorted(table(tmp_path / "run", "steps").step) == [1, 3, 3, 4]


@pytest.mark.parametrize(
    "given",
    [
        {"token_ids": [1, 2]},
        {"domains": ["a"]},
        {"domains": ["nowhere"] * 2},
        {"domains": [1, 2]},
        {"text": ["x"]},
        {"token_ids": [2**40] * 6},
    ],
)
def test_what_does_not_fit_leaves_nothing_of_the_step(tmp_path, given):
    layer = MoELayer(8, 8, 4, 1)
    recorder = RoutingRecorder(layer, tmp_path / "run", domains=("a", "b"))
    with recorder.step(0):
        layer(torch.randn(2, 3, 8))
    with pytest.raises((ValueError, TypeError)), recorder.step(1, **given):
        layer(torch.randn(2, 3, 8))
    recorder.close()
    assert recorder.writer.manifest["last_step"] == 0
    for name in ("steps", "layer_stats", "decisions", "tokens"):
        assert set(table(tmp_path / "run", name).step) == {0}, name


def test_unknown_scalars_are_named(tmp_path):
    layer = MoELayer(8, 8, 4, 1)
    with RoutingRecorder(layer, tmp_path / "run") as recorder, recorder.step(0):
        layer(torch.randn(5, 8))
        with pytest.raises(ValueError, match="does not know perplexity; it takes loss, ce_loss"):
            recorder.log(perplexity=3.0)


def test_a_deep_copy_of_the_model_is_not_recorded(tmp_path):
    layer = MoELayer(8, 8, 4, 1)
    with RoutingRecorder(layer, tmp_path / "run") as recorder, recorder.step(0):
        layer(torch.randn(5, 8))
        copy.deepcopy(layer)(torch.randn(7, 8))
    assert table(tmp_path / "run", "layer_stats").tokens.tolist() == [5]


def test_a_single_vector_is_one_token(tmp_path):
    layer = MoELayer(8, 8, 4, 1)
    with RoutingRecorder(layer, tmp_path / "run") as recorder, recorder.step(0):
        layer(torch.randn(8))
    assert table(tmp_path / "run", "layer_stats").tokens.tolist() == [1]


def test_a_step_takes_the_time_inside_its_context_unless_told(tmp_path):
    layer = MoELayer(8, 8, 4, 1)
    with RoutingRecorder(layer, tmp_path / "run") as recorder:
        with recorder.step(0):
            layer(torch.randn(3, 8))
            time.sleep(0.05)
        with recorder.step(1):
            layer(torch.randn(3, 8))
            recorder.log(wall_time_s=7.0)
    measured, told = Run(tmp_path / "run").steps().wall_time_s
    assert 0.05 <= measured < 5
    assert told == 7
