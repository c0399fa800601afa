"""Which rank this is, and that nobody joins the run of another launch."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch import distributed as dist
from toy_runs import NEVER, log_stats, start

from recorder.processes import Meeting, this_rank
from recorder.reader import Run
from recorder.writer import RunExistsError, RunNotFoundError, RunWriter

KILLED = """
writer = RunWriter(args[0], flush_steps=1)
writer.log_step(0, tokens=1, loss=1.0)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def killed_run(tmp_path):
    """A run whose rank 0 was killed: it says running, and its heartbeat is fresh."""
    process = start(KILLED, tmp_path / "run")
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    return tmp_path / "run"


def in_background(call):
    """A thread that runs `call`, and the list that will hold its result or its exception."""
    outcome = []

    def run():
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_rank_from_the_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert this_rank() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    assert this_rank() == (0, 1)  # a RANK of something else
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert this_rank() == (3, 4)
    assert this_rank(1, 2) == (1, 2)
    for rank in ("4", "-1", "one", ""):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match=f"RANK={rank} and WORLD_SIZE=4"):
            this_rank()


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 2), (2, 2), (-1, 1), (0, 0)])
def test_rank_outside_its_world(rank, world_size):
    with pytest.raises(ValueError, match="rank|world_size"):
        this_rank(rank, world_size)


