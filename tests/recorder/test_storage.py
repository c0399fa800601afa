"""Runs in an object store, on a real S3 server; what only concerns local files is in the other tests."""

import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import boto3
import pyarrow.parquet as pq
import pytest
from toy_runs import NEVER, bare_run, layer, log_stats, log_toy_step, model, small_parts, start

from recorder import Run, RunWriter, list_runs, storage
from recorder.manifest import RunExistsError, RunNotFoundError, RunUnreadableError
from recorder.object_store import ObjectPath, StorageError
from recorder.storage import locate


def keys(place):
    """Every object below a place, markers of folders left out."""
    bucket, _, prefix = str(place).removeprefix("s3://").partition("?")[0].partition("/")
    found = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]).list_objects_v2(
        Bucket=bucket, Prefix=prefix
    )
    return sorted(item["Key"] for item in found.get("Contents", []) if not item["Key"].endswith("/"))


# ------------------------------------------------------------------------------------------------ names of places


def test_a_place_reads_like_a_path(s3):
    place = locate(f"{s3}/runs//one/")
    assert isinstance(place, ObjectPath)
    assert str(place) == f"{s3}/runs/one"
    assert (place.name, str(place.parent), place.parent.name) == ("one", f"{s3}/runs", "runs")
    assert place == locate(f"{s3}/runs") / "one" == locate(s3) / "runs/one"
    assert len({place, locate(f"{s3}/runs/one")}) == 1
    assert place.resolve() is place
    assert pickle.loads(pickle.dumps(place)) == place
    assert (locate(s3).name, locate(s3).parent) == (s3.removeprefix("s3://"), locate(s3))


@pytest.mark.parametrize("name", ["007", "run=1e3", "a b", "50%", "ä?#"], ids=lambda name: f"D3-{name}")
def test_d3_names_stay_as_they_are(s3, name):
    RunWriter(locate(s3) / "runs" / name).finalize()
    [info] = list_runs(f"{s3}/runs")
    assert (info.run_id, info.path.name) == (name, name)
    if "#" not in name and "?" not in name:
        assert Run(str(info.path)).run_id == name


def test_options_of_a_uri_stay_behind_it(s3, s3_endpoint, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = f"?endpoint_override={s3_endpoint}"
    place = locate(f"{s3}/runs{options}") / "one"
    assert str(place) == f"{s3}/runs/one{options}"
    RunWriter(str(place)).finalize()
    assert [str(info.path) for info in list_runs(f"{s3}/runs{options}")] == [str(place)]


def test_secrets_in_a_uri_are_not_shown(s3):
    place = locate(f"s3://key:secret@{s3.removeprefix('s3://')}/runs/one")
    RunWriter(place).finalize()
    assert str(place) == f"{s3}/runs/one"
    assert "secret" not in repr(place) + str(place / "x") + str(place.parent)
    assert pickle.loads(pickle.dumps(place)).exists()


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3://bucket/run?speed=high", "option speed is unknown; known are region"),
        (Path("s3://bucket/run"), "give it as a str"),
    ],
)
def test_places_that_cannot_be(uri, said):
    with pytest.raises(ValueError, match=said) as caught:
        Run(uri)
    assert "\n" not in str(caught.value)


def test_a_kind_of_store_that_is_not_known(s3):
    with pytest.raises(StorageError, match="nowhere://bucket/run"):
        Run("nowhere://bucket/run")


