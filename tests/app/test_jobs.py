"""Recordings as processes: found again, watched, cancelled, and reported in one line when they fail."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app import jobs
from recorder.reader import Run

PREAMBLE = """
import signal, sys, time
from recorder.writer import RunWriter
stop = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
"""
# Stands for `routescope record`: 1,000 steps, closed as cancelled on SIGTERM.
RECORDER = (
    PREAMBLE
    + """
writer = RunWriter(sys.argv[1], flush_steps=1)
for step in range(int(sys.argv[2])):
    if stop:
        writer.finalize("cancelled")
        sys.exit(130)
    writer.log_step(step, tokens=8, loss=1.0)
    time.sleep(0.02)
writer.finalize()
"""
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., jobs.Job]]:
    started = []

    def start_(code: str = RECORDER, run_id: str = "mine", steps: int = 1000) -> jobs.Job:
        path = str(tmp_path / "runs" / run_id)
        job = jobs.start(
            [sys.executable, "-c", code, path, str(steps)], run_id=run_id, out=tmp_path / "runs", steps=steps
        )
        started.append(job)
        return job

    yield start_
    for job in started:
        if jobs.is_alive(job):
            psutil.Process(job.pid).kill()


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def run_of(job: jobs.Job) -> Run | None:
    return Run(job.run_path) if (job.run_path / "run.json").exists() else None


def test_a_recording_goes_from_starting_through_running_to_finished(start: Callable[..., jobs.Job]) -> None:
    job = start(steps=20)
    assert jobs.state(job) in ("starting", "running")
    until(lambda: jobs.state(job) == "running")
    until(lambda: jobs.state(job) == "finished")
    progress = jobs.progress(job, run_of(job))
    assert (progress.done, progress.total, progress.left_s, progress.message) == (20, 20, None, None)
    assert progress.rate is not None
    assert 1 < progress.rate < 50, "a step takes 20 ms and a flush"
    until(lambda: not psutil.pid_exists(job.pid))  # the child is reaped, not left as a zombie


def test_another_server_finds_it_by_its_file_alone(start: Callable[..., jobs.Job], tmp_path: Path) -> None:
    job = start()
    until(lambda: jobs.state(job) == "running")
    assert jobs.jobs(tmp_path / "runs") == [job]
    assert jobs.job_of(job.run_path) == job
    assert jobs.job_of(tmp_path / "runs" / "another") is None
    assert os.getsid(job.pid) == job.pid != os.getsid(0), "a session of its own outlives the server's terminal"


def test_cancel_keeps_what_is_recorded(start: Callable[..., jobs.Job], tmp_path: Path) -> None:
    job = start()
    until(lambda: jobs.progress(job, run_of(job)).done >= 3)
    assert jobs.cancel(job)
    until(lambda: jobs.state(job) == "cancelled")
    progress = jobs.progress(jobs.jobs(tmp_path / "runs")[0], run_of(job))
    assert 3 <= progress.done < 1000
    run = run_of(job)
    assert run is not None
    assert (run.status, len(run.steps("train"))) == ("cancelled", progress.done)
    assert not jobs.cancel(job), "nothing is signalled once it has ended"


def test_cancel_before_anything_is_recorded(start: Callable[..., jobs.Job], tmp_path: Path) -> None:
    job = start("import time; time.sleep(600)")
    assert jobs.state(job) == "starting"
    assert jobs.cancel(job)
    until(lambda: not jobs.is_alive(job))
    [job] = jobs.jobs(tmp_path / "runs")
    assert jobs.state(job) == "cancelled"
    assert jobs.progress(job, None).done == 0


def test_a_reused_pid_is_neither_alive_nor_signalled(start: Callable[..., jobs.Job], tmp_path: Path) -> None:
    job = start("import time; time.sleep(600)")
    text = json.loads(job.path.read_text())
    job.path.write_text(json.dumps(text | {"started_at": job.started_at - 100}))
    [stale] = jobs.jobs(tmp_path / "runs")
    assert not jobs.is_alive(stale)
    assert jobs.state(stale) == "failed"
    assert not jobs.cancel(stale)
    assert psutil.pid_exists(job.pid), "the process that has the pid now is left alone"


@pytest.mark.parametrize(
    ("code", "line"),
    [
        pytest.param(
            "import sys; sys.exit('routescope: --top-k 9 is more than --num-experts 8')",
            "--top-k 9 is more than --num-experts 8",
            id="the-command's-own-line",
        ),
        pytest.param("def f():\n  raise OSError('disk full')\nf()", "OSError: disk full", id="no-traceback"),
        pytest.param(
            "import sys; sys.stderr.write('\\r 50%|##   | 5/10 [00:01<00:01, 4.1step/s]'); sys.exit(1)",
            "its process ended without a word, killed by someone or for lack of memory",
            id="a-progress-bar-is-no-reason",
        ),
    ],
)
def test_a_failure_is_one_line(start: Callable[..., jobs.Job], code: str, line: str) -> None:
    job = start(code)
    until(lambda: jobs.state(job) == "failed")
    assert jobs.progress(job, run_of(job)).message == line


def test_a_killed_recording_has_failed_and_can_be_read(start: Callable[..., jobs.Job]) -> None:
    job = start()
    until(lambda: jobs.progress(job, run_of(job)).done >= 5)
    psutil.Process(job.pid).kill()
    until(lambda: jobs.state(job) == "failed")
    run = run_of(job)
    assert run is not None
    assert run.status == "unfinished"
    assert jobs.progress(job, run).done == len(run.steps("train")) >= 5


def test_a_run_deleted_later_is_no_failure(start: Callable[..., jobs.Job]) -> None:
    job = start("import sys; print(sys.argv[1])")
    until(lambda: not jobs.is_alive(job))
    assert jobs.is_deleted(job)
    assert not jobs.is_deleted(start("import sys; sys.exit('routescope: no')", run_id="failed"))
    assert not jobs.is_deleted(start(steps=1, run_id="there"))


def test_r20_a_run_id_is_taken_once(start: Callable[..., jobs.Job], tmp_path: Path) -> None:
    start()
    with pytest.raises(FileExistsError, match="mine"):
        start()
    (tmp_path / "runs" / "old").mkdir()
    with pytest.raises(FileExistsError, match="old"):
        start(run_id="old")


@pytest.mark.parametrize("run_id", ["../x", "a/b", "", ".hidden", "-x", "a b", "a\nb"])
def test_run_ids_are_plain_names(start: Callable[..., jobs.Job], run_id: str) -> None:
    with pytest.raises(ValueError, match="plain folder name"):
        start(run_id=run_id)


def test_several_at_once_newest_first(start: Callable[..., jobs.Job], tmp_path: Path) -> None:
    first, second = start(run_id="first"), start(run_id="second")
    until(lambda: jobs.state(first) == jobs.state(second) == "running")
    assert {job.run_id for job in jobs.jobs(tmp_path / "runs")} == {"first", "second"}
    jobs.cancel(first)
    until(lambda: jobs.state(first) == "cancelled")
    assert jobs.state(second) == "running"


def test_files_that_are_no_jobs_are_passed_over(start: Callable[..., jobs.Job], tmp_path: Path) -> None:
    job = start(steps=1)
    (job.path.parent / "half.json").write_text('{"run_id": "half"')
    (job.path.parent / "other.json").write_text('{"colour": "blue"}')
    (job.path.parent / "list.json").write_text("[1, 2]")
    assert [found.run_id for found in jobs.jobs(tmp_path / "runs")] == ["mine"]
    assert jobs.jobs(tmp_path / "nowhere") == []
