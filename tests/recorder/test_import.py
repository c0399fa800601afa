"""`routescope import` as a person runs it, and what all importers share: nothing overwritten, nothing left half."""

import json
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import sglang_dumps as dumps
from in_process import routescope

from recorder import importers
from recorder.importers import DumpError, import_dump
from recorder.importers.models import model_shape
from recorder.importers.scan import scan
from recorder.reader import Run, list_runs
from recorder.summary import run_row, summarise
from recorder.writer import RunWriter


def test_the_path_is_printed_last_and_runs_pile_up(tmp_path):
    file = dumps.per_token(tmp_path / "expert_distribution_recorder_1764.25_0.pt")
    paths = []
    for _ in range(2):
        result = routescope("import", "sglang", file, "--out", tmp_path / "runs", "--name", "served")
        assert result.returncode == 0, result.stderr
        paths.append(result.stdout.splitlines()[-1])
    assert len(set(paths)) == 2
    assert [str(info.path) for info in list_runs(tmp_path / "runs")] == paths
    assert {info.name for info in list_runs(tmp_path / "runs")} == {"served"}
    assert {info.status for info in list_runs(tmp_path / "runs")} == {"finished"}
    assert sorted(child.name for child in (tmp_path / "runs").iterdir()) == sorted(p.split("/")[-1] for p in paths)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["deepspeed", "a.pt"], "KIND must be one of megatron, sglang, vllm, zip, got 'deepspeed'"),
        (["sglang", "nowhere.pt"], "nowhere.pt: there is no such file"),
        (["vllm", "a.pt"], "a.pt: expected a file that ends in .npy, .npz, .json, .jsonl"),
        (["megatron", "a.pt"], "expected router_trace_rank*.jsonl"),
        (["sglang", "a.pt", "--model", "GPT-9"], "--model 'GPT-9' is no config.json and no name among Mixtral-8x7B"),
        (["sglang", "a.pt", "--model", "Mixtral-8x7B"], "a.pt: has 3 layers, Mixtral-8x7B has 32"),
        (
            ["sglang", "a.pt", "--out", "s3://bucket/runs"],
            "--out must be a folder on this machine, got 's3:/bucket/runs'",
        ),
        (["sglang", "a.pt", "--phase", "serving"], "--phase must be one of train, probe, eval, generate"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    dumps.stat(tmp_path / "a.pt")
    result = routescope("import", *arguments)
    assert result.returncode == 2
    assert expected in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_fault_while_writing_leaves_nothing(tmp_path, monkeypatch):
    class FullError(OSError):
        pass

    def full(*arguments, **options):
        raise FullError("no space left")

    monkeypatch.setattr(importers.write.RunWriter, "log_step", full)
    with pytest.raises(FullError):
        import_dump("sglang", dumps.stat(tmp_path / "a.pt"), tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_large_dump_is_read_in_blocks(tmp_path):
    """64 MB of ids take the memory of a few blocks. Writing is flat too: the writer flushes by rows."""
    array = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.int32, (200_000, 10, 8))
    array[:] = np.arange(8)
    array.flush()
    dump = importers.KINDS["vllm"](tmp_path / "a.npy", importers.Options())
    tracemalloc.start()
    try:
        contents = scan(dump, None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (contents.num_experts, contents.top_k, len(contents.layers)) == (8, 8, 10)
    assert peak < 24 << 20


def test_summaries_take_nulls(tmp_path):
    run = Run(import_dump("sglang", dumps.stat(tmp_path / "a.pt"), tmp_path / "runs"))
    assert summarise(run, phase="train")["steps"] == 0
    assert (summarise(run)["phase"], summarise(run)["steps"]) == ("generate", 2)
    assert run_row(run)["num_experts"] == 4
    run = Run(import_dump("sglang", dumps.stat(tmp_path / "a.pt"), tmp_path / "runs", phase="train"))
    summary = summarise(run)
    assert summary["steps"] == 2
    for layer in summary["layers"]:
        assert layer["tokens"] is None
        assert layer["router_entropy"] is None
        assert layer["drop_rate"] is None
        assert layer["dead_experts"] == 0


def test_a_summary_of_another_phase(tmp_path):
    run = Run(import_dump("sglang", dumps.stat(tmp_path / "a.pt"), tmp_path / "runs"))
    summary = summarise(run, phase="generate")
    assert (summary["phase"], summary["steps"]) == ("generate", 2)
    assert summary["layers"][0]["max_violation"] == 0  # the first layer's counts are even
    assert summary["layers"][1]["max_violation"] == 0.5


def test_ranks_without_weights_and_tokens_merge(tmp_path):
    nothing = {"tokens": None, "gate_mass": None, "mean_prob": None, "invalid": None}
    writers = [RunWriter(tmp_path / "run", rank=rank) for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.log_layer_stats(0, layer=0, router=0, load=np.array([1, rank]), **nothing)
        writer.log_decisions(0, layer=0, router=0, experts_TK=np.array([[0], [rank]]), weights_TK=None)
        writer.log_step(0, tokens=None)
        writer.flush()
        writer.log_decisions(1, layer=0, router=0, experts_TK=np.array([[1]]), weights_TK=np.array([[0.5]]))
    for writer in reversed(writers):
        writer.finalize()
    run = Run(tmp_path / "run")
    row = run.layer_stats(0).iloc[0]
    assert list(row["load"]) == [2, 1]
    assert row[["tokens", "gate_mass", "mean_prob", "invalid"]].isna().all()
    assert run.steps()["tokens"].isna().all()
    assert run.decisions(0, 0)["weights"].isna().all()
    assert [list(weights) for weights in run.decisions(1, 0)["weights"]] == [[0.5], [0.5]]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[[0, 2**31 - 1]]], np.int32), "beyond number 65535"),
        (np.tile(np.array([0, 1], np.int32), (1, 5000, 1)), "has 5000 layers"),
    ],
)
def test_what_no_model_has_is_refused(tmp_path, array, expected):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DumpError, match=expected):
        import_dump("vllm", tmp_path / "a.npy", tmp_path / "runs")