def test_local_places_stay_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate("runs/a:b") == tmp_path / "runs/a:b"
    assert locate(tmp_path) == tmp_path
    assert locate(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    with pytest.raises(ValueError, match="slashes"):
        RunWriter(Path("s3://bucket/run"))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------ whole runs


def test_write_read_grow_and_close(s3):
    path = f"{s3}/runs/one"
    writer = small_parts(path, steps=range(3))
    run = Run(path)
    assert (run.run_id, run.status, run.last_step) == ("one", "running", 2)
    assert run.steps()["loss"].to_list() == [0.0, 1.0, 2.0]
    assert run.decisions(1, 0)["experts"].map(list).to_list() == [[1, 1]] * 600
    assert not run.refresh()
    log_stats(writer, 3, load=(1, 2, 3, 3))
    writer.log_step(3, tokens=600, loss=3.0)
    assert run.refresh()
    assert run.steps()["loss"].to_list() == [0.0, 1.0, 2.0, 3.0]
    before = run.decisions(2, 0)
    writer.finalize()
    assert run.refresh()
    assert (run.status, run.problems) == ("finished", [])
    assert run.load(0).tolist() == [[1, 2, 3, step] for step in range(4)]
    assert run.decisions(2, 0).equals(before)
    assert run.decision_steps().tolist() == [0, 1, 2]
    parts = [key.rpartition("runs/one/")[2] for key in keys(path)]
    assert parts == [
        "decisions/part-r00000-000003.parquet",
        "layer_stats/part-r00000-000004.parquet",
        "run.json",
        "steps/part-r00000-000004.parquet",
    ]


def test_the_same_rows_as_in_a_local_run(s3, tmp_path):
    for path in (f"{s3}/one", tmp_path / "one"):
        with RunWriter(path, flush_steps=2) as writer:
            for step in range(7):
                log_toy_step(writer, step, step, layers=((1, 0), (3, 1)))
            writer.log_event(3, "non_finite", "a loss")
    stored, local = Run(f"{s3}/one"), Run(tmp_path / "one")
    for frames in zip(*((r.steps(), r.layer_stats(), r.tokens(5), r.events()) for r in (stored, local)), strict=True):
        assert frames[0].equals(frames[1])
    assert stored.decisions(4, 3).equals(local.decisions(4, 3))


def test_any_parquet_tool_reads_it(s3):
    import pandas as pd

    small_parts(f"{s3}/one").finalize()
    assert pd.read_parquet(f"{s3}/one/steps")["step"].to_list() == list(range(12))


def test_r18_killed_in_the_middle(s3):
    process = start(
        """
        writer = RunWriter(args[0], flush_steps=10, flush_seconds=1e9)
        for step in range(58):
            ids, weights = np.zeros((50, 2), int), np.ones((50, 2))
            writer.log_decisions(step, layer=0, router=0, experts_TK=ids, weights_TK=weights)
            writer.log_step(step, tokens=50)
        print("there", flush=True)
        time.sleep(60)
        """,
        f"{s3}/one",
    )
    assert process.stdout.readline() == "there\n", process.stderr.read()
    process.kill()
    process.wait()
    run = Run(f"{s3}/one")
    assert (run.status, run.problems) == ("unfinished", [])
    assert run.steps()["step"].to_list() == list(range(50))
    with RunWriter(f"{s3}/one", resume=True, flush_steps=1) as writer:
        assert writer.segment == 1
        for step in range(45, 55):
            writer.log_step(step, tokens=1)
    assert run.refresh()
    assert run.steps()["tokens"].to_list() == [50] * 45 + [1] * 10
    assert run.events()["kind"].to_list() == ["resumed"]


def test_killed_during_an_upload_leaves_no_half_object(s3):
    process = start(
        """
        writer = RunWriter(args[0], flush_seconds=1e9, flush_rows=10**9)
        rng = np.random.default_rng(0)
        print("there", flush=True)
        step = 0
        while True:
            ids, weights = rng.integers(0, 64, (200_000, 8)), rng.random((200_000, 8))
            writer.log_decisions(step, layer=0, router=0, experts_TK=ids, weights_TK=weights)
            writer.flush()
            step += 1
        """,
        f"{s3}/one",
    )
    assert process.stdout.readline() == "there\n", process.stderr.read()
    deadline = time.monotonic() + 60
    while not any("decisions" in key for key in keys(f"{s3}/one")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = Run(f"{s3}/one")
    steps = run.decision_steps().tolist()
    assert steps == list(range(len(steps)))
    assert len(steps) >= 1
    assert len(run.decisions(steps[-1], 0)) == 200_000
    assert run.problems == []


def test_several_ranks(s3):
    first = RunWriter(f"{s3}/one", manifest=model(layer(0, 0, 2)) | {"world_size": 2})
    second = RunWriter(f"{s3}/one", rank=1)
    for rank, writer in enumerate((first, second)):
        log_stats(writer, 0, load=(rank + 1, 4))
        writer.log_step(0, tokens=5)
    second.finalize()
    first.finalize()
    run = Run(f"{s3}/one")
    assert run.ranks == 2
    assert run.load(0).tolist() == [[3, 8]]
    with pytest.raises(RunExistsError, match="rank 1"):
        RunWriter(f"{s3}/one", rank=1)


def test_r20_a_run_that_is_there_is_refused(s3):
    writer = RunWriter(f"{s3}/one")
    with pytest.raises(RunExistsError, match=f"{s3}/one already holds a run"):
        RunWriter(f"{s3}/one")
    writer.finalize()
    with pytest.raises(RunNotFoundError, match="nothing is stored under it"):
        RunWriter(f"{s3}/two", resume=True)


def test_r20_a_live_writer_is_not_taken_over(s3):
    process = start('RunWriter(args[0]); print("there", flush=True); time.sleep(60)', f"{s3}/one")
    try:
        assert process.stdout.readline() == "there\n", process.stderr.read()
        with pytest.raises(RunExistsError, match=f"process {process.pid}"):
            RunWriter(f"{s3}/one", resume=True)
    finally:
        process.kill()
        process.wait()


def test_r20_one_that_writes_after_us_wins(s3, monkeypatch):
    """No lock and no conditional put: who reads back another's content gives up."""
    put = ObjectPath.put

    def overtaken(place, content):
        put(place, content)
        put(place, bytes(content) + b" ")

    monkeypatch.setattr(ObjectPath, "put", overtaken)
    with pytest.raises(RunExistsError, match="already holds a run"):
        RunWriter(f"{s3}/one")
    monkeypatch.undo()


def test_a_second_change_within_a_second_is_seen(s3):
    writer = RunWriter(f"{s3}/one", manifest={"name": "aaa"})
    run = Run(f"{s3}/one")
    for name in ("bbb", "ccc", "ddd"):  # same length
        writer.update_manifest(name=name)
        assert run.refresh()
        assert run.name == name


# ------------------------------------------------------------------------------------------------------------ lists


def test_a_bucket_as_folder_of_runs(s3):
    RunWriter(f"{s3}/one").finalize()
    [info] = list_runs(s3)
    assert (str(info.path), info.path.parent) == (f"{s3}/one", locate(s3))


def test_list_runs(s3, tmp_path):
    for number in range(3):
        RunWriter(f"{s3}/runs/run-{number}", manifest={"name": f"run {number}"}).finalize()
    (locate(s3) / "runs" / "notes" / "a.txt").put(b"")
    (locate(s3) / "runs" / "bad" / "run.json").put(b"{")
    bare_run(tmp_path / "local")
    infos = {info.run_id: info for info in list_runs(f"{s3}/runs", tmp_path)}
    assert sorted(infos) == ["bad", "local", "run-0", "run-1", "run-2"]
    assert (infos["run-1"].name, infos["run-1"].status) == ("run 1", "finished")
    assert infos["bad"].status == "unreadable"
    assert f"{s3}/runs/bad/run.json is not JSON" in infos["bad"].error
    assert [info.run_id for info in list_runs(f"{s3}/runs/run-0")] == ["run-0"]
    assert list_runs(f"{s3}/none") == []


def test_damaged_parts_are_named_and_the_rest_is_read(s3):
    writer = small_parts(f"{s3}/one", steps=range(5))
    steps = writer.path / "steps"
    whole = (steps / "part-r00000-000001.parquet").read_bytes()
    (steps / "part-r00000-000001.parquet").put(whole[:-1])
    (steps / "part-r00000-000002.parquet").put(b"")
    run = Run(f"{s3}/one")
    assert run.steps()["step"].to_list() == [0, 3, 4]
    assert [line.partition(":")[0] for line in run.problems] == [
        "steps/part-r00000-000001.parquet",
        "steps/part-r00000-000002.parquet",
    ]


# --------------------------------------------------------------------------------------------------- when it fails


@pytest.mark.parametrize("small", [0, 1 << 16], ids=["ranges", "whole parts"])
def test_a_part_is_not_called_bad_because_the_network_was(s3, wire, monkeypatch, small):
    monkeypatch.setattr(storage, "_SMALL_BYTES", small)
    path = f"{s3}/one?endpoint_override={wire.address}"
    small_parts(path, steps=range(3))
    run, other = Run(path), Run(path)
    assert run.decision_steps().tolist() == [0, 1, 2]
    storage._content.cache_clear()
    wire.down = True
    for read in (run.steps, lambda: run.decisions(1, 0), other.steps, run.refresh):
        with pytest.raises(StorageError, match="cannot be reached") as caught:
            read()
        assert "\n" not in str(caught.value)
        assert f"{s3}/one" in str(caught.value)
    wire.down = False
    assert run.steps()["step"].to_list() == other.steps()["step"].to_list() == [0, 1, 2]
    assert len(run.decisions(1, 0)) == 600
    assert run.problems == other.problems == []


def test_a_flush_that_fails_is_repeated_and_loses_nothing(s3, wire):
    path = f"{s3}/one?endpoint_override={wire.address}"
    writer = RunWriter(path, flush_steps=1, flush_seconds=0.2)
    log_toy_step(writer, 0, 0)
    wire.down = True
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(1, 5):
            log_toy_step(writer, step, step)
            time.sleep(0.1)
    [said] = [str(warning.message) for warning in warned]
    assert re.search(r"will be tried again: .*s3://.*cannot be reached", said)
    wire.down = False
    time.sleep(1.1)  # a second between two attempts
    log_toy_step(writer, 5, 5)
    run = Run(path)
    assert run.steps()["step"].to_list() == list(range(6))
    assert [len(run.decisions(step, 0)) for step in range(6)] == [4] * 6
    writer.finalize()
    assert run.refresh()
    assert run.steps()["loss"].to_list() == list(range(6))


def test_closing_waits_for_the_store_and_then_says_so(s3, wire):
    path = f"{s3}/one?endpoint_override={wire.address}"
    writer = RunWriter(path, flush_seconds=0.01)
    wire.down = True
    with pytest.raises(StorageError, match="cannot be reached"):
        writer.finalize()
    wire.down = False
    assert Run(path).manifest["status"] == "running", "nobody could write that it has failed"


def test_nothing_listens(s3):
    started = time.monotonic()
    with pytest.raises(StorageError, match="cannot be reached.*endpoint_override"):
        Run(f"{s3}/one?endpoint_override=http://127.0.0.1:1")
    with pytest.raises(StorageError, match="cannot be reached"):
        RunWriter(f"{s3}/one?endpoint_override=http://127.0.0.1:1")
    with pytest.raises(StorageError, match="cannot be reached"):
        list_runs(f"{s3}/runs?endpoint_override=http://127.0.0.1:1")
    assert time.monotonic() - started < 20


def test_no_such_bucket(s3):
    with pytest.raises(RunNotFoundError, match="there is no bucket s3://no-such-bucket"):
        Run("s3://no-such-bucket/runs/one")
    with pytest.raises(StorageError, match="there is no such bucket"):
        RunWriter("s3://no-such-bucket/runs/one")
    (locate(s3) / "one" / "run.json").put(b"[]")
    with pytest.raises(RunUnreadableError):
        Run(f"{s3}/one")


def test_an_upload_that_fails_on_the_way_leaves_what_was_there(s3):
    place = locate(s3) / "one" / "x.parquet"
    place.put(b"before")

    def half(target):
        target.write(b"0" * 20_000_000)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.write(place, half)
    assert place.read_bytes() == b"before"
    place.unlink()
    place.unlink()
    assert not place.exists()


@pytest.mark.parametrize("sent", [1_000_000, 14_000_000], ids=lambda sent: f"after {sent} bytes")
def test_a_connection_cut_during_an_upload_leaves_what_was_there(s3, wire, sent):
    place = locate(f"{s3}/one?endpoint_override={wire.address}") / "x.parquet"
    place.put(b"before")
    wire.bytes_left = sent
    with pytest.raises(StorageError, match=f"{s3}/one/x.parquet"):
        place.put(b"0" * 30_000_000)  # in several pieces
    assert wire.down
    gc.collect()
    wire.bytes_left, wire.down = None, False
    assert place.read_bytes() == b"before"
    place.put(b"1" * 30_000_000)
    assert len(place.read_bytes()) == 30_000_000


# -------------------------------------------------------------------------------------------- processes and threads


def test_a_process_ends_cleanly_whatever_is_open(s3):
    small_parts(f"{s3}/one", steps=range(3))
    code = f"""
import threading
from recorder import Run, RunWriter
writer = RunWriter({f"{s3}/two"!r}, flush_steps=1)
writer.log_step(0, tokens=1)
run = Run({f"{s3}/one"!r})
run.steps()
source = (run.path / "run.json").open()
def go_on():
    step = 1
    while True:
        writer.log_step(step, tokens=1)
        step += 1
threading.Thread(target=go_on, daemon=True).start()
print("done", flush=True)
"""
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
        for key in keys(f"{s3}/two"):
            (locate(s3) / key.partition("/")[0] / key.partition("/")[2]).unlink()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_reads_with_a_client_of_its_own(s3):
    """As the workers of a DataLoader do."""
    code = f"""
import os, sys
from recorder import Run
run = Run({f"{s3}/one"!r})
run.steps()
child = os.fork()
if child == 0:
    code = 0 if Run({f"{s3}/one"!r}).steps()["step"].to_list() == [0, 1, 2] else 1
    os._exit(code)
_, status = os.waitpid(child, 0)
run.refresh()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    small_parts(f"{s3}/one", steps=range(3))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_only_what_is_asked_for_is_fetched(s3, monkeypatch):
    """One step's decisions out of a large part: its footer and the row groups of that step."""
    import numpy as np

    writer = RunWriter(f"{s3}/one", **NEVER)
    rng = np.random.default_rng(0)
    for step in range(40):
        ids, weights = rng.integers(0, 64, (8000, 8)), rng.random((8000, 8))
        writer.log_decisions(step, layer=0, router=0, experts_TK=ids, weights_TK=weights)
    writer.finalize()
    run = Run(f"{s3}/one")
    [part] = (run.path / "decisions").entries().values()
    fetched = []
    read = storage.ObjectPath.open

    def counted(place):
        source = read(place)
        inner = source.read
        source.read = lambda size=-1: fetched.append(len(data := inner(size))) or data
        return source

    monkeypatch.setattr(storage.ObjectPath, "open", counted)
    assert len(run.decisions(7, 0)) == 8000
    assert sum(fetched) < part.size / 3
    assert len(fetched) <= 6


def test_footers_tell_the_same_as_local_ones(s3, tmp_path):
    writer = small_parts(tmp_path / "one", steps=range(2))
    local = writer.path / "decisions" / "part-r00000-000000.parquet"
    place = locate(s3) / "x.parquet"
    place.put(local.read_bytes())
    assert storage.parquet_metadata(place).equals(pq.read_metadata(local))


def test_the_page_about_it_runs_as_written(s3):
    page = (Path(__file__).parents[2] / "docs" / "object-stores.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    block = block.replace("s3://my-bucket", s3)
    result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[30 20 10  4]"
