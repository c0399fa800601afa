"""Megatron's router traces: lines and binary files as its tracer writes them."""

import json

import numpy as np
import pytest
import torch

from recorder.importers import DumpError, import_dump
from recorder.reader import Run

E, K, T = 8, 2, 5


def choices(seed, tokens=T, top_k=K, experts=E):
    """As from a boolean routing map: ascending ids."""
    order = np.argsort(np.random.default_rng(seed).random((tokens, experts)), axis=1)
    return np.sort(order[:, :top_k], axis=1)


class Trace:
    """A folder of one rank's trace, grown line by line."""

    def __init__(self, folder, rank=0):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rank, self.offset = folder, rank, 0
        self.file = folder / f"router_trace_rank{rank}.jsonl"
        self.file.write_text("")
        self.logits = folder / f"logits_rank{rank}.bin"

    def line(self, step, layer, ids, /, *, block="decoder", logits=None, **more):
        record = {"step": step, "stage": "pre_dispatch", "block": block, "layer": layer, "rank": self.rank}
        record |= {"num_tokens": len(ids), "topk": ids.shape[1] if ids.ndim == 2 else K}
        if logits is not None:
            data = logits.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
            with self.logits.open("ab") as stream:
                stream.write(data)
            record |= {"logit_offset": self.offset, "logit_bytes": len(data), "logit_shape": list(logits.shape)}
            self.offset += len(data)
        record |= {"top_indices": ids.tolist()} | more
        with self.file.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        return self


def imported(file, tmp_path, **options):
    return Run(import_dump("megatron", file, tmp_path / "runs", **options))


def refused(file, tmp_path, expected, **options):
    with pytest.raises(DumpError, match=expected) as caught:
        import_dump("megatron", file, tmp_path / "runs", **options)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "runs").glob("*"))
    return str(caught.value)


def experts(run, step, layer, phase="train"):
    return np.array(run.decisions(step, layer, phase)["experts"].tolist())


def test_lines_become_decisions_and_loads(tmp_path):
    trace = Trace(tmp_path / "trace")
    for step in range(3):
        for layer in (1, 3):
            trace.line(step, layer, choices(10 * step + layer))
    run = imported(trace.file, tmp_path)
    assert run.manifest["source"] == "import: Megatron router trace"
    assert [(layer["index"], layer["module"]) for layer in run.moe_layers] == [
        (1, "decoder.layers.1"),
        (3, "decoder.layers.3"),
    ]
    for step in range(3):
        for layer in (1, 3):
            expected = choices(10 * step + layer)
            np.testing.assert_array_equal(experts(run, step, layer), expected)
            assert (
                run.load(layer)[step].tolist()
                == np.bincount(expected.ravel(), minlength=E).tolist()[: len(run.load(layer)[step])]
            )
    assert run.steps("train")["tokens"].tolist() == [T] * 3
    frame = run.layer_stats()
    for name in ("gate_mass", "mean_prob", "expert_bias", "dropped", "invalid", "router_entropy", "z_loss"):
        assert frame[name].isna().all(), name


def test_the_folder_of_one_rank_is_enough_and_phase_is_a_choice(tmp_path):
    trace = Trace(tmp_path / "trace").line(0, 0, choices(0))
    run = imported(trace.folder, tmp_path, phase="generate")
    np.testing.assert_array_equal(experts(run, 0, 0, "generate"), choices(0))
    Trace(tmp_path / "trace", rank=1).line(0, 0, choices(1))
    with pytest.raises(DumpError, match=r"router_trace_rank0.jsonl, router_trace_rank1.jsonl, expected one"):
        import_dump("megatron", trace.folder, tmp_path / "more")


def test_micro_batches_are_numbered_on(tmp_path):
    trace = Trace(tmp_path / "trace").line(0, 0, choices(0)).line(0, 1, choices(1))
    trace.line(0, 0, choices(2, tokens=3)).line(0, 1, choices(3, tokens=3))
    run = imported(trace.file, tmp_path)
    np.testing.assert_array_equal(experts(run, 0, 1), np.concatenate([choices(1), choices(3, tokens=3)]))
    assert run.decisions(0, 1)["token"].tolist() == list(range(8))
    assert run.steps("train")["tokens"].tolist() == [8]
    assert any("micro-batches" in message for message in run.events()["message"])


def test_mtp_layers_stand_after_the_decoder(tmp_path):
    trace = Trace(tmp_path / "trace").line(0, 0, choices(0)).line(0, 1, choices(1))
    trace.line(0, 0, choices(2), block="mtp", mtp_idx=0).line(0, 0, choices(3), block="mtp", mtp_idx=1)
    run = imported(trace.file, tmp_path)
    assert [layer["index"] for layer in run.moe_layers] == [0, 1, 2, 3]
    assert [layer["router"] for layer in run.moe_layers] == [0, 1, 2, 3]
    np.testing.assert_array_equal(experts(run, 0, 2), choices(2))
    np.testing.assert_array_equal(experts(run, 0, 3), choices(3))


