"""Starts, watches and cancels recordings. Each is a process of its own, so no page and no server owns it.

Next to the runs, `.jobs/<run_id>.json` says which process records the run and `.jobs/<run_id>.log` holds what it
prints. A closed tab, a reload or a restarted server therefore finds every recording again. No Streamlit here.
"""

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

State = Literal["waiting", "starting", "running", "finished", "cancelled", "failed"]
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
    pid          its process, leader of a session and process group of its own; 0 where none was started
    started_at   when the process was created, seconds since the epoch; with the pid it identifies the process. Of one
                 that waits for its turn: when it was asked for
    steps        training steps asked for
    cancelled    True once a person asked for it to stop
    continued    True where it goes on with a run that was there already
    place        its place in the queue, lower first (see `app.job_queue`); None once it has been started
    """

    run_id: str
    out: str
    command: list[str]
    pid: int
    started_at: float
    steps: int
    cancelled: bool = False
    continued: bool = False
    place: float | None = None

    @property
    def waits(self) -> bool:
        """Whether its turn has not come yet."""
        return self.place is not None

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
    before     of those recorded, the ones that were there before the run was continued; 0 where it was not
    elapsed_s  seconds since its process started, until its last sign of life where it has ended
    rate       steps a second so far; left_s: seconds to go at that rate; None where unknown, as at the start
    message    one line for a person: why it failed, or None
    """

    state: State
    done: int
    total: int
    before: int
    elapsed_s: float
    rate: float | None
    left_s: float | None
    message: str | None


def start(command: Sequence[str], *, run_id: str, out: Path, steps: int, continued: bool = False) -> Job:
    """Start a recording of `out/run_id` and return at once. Arguments and errors as of `new`; OSError too where the
    command cannot be run.
    """
    return launch(new(command, run_id=run_id, out=out, steps=steps, continued=continued))


def new(command: Sequence[str], *, run_id: str, out: Path, steps: int, continued: bool = False) -> Job:
    """A recording that is not started yet, nor written down.

    command    a complete command line that records into out/run_id and closes the run on SIGTERM
    continued  it goes on with a run that is there

    Raises ValueError for a run_id that is no plain name, FileExistsError where that run or job is there already, or
    where a run to be continued is being recorded or waits for that, OSError where the folder cannot be written.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"{run_id!r} is not a plain folder name of letters, digits and . _ = + -")
    out = out.resolve()
    (out / _FOLDER).mkdir(parents=True, exist_ok=True)
    _remove_old(out)
    earlier = read(out, run_id)
    if continued and earlier is not None and (earlier.waits or is_alive(earlier)):
        raise FileExistsError(f"the run {run_id} is being recorded, or waits for its turn")
    if not continued and ((out / run_id).exists() or (out / _FOLDER / f"{run_id}.json").exists()):
        raise FileExistsError(f"there is a run {run_id} in {out} already")
    return Job(
        run_id=run_id,
        out=str(out),
        command=list(command),
        pid=0,
        started_at=time.time(),
        steps=steps,
        continued=continued,
    )


def launch(job: Job) -> Job:
    """Start the process of a job that has none and write it down. Raises OSError where the command cannot be run."""
    with job.log_path.open("wb" if job.continued else "xb") as log:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that closing the server's terminal leaves it alone, and a group to signal
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    job = replace(job, pid=process.pid, started_at=created_at(process.pid), place=None)
    reap(process)
    write(job)
    return job


def created_at(pid: int) -> float:
    """When a process was created, seconds since the epoch; now, where it has ended before it could be looked at."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return time.time()


def reap(process: "subprocess.Popen[bytes]") -> None:
    """Wait for a child in the background: without that it stays in the process table as a zombie once it has ended."""
    threading.Thread(target=process.wait, name=f"wait for {process.pid}", daemon=True).start()


def folder_of(out: Path) -> Path:
    """Where the jobs of a folder of runs are written down; need not exist."""
    return Path(out).resolve() / _FOLDER


def read(out: Path, run_id: str) -> Job | None:
    """The job of that run as written down now; None where there is none."""
    try:
        return Job(**json.loads((folder_of(out) / f"{run_id}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write(job: Job) -> None:
    """Write the job down, in place of what its file said before."""
    part = job.path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    part.write_text(json.dumps(asdict(job), indent=2), encoding="utf-8")
    part.replace(job.path)


def jobs(folder: Path) -> list[Job]:
    """The recordings into a folder of runs that this or an earlier server started, newest first."""
    found = [read(folder, path.stem) for path in folder_of(folder).glob("*.json")]
    return sorted((job for job in found if job is not None), key=lambda job: job.started_at, reverse=True)


def job_of(run_path: Place) -> Job | None:
    """The recording that writes or wrote the run at `run_path`; None where it was not started from here."""
    if not isinstance(run_path, Path):
        return None
    return read(run_path.parent, run_path.name)


def is_alive(job: Job) -> bool:
    """Whether the job's process still runs; another process that was given the same pid does not count."""
    if not job.pid:
        return False
    try:
        process = psutil.Process(job.pid)
        return abs(process.create_time() - job.started_at) < _SAME_START_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def state(job: Job) -> State:
    """Where the job stands now."""
    if job.waits:
        return "waiting"
    # The process first: the manifest of one that ends in between is final when it is read after.
    alive = is_alive(job)
    manifest = _manifest(job)
    status = None if manifest is None else run_status(manifest)
    if alive:
        beat = None if manifest is None else _epoch(manifest.get("heartbeat_at"))
        return "running" if beat is not None and beat >= job.started_at - _SAME_START_S else "starting"
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
    write(replace(job, cancelled=True))
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
    before = 0
    beat = time.time()
    if run is not None:
        steps = run.steps("train")["step"]
        done = int(steps.max()) + 1 if len(steps) else 0
        began = job.started_at if job.continued else _epoch(run.manifest.get("created_at"))
        before = _steps_before(run) if job.continued else 0
        last = _epoch(run.manifest.get("heartbeat_at"))
        if now_state not in ACTIVE and last is not None:
            beat = last
        if began is not None and last is not None and done - before >= _STEPS_FOR_A_RATE and last > began:
            rate = (done - before) / (last - began)
            left_s = max(job.steps - done, 0) / rate if now_state in ACTIVE else None
    elif now_state not in ACTIVE:
        beat = _modified(job.log_path) or beat
    return Progress(
        state=now_state,
        done=done or 0,
        total=job.steps,
        before=before,
        elapsed_s=max(beat - job.started_at, 0.0),
        rate=rate,
        left_s=left_s,
        message=failure(job, run) if now_state == "failed" else None,
    )


def _steps_before(run: Run) -> int:
    """Steps that were there before the run was continued last; all, where the new segment has none yet."""
    segments = run.segments
    begun = bool(segments) and segments[-1].segment == run.manifest.get("segment")
    return segments[-1].first_step if begun else (run.last_step or 0) + 1


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


def _manifest(job: Job) -> dict[str, Any] | None:
    try:
        return read_manifest(job.run_path)
    except (OSError, ValueError):
        return None


def _remove_old(out: Path) -> None:
    for job in jobs(out)[_KEPT:]:
        if not job.waits and not is_alive(job):
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
