import os
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from toy_runs import (
    NEVER,
    bare_run,
    good_parts,
    log_toy_step,
)

import recorder.parts
import recorder.reader
from recorder.manifest import this_process
from recorder.merge import kept_rows
from recorder.reader import Run, RunNotFoundError, RunUnreadableError, list_runs
from recorder.schema import lists_to_matrix
from recorder.writer import RunWriter


def test_no_run(tmp_path):
    with pytest.raises(RunNotFoundError, match="no such folder"):
        Run(tmp_path / "none")
    with pytest.raises(RunNotFoundError, match=r"holds no run\.json"):
        Run(tmp_path)
    with pytest.raises(FileNotFoundError):
        Run(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b'{"format_version": 1, ', "not JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "no run manifest"),
        (b"{}", "no whole number as format_version"),
        (b'{"format_version": 99}', "format_version 99; this routescope reads up to 1"),
    ],
)
def test_unreadable_run(tmp_path, content, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_bytes(content)
    with pytest.raises(RunUnreadableError, match=message) as caught:
        Run(tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "run") in str(caught.value)


def test_text_that_cannot_be_printed_is_read_as_text_that_can(tmp_path):
    bare_run(tmp_path / "run", name="half a pair \ud83d", domains=["whole \U0001f600", "\udcff"])
    run = Run(tmp_path / "run")
    assert (run.name, run.domains) == ("half a pair ?", ["whole \U0001f600", "?"])


def test_phases(tmp_path):
    load = {"layer": 0, "router": 0, "tokens": 1, "load": [1], "gate_mass": [1], "mean_prob": [1]}
    with RunWriter(tmp_path / "run") as writer:
        assert Run(writer.path).phases == []
        for step, phase in ((0, "generate"), (0, "train"), (5, "train"), (3, "eval")):
            writer.log_layer_stats(step, phase=phase, **load)
    assert Run(writer.path).phases == ["train", "eval", "generate"]


def test_list_runs(tmp_path):
    bare_run(tmp_path / "b", name="late", created_at="2026-03-01T00:00:00+00:00")
    bare_run(tmp_path / "a", created_at="2026-04-01T00:00:00+00:00", status="failed", error="no memory")
    bare_run(tmp_path / "more" / "c", created_at="2026-02-01T00:00:00+00:00", run_id="own-id")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").write_text("")
    found = list_runs(tmp_path, str(tmp_path / "more"), tmp_path / "missing", tmp_path / "file")
    assert [info.run_id for info in found] == ["broken", "own-id", "b", "a"]
    assert [info.status for info in found] == ["unreadable", "finished", "finished", "failed"]
    assert "not JSON" in found[0].error
    assert found[0].manifest is None
    assert found[2].name == "late"
    assert found[3].error == "no memory"
    assert list_runs() == list_runs(tmp_path / "missing") == []
    assert [info.run_id for info in list_runs(tmp_path / "a")] == ["a"]


@pytest.mark.parametrize("name", ["007", "010", "run=1e3"], ids="D3-{}".format)
def test_d3_names_stay_strings(tmp_path, name):
    writer = RunWriter(tmp_path / name, **NEVER)
    log_toy_step(writer, 0, 3)
    writer.flush()
    log_toy_step(writer, 1, 4)
    writer.finalize()
    run = Run(tmp_path / name)
    assert (run.run_id, run.name) == (name, name)
    assert [info.run_id for info in list_runs(tmp_path)] == [name]
    frames = [run.steps(), run.layer_stats(), run.decisions(1, 0), run.tokens(1), run.events()]
    for frame, table in zip(frames, recorder.reader.TABLES, strict=True):
        assert list(frame.columns) == recorder.schema.SCHEMAS[table].names


def test_status_of_a_running_run(tmp_path):
    now = pd.Timestamp.now(tz="UTC")
    fresh, stale = now.isoformat(), (now - pd.Timedelta(seconds=61)).isoformat()
    here = this_process()
    elsewhere = {"pid": here["pid"], "started_at": here["started_at"], "host": "another-machine"}
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for number, (process, heartbeat, expected) in enumerate(
        [
            (here, stale, "running"),  # a long step: the process is there
            (here | {"started_at": here["started_at"] - 100}, fresh, "unfinished"),  # the pid was used again
            (here | {"pid": gone.pid}, fresh, "unfinished"),
            (elsewhere, fresh, "running"),
            (elsewhere, stale, "unfinished"),
            (None, fresh, "running"),
            (None, stale, "unfinished"),
            (None, None, "unfinished"),
            ({"pid": "x"}, "yesterday", "unfinished"),
            (here | {"pid": -1}, fresh, "unfinished"),
            (here | {"started_at": 10**400}, fresh, "unfinished"),
        ]
    ):
        path = bare_run(tmp_path / str(number), status="running", process=process, heartbeat_at=heartbeat)
        assert Run(path).status == expected, (process, heartbeat)


def test_frames_are_sorted_typed_and_the_callers_own(tmp_path):
    writer = RunWriter(tmp_path / "run", flush_steps=1, **NEVER)
    for step in (3, 1, 2):
        log_toy_step(writer, step, step, layers=((5, 1), (2, 0)))
    writer.log_step(2, phase="probe", tokens=9)
    writer.log_event(2, "non_finite", "loss is nan")
    writer.flush()
    run = Run(tmp_path / "run")
    steps = run.steps()
    assert list(zip(steps["step"], steps["phase"], strict=True)) == [
        (1, "train"),
        (2, "probe"),
        (2, "train"),
        (3, "train"),
    ]
    assert run.steps("probe")["tokens"].to_list() == [9]
    stats = run.layer_stats()
    assert stats[["step", "layer"]].to_numpy().tolist() == [[1, 2], [1, 5], [2, 2], [2, 5], [3, 2], [3, 5]]
    assert run.layer_stats(5)["router"].to_list() == [1, 1, 1]
    assert run.layer_stats(phase="probe").empty
    assert run.load(2).tolist() == [[1, 7], [2, 6], [3, 5]]
    assert run.load(2).dtype == run.load_steps(2).dtype == np.int64
    assert run.load_steps(2).tolist() == [1, 2, 3]
    assert run.events()["message"].to_list() == ["loss is nan"]
    assert run.tokens(3)["text"].to_list() == ["3"] * 4
    for frame in (steps, stats, run.decisions(1, 2), run.tokens(1), run.events()):
        assert all(isinstance(dtype, pd.ArrowDtype) for dtype in frame.dtypes)
    steps["loss"] = 0.0
    steps.loc[0, "tokens"] = 99
    run.load(2)[:] = 0
    assert run.steps()["tokens"].to_list() == [4, 9, 4, 4]
    assert run.steps("train")["loss"].to_list() == [1.0, 2.0, 3.0]
    assert run.load(2).sum() == 24


def test_a_run_without_rows(tmp_path):
    layers = [{"index": 0, "kind": "dense"}, {"index": 1, "kind": "moe", "router": 0, "num_experts": 6, "top_k": 2}]
    RunWriter(tmp_path / "run", manifest={"model": {"layers": layers}})
    run = Run(tmp_path / "run")
    assert (run.status, run.last_step, run.segments, run.ranks, run.problems) == ("running", None, [], 1, [])
    assert [layer["index"] for layer in run.moe_layers] == [1]
    for frame, table in zip(
        [run.steps(), run.layer_stats(), run.decisions(0, 1), run.tokens(0), run.events()],
        recorder.reader.TABLES,
        strict=True,
    ):
        assert len(frame) == 0
        assert list(frame.columns) == recorder.schema.SCHEMAS[table].names
    assert run.load(1).shape == (0, 6)
    assert run.load_steps(1).shape == run.decision_steps().shape == (0,)
    with pytest.raises(ValueError, match="layer 0 is no MoE layer"):
        run.load(0)


def test_unknown_phase(tmp_path):
    run = Run(bare_run(tmp_path / "run"))
    for call in (run.steps, run.decision_steps, lambda phase: run.load(0, phase), lambda phase: run.tokens(0, phase)):
        with pytest.raises(ValueError, match="train, probe, eval, generate, got 'test'"):
            call("test")


def test_a_layer_with_two_routers(tmp_path):
    with RunWriter(tmp_path / "run", **NEVER) as writer:
        log_toy_step(writer, 0, 3, layers=((1, 0), (1, 1)))
    run = Run(tmp_path / "run")
    for call in (run.load, run.load_steps, lambda layer, **more: run.decisions(0, layer, **more)):
        with pytest.raises(ValueError, match=r"layer 1 has routers \[0, 1\]"):
            call(1)
        assert len(call(1, router=1)) > 0
    assert run.layer_stats(1)["router"].to_list() == [0, 1]


def test_big_layer_stats_are_read_by_layer(tmp_path, monkeypatch):
    """Above the size that is kept whole: the same rows, layer by layer."""
    with RunWriter(tmp_path / "run", **NEVER) as writer:
        for step in range(600):
            log_toy_step(writer, step, step % 8, layers=[(2 * number, number) for number in range(12)], decisions=False)
    whole = Run(tmp_path / "run")
    expected = {layer: whole.layer_stats(layer) for layer in range(0, 24, 2)}
    monkeypatch.setattr(recorder.reader, "_WHOLE_STATS_BYTES", 0)
    run = Run(tmp_path / "run")
    for layer, frame in expected.items():
        pd.testing.assert_frame_equal(run.layer_stats(layer), frame)
        assert run.load(layer)[:, 0].tolist() == [step % 8 for step in range(600)]
    assert "layer_stats" not in run._kept


def test_repeated_calls_read_nothing_again(tmp_path, monkeypatch):
    with RunWriter(tmp_path / "run", **NEVER) as writer:
        log_toy_step(writer, 0, 3)
    run = Run(tmp_path / "run")

    def everything():
        return run.steps(), run.layer_stats(), run.layer_stats(0), run.load(0), run.events(), run.decision_steps()

    everything()
    monkeypatch.setattr(pq, "ParquetFile", lambda *_, **__: pytest.fail("read again"))
    monkeypatch.setattr(pq, "read_metadata", lambda *_: pytest.fail("read again"))
    everything()
    assert not run.refresh()
    everything()


def test_decisions_read_only_their_row_groups(tmp_path, monkeypatch):
    monkeypatch.setitem(recorder.parts._MIN_GROUP_ROWS_OF, "decisions", 1000)  # a router's rows of a step
    with RunWriter(tmp_path / "run", **NEVER) as writer:
        for step in range(5):
            for layer in (1, 3):
                ids = np.full((1000, 2), step)
                writer.log_decisions(step, layer=layer, router=layer // 2, experts_TK=ids, weights_TK=ids * 1.0)
    run = Run(tmp_path / "run")
    read, read_row_groups = [], pq.ParquetFile.read_row_groups

    def spy(self, groups, *arguments, **options):
        read.append(list(groups))
        return read_row_groups(self, groups, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", spy)
    frame = run.decisions(3, 3)
    assert read == [[7]]
    assert len(frame) == 1000
    assert (lists_to_matrix(frame["experts"]) == 3).all()
    assert run.decisions(9, 3).empty
    assert run.decision_steps().tolist() == [0, 1, 2, 3, 4]
    assert len(read) == 1


def test_x1_resumed_run(tmp_path):
    """Steps 0-79 by a process that is killed, 60-119 by another that resumes."""
    code = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        from toy_runs import log_toy_step
        from recorder.writer import RunWriter
        writer = RunWriter(sys.argv[1], flush_steps=8, flush_seconds=1e9)
        for step in range(80):
            log_toy_step(writer, step, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    here = str(__file__).rsplit("/", 1)[0]
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run"), here])
    assert killed.returncode == -9
    run = Run(tmp_path / "run")
    assert (run.status, run.last_step) == ("unfinished", 79)

    writer = RunWriter(tmp_path / "run", resume=True, manifest={"run_id": "other", "seed": 5}, flush_steps=8, **NEVER)
    assert run.refresh()
    assert (run.status, run.last_step, len(run.steps())) == ("running", 79, 80)
    for step in range(60, 120):
        log_toy_step(writer, step, 2)
    for finish in (writer.flush, writer.finalize):
        finish()
        run.refresh()
        steps = run.steps()
        assert steps["step"].to_list() == list(range(120))
        assert steps["loss"].to_list() == [1.0] * 60 + [2.0] * 60
        assert (steps["loss"][59], steps["loss"][60], steps["loss"][70]) == (1.0, 2.0, 2.0)
        assert run.load(0).tolist() == [[1, 7]] * 60 + [[2, 6]] * 60
        assert run.load_steps(0).tolist() == list(range(120))
        assert run.decision_steps().tolist() == list(range(120))
        assert [len(run.decisions(step, 0)) for step in (59, 60, 79, 80)] == [4] * 4
        assert [run.decisions(step, 0)["experts"][0][0] for step in (59, 60)] == [1, 0]
        assert [set(run.tokens(step)["text"]) for step in (59, 60, 79)] == [{"1"}, {"2"}, {"2"}]
        events = run.events()
        assert events[["step", "kind", "segment"]].to_numpy().tolist() == [[60, "resumed", 1]]
        assert [(part.segment, part.first_step, part.last_step) for part in run.segments] == [(0, 0, 59), (1, 60, 119)]
        assert run.last_step == 119
    assert (run.run_id, run.manifest["seed"], run.manifest["segment"]) == ("run", 5, 1)


def test_x1_three_segments(tmp_path):
    for segment, (first, last) in enumerate([(0, 30), (20, 50), (10, 15)]):
        writer = RunWriter(tmp_path / "run", resume=segment > 0, **NEVER)
        for step in range(first, last):
            log_toy_step(writer, step, segment)
        writer.finalize("cancelled")
    run = Run(tmp_path / "run")
    assert run.steps()["loss"].to_list() == [0.0] * 10 + [2.0] * 5
    assert (run.last_step, len(run.segments)) == (14, 3)
    assert [(part.first_step, part.last_step) for part in run.segments] == [(0, 9), (20, 9), (10, 14)]
    assert run.events()["step"].to_list() == [10]


def test_kept_rows_by_hand():
    steps, segments = np.array([0, 5, 9, 5, 9, 12]), np.array([0, 0, 0, 1, 1, 2])
    assert kept_rows(steps, segments, {0: 0, 1: 5, 2: 9}).tolist() == [True, False, False, True, False, True]


def test_fingerprint(tmp_path):
    writer = good_parts(tmp_path / "run")
    writer.flush()
    run, again = Run(tmp_path / "run"), Run(tmp_path / "run")
    assert run.fingerprint == again.fingerprint
    assert hash(run.fingerprint) == hash(again.fingerprint)
    writer.update_manifest(seed=3)
    assert run.refresh()
    assert run.fingerprint != again.fingerprint
    assert run.manifest["seed"] == 3
    log_toy_step(writer, 9, 1)
    assert again.refresh()
    assert again.steps()["step"].to_list() == [0, 1, 2, 3, 4, 9]
    for file in tmp_path.glob("run/run.json"):
        file.unlink()
    with pytest.raises(RunNotFoundError):
        again.refresh()


@pytest.mark.parametrize("module", ["recorder.reader", "recorder.writer", "recorder.summary"])
def test_no_torch(module):
    code = f"import sys, {module}; from recorder import Run, RunWriter, list_runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_manifest_that_is_no_file_is_refused_at_once(tmp_path, kind):
    (tmp_path / "run.json").mkdir() if kind == "folder" else os.mkfifo(tmp_path / "run.json")
    with pytest.raises(RunUnreadableError, match=r"run\.json is no file"):
        Run(tmp_path)
