"""Cached loads say what the files say, notice when those change, and never raise for a run they cannot read."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from app import data
from recorder.reader import Run
from recorder.writer import RunWriter

ROOT = Path(__file__).resolve().parents[2]
WriteRun = Callable[..., Path]


def opened(path: Path) -> Run:
    run, error = data.open_run(path)
    assert run is not None, error
    return run


def test_layer_stats_are_the_rows_of_the_parquet_files(shown: Path, write_run: WriteRun) -> None:
    path = write_run(shown, "a", range(500, 520, 2), bias=True)
    stats = data.layer_stats(opened(path), 3)
    rows = pd.read_parquet(path / "layer_stats")
    rows = rows[rows["layer"] == 3].sort_values("step")
    np.testing.assert_array_equal(stats.steps_S, rows["step"])
    np.testing.assert_array_equal(stats.load_SE, np.stack(rows["load"].tolist()))
    np.testing.assert_allclose(stats.gate_mass_SE, np.stack(rows["gate_mass"].tolist()))
    assert stats.expert_bias_SE is not None
    np.testing.assert_allclose(stats.expert_bias_SE, np.stack(rows["expert_bias"].tolist()))
    np.testing.assert_allclose(stats.router_entropy_S, 0.9)
    assert (stats.num_experts, stats.top_k, stats.layer) == (4, 1, 3)
    # Step 500, layer 3: token t goes to expert (500 + t + 3) % 4, so 8 tokens are 2 for each of 4 experts.
    assert stats.load_SE[stats.at(500)].tolist() == [2, 2, 2, 2]
    assert np.isnan(stats.aux_loss_S).all(), "null, not 0: there was none"
    with pytest.raises(ValueError, match="501"):
        stats.at(501)
    with pytest.raises(ValueError, match="read-only"):
        stats.load_SE[0, 0] = 1


def test_no_bias_is_none_and_a_dense_layer_is_refused(shown: Path, write_run: WriteRun) -> None:
    run = opened(write_run(shown, "a", range(3)))
    assert data.layer_stats(run, 1).expert_bias_SE is None
    with pytest.raises(ValueError, match="layer 0 is no MoE layer of run a; these are: 1, 3"):
        data.layer_stats(run, 0)


def test_decisions_and_tokens(shown: Path, write_run: WriteRun) -> None:
    run = opened(write_run(shown, "a", range(25)))
    assert data.decision_steps(run).tolist() == [0, 10, 20]
    frame = data.decisions(run, 10, 3)
    assert [int(experts[0]) for experts in frame["experts"]] == [(10 + token + 3) % 4 for token in range(8)]
    assert data.tokens(run, 10)["text"].tolist() == [f"w{token}" for token in range(8)]
    assert len(data.decisions(run, 11, 3)) == len(data.tokens(run, 11)) == 0
    assert data.phases(run) == ["train"]


def test_a_growing_run_is_seen_to_grow(shown: Path, write_run: WriteRun) -> None:
    path = write_run(shown, "a", range(3), status="running")
    assert opened(path).status == "running"
    assert len(data.steps(opened(path))) == 3
    [listed] = data.listed()
    assert data.row(listed)["num_steps"] == 3
    before = data.layer_stats(opened(path), 1)
    writer = RunWriter(shown / "b")  # another run beside it, and more of the first
    writer.finalize()
    _append(path, step=3)
    assert len(data.steps(opened(path))) == 4
    assert data.layer_stats(opened(path), 1).steps_S.tolist() == [0, 1, 2, 3]
    assert before.steps_S.tolist() == [0, 1, 2]
    assert {run.reference: data.row(run)["num_steps"] for run in data.listed()} == {"a": 4, "b": 0}


def _append(path: Path, *, step: int) -> None:
    """One more part of each table, as its writer would add it."""
    for table in ("steps", "layer_stats"):
        part = max((path / table).glob("*.parquet"))
        frame = pd.read_parquet(part)
        last = frame[frame["step"] == frame["step"].max()].assign(step=step)
        number = int(part.stem.rsplit("-", 1)[1]) + 1
        last.to_parquet(part.with_name(f"part-r00000-{number:06d}.parquet"))


def test_a_run_recorded_anew_under_the_same_name_is_another(shown: Path, write_run: WriteRun) -> None:
    path = write_run(shown, "a", range(5))
    assert len(data.steps(opened(path))) == 5
    shutil.rmtree(path)
    write_run(shown, "a", range(2))
    assert len(data.steps(opened(path))) == 2


def test_rows_of_the_list(shown: Path, write_run: WriteRun) -> None:
    write_run(shown, "a", range(200), name="A run")
    [run] = data.listed()
    row = data.row(run)
    assert (row["run_id"], row["name"], row["reference"], row["status"]) == ("a", "A run", "a", "finished")
    assert (row["balancer"], row["num_experts"], row["last_step"], row["error"]) == ("none", 4, 199, None)
    assert row["num_steps"] == 200
    assert 2 <= len(row["loss_curve"]) <= data.SPARK_POINTS
    assert (row["loss_curve"][0], row["loss_curve"][-1]) == (8.0, 0.04)
    assert row["violation_curve"] == [0.0] * len(row["violation_curve"])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "\0\0",
        '{"format_version": 99}',
        '{"format_version": 1, "model": {"layers": 3}}',
        '{"format_version": 1, "model": {"layers": [3]}}',
        '{"format_version": 1, "model": {"layers": [{"index": "one"}]}}',
        '{"format_version": 1, "model": [3]}',
        '{"format_version": 1, "config": 7}',
    ],
)
def test_an_unreadable_run_never_raises_through(shown: Path, write_run: WriteRun, content: str) -> None:
    write_run(shown, "good", range(3))
    path = write_run(shown, "bad", range(3))
    (path / "run.json").write_text(content)
    rows = {run.reference: data.row(run) for run in data.listed()}
    assert rows["good"]["status"] == "finished"
    assert set(rows) == {"good", "bad"}
    assert rows["bad"]["loss"] is None
    run, error = data.open_run(path)
    assert run is None
    assert error == rows["bad"]["error"]
    assert error
    assert "\n" not in error


def test_bad_parts_leave_the_rest(shown: Path, write_run: WriteRun) -> None:
    path = write_run(shown, "a", range(3))
    (path / "steps" / "part-r00000-000099.parquet").write_bytes(b"PAR1")
    run = opened(path)
    assert len(data.steps(run)) == 3
    assert len(run.problems) == 1


def test_a_run_that_vanishes_is_an_error_line(shown: Path, write_run: WriteRun) -> None:
    path = write_run(shown, "a", range(3))
    opened(path)
    shutil.rmtree(path)
    run, error = data.open_run(path)
    assert run is None
    assert error
    assert data.listed() == []
    assert data.find("a") is None


def test_find_stays_inside_the_shown_folders(shown: Path, write_run: WriteRun, tmp_path: Path) -> None:
    write_run(shown, "a", range(2))
    write_run(tmp_path / "elsewhere", "b", range(2))
    found = data.find("a")
    assert found is not None
    assert found.path == shown / "a"
    for reference in ("b", "../elsewhere/b", str(tmp_path / "elsewhere" / "b"), "", None, "runs/../a"):
        assert data.find(reference) is None


@pytest.mark.slow
def test_200_runs_are_listed_fast_the_second_time(shown: Path, write_run: WriteRun) -> None:
    model = write_run(shown, "000", range(3))
    for number in range(1, 200):
        shutil.copytree(model, shown / f"{number:03d}")
    first = [data.row(run) for run in data.listed()]
    started = time.perf_counter()
    second = [data.row(run) for run in data.listed()]
    assert time.perf_counter() - started < 1.0
    assert first == second
    assert len(second) == 200


def test_no_module_of_app_loads_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, app\n"
        "names = [module.name for module in pkgutil.walk_packages(app.__path__, 'app.')]\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "assert 'app.views.recording' in names and 'app.main' in names, names\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
