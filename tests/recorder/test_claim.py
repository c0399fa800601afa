import json
import math
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from toy_runs import (
    NEVER,
    log_stats,
    model,
    start,
)

from recorder.reader import Run
from recorder.writer import RunExistsError, RunNotFoundError, RunWriter


def race(tmp_path, code, processes=2):
    """Outcomes of real processes that start their writer at the same moment."""
    gate = tmp_path / "gate"
    code = (
        """
        print("ready", flush=True)
        while not os.path.exists(args[1]):
            pass
        try:
        """
        + textwrap.indent(textwrap.dedent(code), " " * 12)
        + """
            print("won", flush=True)
        except RunExistsError:
            print("refused", flush=True)
        """
    )
    running = [start(code, tmp_path / "run", gate, number) for number in range(processes)]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    gate.write_text("")
    outcomes = []
    for process in running:
        out, err = process.communicate(timeout=60)
        assert not err
        outcomes.append(out.strip())
    return outcomes


def test_manifest_of_a_new_run(tmp_path):
    manifest = model() | {"name": "first", "config": {"lr": float("nan"), "n": np.int64(3), "out": Path("x")}}
    writer = RunWriter(tmp_path / "deep" / "007", manifest=manifest)
    assert writer.run_id == "007"
    stored = json.loads((writer.path / "run.json").read_text(), parse_constant=pytest.fail)
    assert stored == writer.manifest
    assert stored["format_version"] == 1
    assert (stored["run_id"], stored["name"]) == ("007", "first")
    assert (stored["status"], stored["error"], stored["last_step"], stored["segment"]) == ("running", None, None, 0)
    assert stored["config"] == {"lr": None, "n": 3, "out": "x"}
    assert stored["process"]["pid"] == os.getpid()
    assert stored["recorded"]["weights"] == "rounded"
    assert {"python", "torch", "numpy", "pyarrow", "routescope"} <= stored["versions"].keys()


def test_manifest_keeps_as_text_what_json_cannot_hold(tmp_path):
    @dataclass
    class Inner:
        lr: float = 0.5

    cyclic: dict[str, object] = {"n": 1}
    cyclic["self"] = cyclic
    deep: list[object] = []
    for _ in range(3000):
        deep = [deep]
    config = {
        **{"x": object(), "cyclic": cyclic, "deep": deep, "big": 10**5000, "inner": Inner(), "half": "\ud800"},
        **{"seed": 2**64 - 1, "type": float},
    }
    writer = RunWriter(tmp_path / "run", manifest={"config": config})
    stored = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert stored == writer.manifest["config"]
    assert stored["x"].startswith("<object object at")
    assert stored["cyclic"]["self"].startswith("{'n': 1")
    assert (stored["big"], stored["seed"], stored["half"]) == ("<int>", 2**64 - 1, "?")
    assert (stored["inner"], stored["type"]) == ({"lr": 0.5}, "<class 'float'>")


@pytest.mark.parametrize("domains", [[1, 2], 5, "code"])
def test_values_that_no_reader_takes_create_nothing(tmp_path, domains):
    with pytest.raises(ValueError, match="domains"):
        RunWriter(tmp_path / "run", manifest={"domains": domains})
    assert not (tmp_path / "run").exists()
    writer = RunWriter(tmp_path / "other")
    with pytest.raises(ValueError, match="domains"):
        writer.update_manifest(domains=domains)
    assert Run(tmp_path / "other").manifest["domains"] == []


def test_a_second_writer_in_one_process_is_refused(tmp_path):
    first = RunWriter(tmp_path / "run")
    with pytest.raises(RunExistsError, match="close that writer first"):
        RunWriter(tmp_path / "run", resume=True)
    first.finalize()
    assert RunWriter(tmp_path / "run", resume=True).segment == 1


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    writer, at_home = RunWriter("here"), RunWriter("~/there")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for of, path in ((writer, tmp_path / "here"), (at_home, tmp_path / "home" / "there")):
        of.log_step(0, tokens=1)
        of.finalize()
        assert Run(path).steps().step.tolist() == [0]


def test_a_path_that_is_no_utf8_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no UTF-8"):
        RunWriter(tmp_path / "run\udcff")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("flush_seconds", "a"),
        ("flush_seconds", -1),
        ("join_seconds", math.nan),
        ("flush_rows", 1.5),
        ("flush_bytes", 0),
        ("flush_steps", True),
        ("rank", "a"),
        ("share", -1),
    ],
)
def test_options_out_of_range_are_named(tmp_path, option, value):
    with pytest.raises(ValueError, match=f"^{option} must be a .*, got {value!r}"):
        RunWriter(tmp_path / "run", **{option: value})
    assert not (tmp_path / "run").exists()