@pytest.mark.parametrize("function", ["softmax", "sigmoid", None])
def test_logits_tell_probabilities_and_z_loss(tmp_path, function):
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(0))
    trace = Trace(tmp_path / "trace").line(0, 0, choices(0)).line(1, 0, choices(1), logits=logits)
    trace.line(2, 0, choices(2), logits=logits * 2).line(2, 0, choices(3))  # a micro-batch without logits
    if function is not None:
        state = {0: {"weight": torch.zeros(E, 4), "expert_bias": None, "score_function": function, "topk": K}}
        torch.save(state, trace.folder / "router_state_rank0.pt")
    rows = imported(trace.file, tmp_path).layer_stats(0)
    seen = logits.to(torch.bfloat16).double()
    assert rows["z_loss"][1] == pytest.approx(float(torch.logsumexp(seen, 1).square().mean()))
    assert rows["z_loss"].isna().tolist() == [True, False, True]
    if function is None:
        assert rows["mean_prob"].isna().all()
        return
    probs = seen.softmax(1) if function == "softmax" else seen.sigmoid() / seen.sigmoid().sum(1, keepdim=True)
    np.testing.assert_allclose(rows["mean_prob"][1], probs.mean(0), rtol=1e-6)
    entropy = float(torch.distributions.Categorical(probs).entropy().mean()) / np.log(E)
    assert rows["router_entropy"][1] == pytest.approx(entropy)
    assert rows["mean_prob"].isna().tolist() == [True, False, True]


def test_e_is_the_width_of_the_logits(tmp_path):
    trace = Trace(tmp_path / "trace").line(0, 0, np.array([[0, 1]]), logits=torch.zeros(1, 64))
    assert imported(trace.file, tmp_path).moe_layers[0]["num_experts"] == 64


def test_a_missing_binary_file_is_refused(tmp_path):
    trace = Trace(tmp_path / "trace").line(0, 0, choices(0), logits=torch.zeros(T, E))
    trace.logits.unlink()
    assert "logits_rank0.bin is not beside it" in refused(trace.file, tmp_path, "line 1 names logits")


def test_a_cut_binary_file_is_refused(tmp_path):
    trace = Trace(tmp_path / "trace").line(0, 0, choices(0), logits=torch.zeros(T, E))
    trace.logits.write_bytes(trace.logits.read_bytes()[:-1])
    assert str(trace.logits) in refused(trace.file, tmp_path, "cut off")


def test_hidden_states_are_not_needed(tmp_path):
    trace = Trace(tmp_path / "trace").line(0, 0, choices(0), hs_offset=0, hs_bytes=40, hs_shape=[T, 4])
    run = imported(trace.file, tmp_path)
    assert any("hidden states are left out" in message for message in run.events()["message"])


@pytest.mark.parametrize("end", ["{", '{"step": 1', "null", "[]", "1 2", '{"step": 1}'])
def test_a_broken_line_is_refused(tmp_path, end):
    trace = Trace(tmp_path / "trace").line(0, 0, choices(0))
    with trace.file.open("a") as stream:
        stream.write(end + "\n")
    assert str(trace.file) in refused(trace.file, tmp_path, "line 2")


THREE = choices(1, top_k=3).tolist()
LOGITS = {"logit_offset": 0, "logit_bytes": T * E * 2, "logit_shape": [T, E]}
WRONG = {
    "k differs": ({"topk": 3, "top_indices": THREE}, "line 2 has topk 3, the first has 2"),
    "k lies": (
        {"topk": 2, "top_indices": THREE},
        r"line 2 has top_indices .*expected.*\(5, 2\)",
    ),
    "fewer tokens": ({"num_tokens": 4}, r"\(4, 2\)"),
    "another rank": ({"rank": 1}, "of rank 1"),
    "back in time": ({"step": 0}, "step 0 after 1"),
    "another stage": ({"stage": "post_dispatch"}, "'post_dispatch'"),
    "another block": ({"block": "encoder"}, "'encoder'"),
    "floats": ({"top_indices": (choices(1) + 0.5).tolist()}, "float64"),
    "uneven": ({"top_indices": [[0, 1], [2]]}, "top_indices"),
    "below -1": ({"top_indices": (choices(1) - 9).tolist()}, "expert id -"),
    "twice": ({"top_indices": [[1, 1]] * T}, "takes an expert twice"),
    "a text as layer": ({"layer": "3"}, "layer '3'"),
    "huge step": ({"step": 10**30}, "has step"),
    "E differs": (LOGITS | {"logit_bytes": T * 2, "logit_shape": [T, 1]}, "logits of 1 experts"),
    "logits of another batch": (
        {"logit_offset": 0, "logit_bytes": 6 * E * 2, "logit_shape": [6, E]},
        "bytes of logits",
    ),
    "huge logits": ({"logit_offset": 0, "logit_bytes": T * 2 * 10**12, "logit_shape": [T, 10**12]}, "experts"),
    "logits before the file": (
        {"logit_offset": -1, "logit_bytes": T * E * 2, "logit_shape": [T, E]},
        "bytes of logits",
    ),
    "id beyond the logits": ({"top_indices": [[0, 99]] * T}, "expert id 99, expected 0 to 7"),
}


@pytest.mark.parametrize(("changes", "expected"), WRONG.values(), ids=WRONG)
def test_lines_that_do_not_fit_are_refused(tmp_path, changes, expected):
    trace = Trace(tmp_path / "trace").line(1, 0, choices(0), logits=torch.zeros(T, E))
    trace.line(2, 0, choices(1), **changes)
    refused(trace.file, tmp_path, expected)


def test_an_empty_trace_is_refused(tmp_path):
    refused(Trace(tmp_path / "trace").file, tmp_path, "is empty")
    trace = Trace(tmp_path / "blank")
    trace.file.write_text("\n\n")
    refused(trace.file, tmp_path, "holds no record")
