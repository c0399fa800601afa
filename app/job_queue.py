"""The queue of recordings: who waits for a turn, in which order, and the process that works through it.

One that waits is a job like any other (`app.jobs`), written down with a place and without a process. `python -m
app.job_queue FOLDER` starts them in turn, each when nothing else is recorded into that folder, and ends when none
waits. It runs in a session of its own, so that a server may come and go; where it was killed, or the machine started
anew, the next look at the queue starts it again (`keep_going`).
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from app import jobs
from app.jobs import Job
from recorder import storage
from recorder.manifest import process_alive, this_process

_WORKER = "queue-worker"  # names the process that works through the queue; no .json, so that it is no job
_LOG = "queue-worker.log"
_LOOK_AGAIN_S = 0.5


def add(command: Sequence[str], *, run_id: str, out: Path, steps: int, continued: bool = False) -> Job:
    """Put a recording at the end of the queue; it starts at once where nothing is recorded. See `jobs.new`."""
    job = jobs.new(command, run_id=run_id, out=out, steps=steps, continued=continued)
    with storage.lock(jobs.folder_of(out)):
        last = max((other.place or 0.0 for other in waiting(out)), default=0.0)
        job = replace(job, place=max(time.time(), last + 1e-3))
        jobs.write(job)
    keep_going(out)
    return job


def waiting(out: Path) -> list[Job]:
    """Those that wait for their turn to be recorded into this folder, the next one first."""
    return sorted((job for job in jobs.jobs(out) if job.waits), key=lambda job: job.place or 0.0)


def move_up(job: Job) -> None:
    """Let a job that waits have the turn of the one before it."""
    with storage.lock(jobs.folder_of(Path(job.out))):
        order = waiting(Path(job.out))
        at = next((at for at, other in enumerate(order) if other.run_id == job.run_id), 0)
        if at:
            before, this = order[at - 1], order[at]
            jobs.write(replace(before, place=this.place))
            jobs.write(replace(this, place=before.place))


def cancel(job: Job) -> None:
    """Take a job out of the queue, or stop it where it has been started since."""
    with storage.lock(jobs.folder_of(Path(job.out))):
        now = jobs.read(Path(job.out), job.run_id)
        if now is not None and now.waits:
            now.path.unlink(missing_ok=True)
            return
    if now is not None:
        jobs.cancel(now)


def start_now(job: Job) -> None:
    """Start a job that waits without waiting further, beside what is being recorded."""
    with storage.lock(jobs.folder_of(Path(job.out))):
        now = jobs.read(Path(job.out), job.run_id)
        if now is not None and now.waits:
            _start(now)


def keep_going(out: Path) -> None:
    """See to it that somebody works through the queue of this folder, where there is one."""
    if not waiting(out):
        return
    folder = jobs.folder_of(out)
    with storage.lock(folder):
        if _worker_lives(folder):
            return
        with (folder / _LOG).open("wb") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "app.job_queue", str(Path(out).resolve())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        identity = this_process() | {"pid": worker.pid, "started_at": jobs.created_at(worker.pid)}
        jobs.reap(worker)
        (folder / _WORKER).write_text(json.dumps(identity), encoding="utf-8")


def work(out: Path) -> None:
    """Start what waits, one at a time, until nothing does."""
    folder = jobs.folder_of(out)
    while True:
        with storage.lock(folder):
            order = waiting(out)
            if not order:
                # Within the lock: whoever adds one after this finds no worker and starts another.
                (folder / _WORKER).unlink(missing_ok=True)
                return
            if not any(jobs.is_alive(job) for job in jobs.jobs(out)):
                _start(order[0])
        time.sleep(_LOOK_AGAIN_S)


def _start(job: Job) -> None:
    try:
        jobs.launch(job)
    except OSError as error:  # it has failed then, and the others get their turn
        job.log_path.write_text(f"routescope: it could not be started: {error}\n", encoding="utf-8")
        jobs.write(replace(job, place=None))


def _worker_lives(folder: Path) -> bool:
    try:
        return bool(process_alive(json.loads((folder / _WORKER).read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    work(Path(sys.argv[1]))