def test_rank_from_torch_distributed(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert this_rank() == (0, 1)
    finally:
        dist.destroy_process_group()
    assert this_rank() == (3, 4)


def test_looking_for_the_rank_loads_no_torch():
    code = (
        "import sys, recorder.processes as p; p.this_rank(); p.meeting('x', 0, 2, 0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_rank_waits_for_rank_0(tmp_path):
    thread, outcome = in_background(lambda: RunWriter(tmp_path / "run", rank=1, join_seconds=30))
    time.sleep(0.3)
    first = RunWriter(tmp_path / "run")
    thread.join()
    assert outcome[0].run_id == first.run_id


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_killed_run_is_not_joined_but_its_resumption_is(killed_run, resume):
    with pytest.raises(RunNotFoundError, match="rank 1 waited 0.3 s .* is of an earlier launch, whose rank 0 is gone"):
        RunWriter(killed_run, rank=1, resume=resume, join_seconds=0.3)
    thread, outcome = in_background(lambda: RunWriter(killed_run, rank=1, resume=resume, join_seconds=30))
    time.sleep(0.3)
    assert not outcome
    first = RunWriter(killed_run, resume=resume)
    thread.join()
    assert (first.segment, outcome[0].segment) == (1, 1)


JOINS = """
print("ready", flush=True)
sys.stdin.readline()
try:
    print(RunWriter(args[0], rank=1, resume=True, join_seconds=0.2).segment)
except RunNotFoundError as error:
    print(error)
"""


def test_a_run_closed_before_this_rank_began_is_not_joined(tmp_path):
    RunWriter(tmp_path / "run").finalize()
    rank_1 = start(JOINS, tmp_path / "run", stdin=subprocess.PIPE)
    assert "is finished since before this process began" in rank_1.communicate("\n", timeout=60)[0]


def test_a_run_that_rank_0_closed_early_is_joined(tmp_path):
    rank_1 = start(JOINS, tmp_path / "run", stdin=subprocess.PIPE)
    assert rank_1.stdout.readline() == "ready\n"
    time.sleep(1.5)  # longer than the error of a process's start time
    RunWriter(tmp_path / "run").finalize()
    assert rank_1.communicate("\n", timeout=60)[0] == "0\n"


def test_a_segment_is_not_joined_twice(tmp_path):
    first = RunWriter(tmp_path / "run")
    RunWriter(tmp_path / "run", rank=1, join_seconds=0).finalize()
    with pytest.raises(RunNotFoundError, match="has joined before"):  # rank 0 is late with the next one
        RunWriter(tmp_path / "run", rank=1, resume=True, join_seconds=0)
    first.finalize()
    RunWriter(tmp_path / "run", resume=True)
    assert RunWriter(tmp_path / "run", rank=1, resume=True, join_seconds=0).segment == 1


def test_a_live_run_of_another_launch_is_not_joined(tmp_path, monkeypatch):
    RunWriter(tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(RunNotFoundError, match="is of another launch"):
        RunWriter(tmp_path / "run", rank=1, resume=True, join_seconds=0)


def test_from_another_host_only_a_given_launch_will_do(tmp_path, monkeypatch):
    RunWriter(tmp_path / "env")
    RunWriter(tmp_path / "given", launch="job 7, second start")
    monkeypatch.setattr("platform.node", lambda: "another-host")
    with pytest.raises(RunNotFoundError, match="on several hosts initialise torch.distributed before the recorder"):
        RunWriter(tmp_path / "env", rank=1, join_seconds=0)
    assert RunWriter(tmp_path / "given", rank=1, launch="job 7, second start", join_seconds=0).rank == 1
    with pytest.raises(RunNotFoundError, match="of another launch"):
        RunWriter(tmp_path / "given", rank=2, launch="job 7, third start", join_seconds=0)


def test_status_follows_rank_0(tmp_path):
    """It owns the manifest: with it the run ends, whatever the others still do; without another rank it goes on."""
    code = """
    writer = RunWriter(args[0], rank=int(args[1]), flush_steps=1)
    writer.log_step(0, tokens=1)
    print("ready", flush=True)
    for _ in range(600):
        writer.log_event(0, "tick", "")
        time.sleep(0.1)
    """
    ranks = [start(code, tmp_path / "run", rank) for rank in range(3)]
    try:
        for process in ranks:
            assert process.stdout.readline() == "ready\n"
        run = Run(tmp_path / "run")
        assert (run.status, run.ranks) == ("running", 3)
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].wait()
        run.refresh()
        assert run.status == "running"
        ranks[0].send_signal(signal.SIGKILL)
        ranks[0].wait()
        assert (run.status, ranks[2].poll()) == ("unfinished", None)
        before = len(run.events())
        time.sleep(1.5)
        run.refresh()  # what rank 2 writes is still read
        assert len(run.events()) > before
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_auto_resume_starts_a_run_where_there_is_none(tmp_path):
    for segment in range(3):
        with RunWriter(tmp_path / "run", resume="auto") as writer:
            assert writer.segment == segment
            writer.log_step(segment, tokens=1, loss=float(segment))
    run = Run(tmp_path / "run")
    assert run.steps()["loss"].to_list() == [0.0, 1.0, 2.0]
    assert run.events()["step"].to_list() == [1, 2]
    with pytest.raises(ValueError, match="'always'"):
        RunWriter(tmp_path / "run", resume="always")


def test_resuming_clears_what_killed_ranks_left_half_done(killed_run):
    left = [killed_run / "steps" / f".part-r0000{rank}-000009.parquet.abc.tmp" for rank in range(3)]
    for file in left:
        file.write_bytes(b"half")
    RunWriter(killed_run, resume=True)
    assert not any(file.exists() for file in left)


def test_a_rank_without_rows_leaves_an_empty_share(tmp_path):
    ranks = [RunWriter(tmp_path / "run", rank=rank, **NEVER) for rank in range(3)]
    log_stats(ranks[0], 0)
    ranks[0].log_step(0, tokens=2)
    ranks[1].log_step(0, tokens=0)
    for writer in reversed(ranks):
        writer.finalize()
    run = Run(tmp_path / "run")
    assert (run.ranks, run.problems) == (3, [])
    assert run.steps()["tokens"].to_list() == [2]
    assert run.load(0).tolist() == [[3, 1]]
    assert run.incomplete_steps().empty


# ---------------------------------------------------------------------------------------------------- the meeting


def meetings(world_size, seconds=30.0, path="runs/x"):
    store = dist.HashStore()
    return [Meeting(store, path, rank, world_size, seconds) for rank in range(world_size)]


def test_meeting_hands_out_launch_and_plans():
    first, second, third = meetings(3)
    waiting = [in_background(meet.answer) for meet in (second, third)]
    first.announce("abc", plans=[0, {"a": 1}, None])
    for thread, _ in waiting:
        thread.join()
    assert [outcome[0] for _, outcome in waiting] == [("abc", {"a": 1}), ("abc", None)]


def test_meeting_gathers_from_all_ranks_in_order():
    first, second, third = meetings(3)
    thread, outcome = in_background(lambda: first.gather({"n": 0}))
    third.gather({"n": 2})
    time.sleep(0.1)
    assert not outcome
    second.gather({"n": 1})
    thread.join()
    assert outcome == [[{"n": 0}, {"n": 1}, {"n": 2}]]


def test_meeting_names_the_ranks_that_do_not_come():
    first, second, *_ = meetings(4, seconds=0.1)
    second.gather({})
    with pytest.raises(TimeoutError, match="none came from rank 2, 3"):
        first.gather({})
    with pytest.raises(RunNotFoundError, match="rank 1 waited 0.1 s for rank 0 .* runs/x"):
        second.answer()


def test_meeting_passes_on_why_rank_0_failed():
    first, second, third = meetings(3)
    first.decline(RunExistsError("runs/x already holds a run"))
    with pytest.raises(RunExistsError, match="rank 0 could not open the run: runs/x already holds a run"):
        second.answer()
    first.decline(PermissionError("read-only"))
    with pytest.raises(RuntimeError, match="read-only"):
        third.answer()


def test_meeting_of_one_path_hears_nothing_of_another_or_of_an_earlier_one():
    store = dist.HashStore()
    first, second = (Meeting(store, "runs/a", rank, 2, 0.1) for rank in range(2))
    first.announce("one")
    with pytest.raises(RunNotFoundError):
        Meeting(store, "runs/b", 1, 2, 0.1).answer()
    assert second.answer() == ("one", None)
    with pytest.raises(RunNotFoundError):
        second.answer()


def test_this_process_is_no_rank():
    assert "RANK" not in os.environ  # or the tests above mean nothing
