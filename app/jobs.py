"""Starts, watches and cancels recordings. Each is a process of its own, so no page and no server owns it.

Next to the runs, `.jobs/<run_id>.json` says which process records the run and `.jobs/<run_id>.log` holds what it
prints. A closed tab, a reload or a restarted server therefore finds every recording again. No Streamlit here.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from recorder.manifest import read_manifest, run_status
from recorder.reader import Run
from recorder.storage import Place

State = Literal["starting", "running", "finished", "cancelled", "failed"]
ACTIVE: tuple[State, ...] = ("starting", "running")

_FOLDER = ".jobs"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
_SAME_START_S = 2.0  # two readings of one process's start time may differ by clock adjustments
_KEPT = 50  # files of older recordings that have ended are removed when a new one starts
_LOG_TAIL_BYTES = 8192
_STEPS_FOR_A_RATE = 5  # the first steps of a run are slow and say little about the others
_PROGRESS_BAR = re.compile(r"\d+%\||\d+it \[|it/s|step/s")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One recording, as written in its file.

    run_id, out  the run is the folder out/run_id
    command      what was started
    pid          its process, leader of a session and process group of its own
    started_at   when the process was created, seconds since the epoch; with the pid it identifies the process
    steps        training steps asked for
    cancelled    True once a person asked for it to stop
    """

    run_id: str
    out: str
    command: list[str]
    pid: int
    started_at: float
    steps: int
    cancelled: bool = False

    @property
    def run_path(self) -> Path:
        return Path(self.out) / self.run_id

    @property
    def log_path(self) -> Path:
        return Path(self.out) / _FOLDER / f"{self.run_id}.log"

    @property
    def path(self) -> Path:
        return Path(self.out) / _FOLDER / f"{self.run_id}.json"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a recording is.

    state      see `State`
    done       training steps recorded; total: steps asked for
    elapsed_s  seconds since its process started, until its last sign of life where it has ended
    rate       steps a second so far; left_s: seconds to go at that rate; None where unknown, as at the start
    message    one line for a person: why it failed, or None
    """

    state: State
    done: int
    total: int
    elapsed_s: float
    rate: float | None
    left_s: float | None
    message: str | None


def start(command: Sequence[str], *, run_id: str, out: Path, steps: int) -> Job:
    """Start a recording of `out/run_id` and return at once.

    command  a complete command line that records into out/run_id and closes the run on SIGTERM
    Raises ValueError for a run_id that is no plain name, FileExistsError where that run or job is there already,
    OSError where the folder cannot be written or the command not be run.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"{run_id!r} is not a plain folder name of letters, digits and . _ = + -")
    out = out.resolve()
    folder = out / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _remove_old(out)
    if (out / run_id).exists() or (folder / f"{run_id}.json").exists():
        raise FileExistsError(f"there is a run {run_id} in {out} already")
    with (folder / f"{run_id}.log").open("xb") as log:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that closing the server's terminal leaves it alone, and a group to signal
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    # Without someone waiting for it an ended child stays in the process table as a zombie.
    threading.Thread(target=process.wait, name=f"wait for {run_id}", daemon=True).start()
    try:
        started_at = psutil.Process(process.pid).create_time()
    except psutil.Error:
        started_at = time.time()  # it ended before it could be looked at
    job = Job(
        run_id=run_id,
        out=str(out),
        command=list(command),
        pid=process.pid,
        started_at=started_at,
        steps=steps,
    )
    _write(job)
    return job


def jobs(folder: Path) -> list[Job]:
    """The recordings into a folder of runs that this or an earlier server started, newest first."""
    found = []
    for path in (Path(folder).resolve() / _FOLDER).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Job(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda job: job.started_at, reverse=True)


def job_of(run_path: Place) -> Job | None:
    """The recording that writes or wrote the run at `run_path`; None where it was not started from here."""
    if not isinstance(run_path, Path):
        return None
    return next((job for job in jobs(run_path.parent) if job.run_id == run_path.name), None)


