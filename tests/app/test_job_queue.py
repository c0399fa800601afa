"""The queue of recordings: one after the other, in the order asked for, whatever becomes of the server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app import job_queue, jobs

# Stands for `routescope record`: says when it began and ended, and runs until its file "go" is there.
RECORDER = """
import os, sys, time
from pathlib import Path
path = Path(sys.argv[1])
path.mkdir(parents=True, exist_ok=True)
(path / "began").write_text(str(time.time()))
while not (path / "go").exists():
    time.sleep(0.02)
(path / "ended").write_text(str(time.time()))
"""


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs"
    folder.mkdir()
    yield folder
    for job in job_queue.waiting(folder):
        job_queue.cancel(job)
    for job in jobs.jobs(folder):
        if jobs.is_alive(job):
            psutil.Process(job.pid).kill()


def command(out: Path, run_id: str) -> list[str]:
    return [sys.executable, "-c", RECORDER, str(out / run_id)]


def add(out: Path, run_id: str) -> jobs.Job:
    return job_queue.add(command(out, run_id), run_id=run_id, out=out, steps=10)


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def end(out: Path, run_id: str) -> None:
    until(lambda: (out / run_id / "began").exists())
    (out / run_id / "go").touch()


def worker(out: Path) -> psutil.Process:
    return psutil.Process(json.loads((jobs.folder_of(out) / "queue-worker").read_text())["pid"])


def time_of(out: Path, run_id: str, what: str) -> float:
    until(lambda: (out / run_id / what).exists())
    return float((out / run_id / what).read_text())


def test_one_after_the_other_in_the_order_asked_for(out: Path) -> None:
    for run_id in ("a", "b", "c", "d"):
        add(out, run_id)
    until(lambda: (out / "a" / "began").exists())
    assert [job.run_id for job in job_queue.waiting(out)] == ["b", "c", "d"]
    [c] = [job for job in job_queue.waiting(out) if job.run_id == "c"]
    assert (jobs.state(c), jobs.is_alive(c), jobs.progress(c, None).done) == ("waiting", False, 0)
    job_queue.move_up(c)
    job_queue.move_up(c)  # it is the first by now, and stays that
    assert [job.run_id for job in job_queue.waiting(out)] == ["c", "b", "d"]
    [d] = [job for job in job_queue.waiting(out) if job.run_id == "d"]
    job_queue.cancel(d)
    for run_id in ("a", "c", "b"):
        end(out, run_id)
    assert time_of(out, "a", "ended") <= time_of(out, "c", "began")
    assert time_of(out, "c", "ended") <= time_of(out, "b", "began")
    until(lambda: not (jobs.folder_of(out) / "queue-worker").exists())
    assert not (out / "d").exists()
    assert {job.run_id for job in jobs.jobs(out)} == {"a", "b", "c"}


def test_one_that_waits_can_start_at_once_and_what_runs_is_waited_for(out: Path) -> None:
    first = jobs.start(command(out, "first"), run_id="first", out=out, steps=10)
    second, third = add(out, "second"), add(out, "third")
    job_queue.start_now(second)
    until(lambda: (out / "second" / "began").exists())
    assert jobs.is_alive(first)
    end(out, "first")
    until(lambda: not jobs.is_alive(first))
    time.sleep(1.2)
    assert [job.run_id for job in job_queue.waiting(out)] == ["third"], "the second still runs"
    end(out, "second")
    until(lambda: (out / "third" / "began").exists())
    job_queue.cancel(third)  # known as one that waits, it is stopped where it runs by now
    until(lambda: not any(jobs.is_alive(job) for job in jobs.jobs(out)))
    assert {job.run_id: job.cancelled for job in jobs.jobs(out)}["third"]


def test_the_queue_outlives_the_server_and_a_worker_that_was_killed_is_replaced(out: Path) -> None:
    code = "import sys; from pathlib import Path; from app import job_queue\n"
    code += "for run_id in ('a', 'b'):\n    out = Path(sys.argv[1])\n"
    code += (
        "    job_queue.add([sys.executable, '-c', sys.argv[2], str(out / run_id)], run_id=run_id, out=out, steps=1)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(out), RECORDER], check=True)
    until(lambda: (out / "a" / "began").exists())
    assert [job.run_id for job in job_queue.waiting(out)] == ["b"]
    first = worker(out)
    assert os.getsid(first.pid) == first.pid, "a session of its own"
    job_queue.keep_going(out)
    assert worker(out) == first
    first.send_signal(signal.SIGKILL)
    until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
    end(out, "a")
    job_queue.keep_going(out)
    assert worker(out) != first
    end(out, "b")
    until(lambda: not (jobs.folder_of(out) / "queue-worker").exists())


def test_one_that_cannot_be_started_fails_and_the_next_has_its_turn(out: Path) -> None:
    job_queue.add(["/no/such/program"], run_id="broken", out=out, steps=1)
    add(out, "fine")
    end(out, "fine")
    broken = jobs.read(out, "broken")
    assert broken is not None
    assert jobs.state(broken) == "failed"
    assert jobs.failure(broken, None).startswith("it could not be started: ")
    with pytest.raises(FileExistsError, match="fine"):
        add(out, "fine")