def test_cancelled_imports_leave_nothing(tmp_path):
    np.save(tmp_path / "a.npy", np.tile(np.arange(8, dtype=np.int16), (200_000, 6, 1)))
    process = subprocess.Popen(
        [sys.executable, "-m", "recorder.cli", "import", "vllm", tmp_path / "a.npy", "--out", tmp_path / "runs"],
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not list((tmp_path / "runs").glob(".importing-*/*/run.json")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < until
        time.sleep(0.01)
    assert list_runs(tmp_path / "runs") == []
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert process.stderr.read() == "routescope: cancelled; nothing was imported\n"
    assert list((tmp_path / "runs").iterdir()) == []


def test_published_models_by_name():
    shape = model_shape("deepseek-ai/DeepSeek-V3")
    assert (shape.num_layers, shape.moe_layers[0], shape.num_experts, shape.top_k) == (61, 3, 256, 8)
    assert len(shape.moe_layers) == 58


CONFIGS = {
    "mixtral": ({"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}, [0, 1, 2, 3]),
    "qwen": (
        {
            "num_hidden_layers": 6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        [1, 5],
    ),
    "deepseek": (
        {
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
        },
        [1, 2, 3],
    ),
    "a list": (
        {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": [0, 1, 1]},
        [1, 2],
    ),
    "llama 4": (
        {
            "text_config": {
                "num_hidden_layers": 4,
                "num_local_experts": 8,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
            }
        },
        [1, 3],
    ),
    "dbrx": ({"n_layers": 2, "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2}}, [0, 1]),
}


@pytest.mark.parametrize(("config", "moe"), CONFIGS.values(), ids=CONFIGS)
def test_configs_tell_the_moe_layers(tmp_path, config, moe):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        shape = model_shape(str(path))
        assert (list(shape.moe_layers), shape.num_experts) == (moe, 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "no model's config.json"),
        ("[]", "no model's config.json"),
        ('{"num_hidden_layers": 3}', "none of num_local_experts"),
        ('{"num_hidden_layers": 3, "num_experts": 2, "num_experts_per_tok": 4}', "4 experts per token of 2"),
        (
            '{"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 4, "first_k_dense_replace": 9}',
            "which layers are MoE",
        ),
        (
            '{"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 4, "first_k_dense_replace": 3}',
            "no MoE layer",
        ),
    ],
)
def test_configs_that_do_not_tell_are_refused(tmp_path, text, expected):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=expected):
        model_shape(str(tmp_path / "config.json"))