def is_alive(job: Job) -> bool:
    """Whether the job's process still runs; another process that was given the same pid does not count."""
    try:
        process = psutil.Process(job.pid)
        return abs(process.create_time() - job.started_at) < _SAME_START_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def state(job: Job) -> State:
    """Where the job stands now."""
    # The process first: the manifest of one that ends in between is final when it is read after.
    alive = is_alive(job)
    status = _run_status(job)
    if alive:
        return "starting" if status is None else "running"
    if status in ("finished", "cancelled", "failed"):
        return status  # type: ignore[return-value]
    return "cancelled" if job.cancelled else "failed"


def is_deleted(job: Job) -> bool:
    """Whether the job recorded its run to an end of some kind and someone has deleted that run since."""
    # `routescope record` prints the run's path when there is something there.
    return not job.run_path.exists() and not is_alive(job) and str(job.run_path) in log_lines(job)


def cancel(job: Job) -> bool:
    """Ask a recording to stop (SIGTERM to its process group); what is recorded stays.

    Returns False, and signals nothing, where its process has ended or its pid belongs to another by now.
    """
    if not is_alive(job):
        return False
    _write(replace(job, cancelled=True))
    try:
        if hasattr(os, "killpg"):
            os.killpg(job.pid, signal.SIGTERM)
        else:
            psutil.Process(job.pid).terminate()
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
    return True


def progress(job: Job, run: Run | None) -> Progress:
    """How far the job is.

    run  its run, opened and refreshed; None while there is none to read
    """
    now_state = state(job)
    done = rate = left_s = None
    beat = time.time()
    if run is not None:
        steps = run.steps("train")["step"]
        done = int(steps.max()) + 1 if len(steps) else 0
        created = _epoch(run.manifest.get("created_at"))
        last = _epoch(run.manifest.get("heartbeat_at"))
        if now_state not in ACTIVE and last is not None:
            beat = last
        if created is not None and last is not None and done >= _STEPS_FOR_A_RATE and last > created:
            rate = done / (last - created)
            left_s = max(job.steps - done, 0) / rate if now_state in ACTIVE else None
    elif now_state not in ACTIVE:
        beat = _modified(job.log_path) or beat
    return Progress(
        state=now_state,
        done=done or 0,
        total=job.steps,
        elapsed_s=max(beat - job.started_at, 0.0),
        rate=rate,
        left_s=left_s,
        message=failure(job, run) if now_state == "failed" else None,
    )


def failure(job: Job, run: Run | None) -> str:
    """One line on why the job failed: the command's own, the run's, or what is known without them."""
    lines = log_lines(job)
    prefix = "routescope: "
    own = [line for line in lines if line.startswith(prefix)]
    if own:
        return own[-1].removeprefix(prefix)
    if run is not None and run.manifest.get("error"):
        return str(run.manifest["error"]).splitlines()[0]
    # Of a traceback only its last line says what happened.
    said = [line for line in lines if not line[0].isspace() and not line.startswith("Traceback")]
    return said[-1] if said else "its process ended without a word, killed by someone or for lack of memory"


def log_lines(job: Job) -> list[str]:
    """The last lines that the job printed, without progress bars and empty lines."""
    try:
        with job.log_path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, 0))
            text = log.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in re.split(r"[\r\n]", text)]
    return [line for line in lines if line and not _PROGRESS_BAR.search(line)]


def _run_status(job: Job) -> str | None:
    try:
        return run_status(read_manifest(job.run_path))
    except (OSError, ValueError):
        return None


def _write(job: Job) -> None:
    part = job.path.with_suffix(f".{os.getpid()}.tmp")
    part.write_text(json.dumps(asdict(job), indent=2), encoding="utf-8")
    part.replace(job.path)


def _remove_old(out: Path) -> None:
    for job in jobs(out)[_KEPT:]:
        if not is_alive(job):
            job.path.unlink(missing_ok=True)
            job.log_path.unlink(missing_ok=True)


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _epoch(text: Any) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