def test_update_manifest(tmp_path):
    writer = RunWriter(tmp_path / "run")
    writer.update_manifest(seed=7, domains=["code"])
    stored = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (stored["seed"], stored["domains"]) == (7, ["code"])
    with pytest.raises(ValueError, match="run_id cannot be changed"):
        writer.update_manifest(run_id="other")
    with pytest.raises(ValueError, match="'done'"):
        writer.update_manifest(status="done")


def test_r20_second_writer_is_refused(tmp_path):
    first = RunWriter(tmp_path / "run", **NEVER)
    first.log_step(0, tokens=1, loss=1.0)
    with pytest.raises(RunExistsError, match=str(tmp_path / "run")):
        RunWriter(tmp_path / "run")
    first.finalize()
    with pytest.raises(RunExistsError):
        RunWriter(tmp_path / "run")
    assert Run(tmp_path / "run").steps()["loss"].to_list() == [1.0]


def test_r20_folder_with_parts_or_a_file_in_its_place_is_refused(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.log_step(0, tokens=1)
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(RunExistsError, match="part files"):
        RunWriter(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunExistsError, match="is a file"):
        RunWriter(tmp_path / "file")


def test_r20_two_processes_at_once(tmp_path):
    outcomes = race(
        tmp_path,
        """
        with RunWriter(args[0], flush_steps=1) as writer:
            for step in range(20):
                writer.log_step(step, tokens=int(args[2]))
        """,
    )
    assert sorted(outcomes) == ["refused", "won"]
    run = Run(tmp_path / "run")
    assert (run.status, run.problems) == ("finished", [])
    assert run.steps()["tokens"].to_list() == [outcomes.index("won")] * 20


def test_r20_two_processes_resume_at_once(tmp_path):
    RunWriter(tmp_path / "run").finalize("failed")
    outcomes = race(
        tmp_path,
        """
        writer = RunWriter(args[0], resume=True)
        time.sleep(1.5)
        writer.finalize()
        """,
    )
    assert sorted(outcomes) == ["refused", "won"]
    assert Run(tmp_path / "run").manifest["segment"] == 1


def test_resume_without_a_run(tmp_path):
    with pytest.raises(RunNotFoundError, match="no such folder"):
        RunWriter(tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("flush_seconds", -1), ("flush_rows", 0), ("flush_bytes", 0), ("flush_steps", 0), ("rank", -1)],
)
def test_settings_out_of_range(tmp_path, option, value):
    with pytest.raises(ValueError, match=f"{option} must be .*{value}"):
        RunWriter(tmp_path / "run", **{option: value})


def test_two_ranks(tmp_path):
    with pytest.raises(RunNotFoundError, match="rank 1 waited 0 s"):
        RunWriter(tmp_path / "run", rank=1, join_seconds=0)
    writers = [RunWriter(tmp_path / "run", rank=rank, **NEVER) for rank in range(2)]
    for rank, writer in enumerate(writers):
        for step in range(3):
            log_stats(writer, step, load=[(3, 1), (0, 12)][rank], dropped=np.array([rank, 1]))
            writer.log_step(step, tokens=[4, 12][rank], loss=[1.0, 2.0][rank], wall_time_s=[0.5, 0.25][rank])
            writer.log_decisions(step, layer=0, router=0, experts_TK=np.full((2, 1), rank), weights_TK=np.ones((2, 1)))
    with pytest.raises(ValueError, match="only rank 0"):
        writers[1].update_manifest(seed=1)
    writers[1].finalize()
    assert Run(tmp_path / "run").status == "running"
    writers[0].finalize()
    with pytest.raises(RunExistsError, match="rank 1"):
        RunWriter(tmp_path / "run", rank=1)
    run = Run(tmp_path / "run")
    assert (run.status, run.ranks, len(run.steps())) == ("finished", 2, 3)
    assert run.load(0).tolist() == [[3, 13]] * 3
    stats = run.layer_stats()
    assert stats["tokens"].to_list() == [16] * 3
    assert [list(row) for row in stats["dropped"]] == [[1, 2]] * 3
    assert [list(row) for row in stats["gate_mass"]] == [[1.5, 6.5]] * 3
    # (4 * [.75, .25] + 12 * [0, 1]) / 16
    assert [list(row) for row in stats["mean_prob"]] == [[0.1875, 0.8125]] * 3
    steps = run.steps()
    assert steps["tokens"].to_list() == [16] * 3
    assert steps["loss"].to_list() == [1.75] * 3
    assert steps["wall_time_s"].to_list() == [0.5] * 3
    assert run.decisions(1, 0)[["rank", "token"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
