"""Who may write into a run folder: create it, go on with it, or join it as another rank."""

import time
from typing import Any

from recorder import storage
from recorder.manifest import (
    MANIFEST_NAME,
    RunExistsError,
    RunNotFoundError,
    RunUnreadableError,
    create_manifest,
    heartbeat_age,
    leftover_manifests,
    library_versions,
    now,
    process_alive,
    read_manifest,
    replace_manifest,
    this_process,
)
from recorder.manifest_shape import check_manifest
from recorder.parts import list_parts, part_rank, remove_leftovers
from recorder.processes import environment_launch, wait_for
from recorder.schema import FORMAT_VERSION, TABLES
from recorder.storage import Place

#: What identifies a run and its present writer; no caller sets these once the run exists.
FIXED_KEYS = ("format_version", "run_id", "created_at", "segment", "process", "launch")

_HOW_TO_MEET = "on several hosts initialise torch.distributed before the recorder, or give all ranks the same `launch`"
#: Segments of runs that this process has joined without a launch of the caller's: what it opens next is another.
_joined: set[tuple[Any, Any, int]] = set()
#: The system tells when a process began with an error of a second, towards the past. None opens and closes in less.
_START_ERROR_S = 1.0


def create_run(path: Place, given: dict[str, Any], *, weights: str, launch: str | None = None) -> dict[str, Any]:
    """Create the folder and its run.json; of two processes at once, one wins.

    Args:
        path: the run's own folder; it may exist as long as it holds no run.
        given: manifest values of the caller, already plain JSON.
        weights: how gate weights are stored, "rounded" or "full".
        launch: what the ranks of this launch share and no other launch has; None = what the environment tells.

    Returns:
        The manifest as written.

    Raises:
        RunExistsError: a run, part files or a file is there already.
        ValueError: values of which a run could not be read; nothing is created then.
    """
    moment = now()
    defaults: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "run_id": path.resolve().name,
        "name": None,
        "created_at": moment,
        "heartbeat_at": moment,
        "status": "running",
        "error": None,
        "last_step": None,
        "source": "RunWriter",
        "versions": None,
        "world_size": 1,
        "data_parallel_size": None,
        "seed": None,
        "config": {},
        "process": None,
        "segment": 0,
        "domains": [],
        "recorded": None,
        "model": {"name": None, "layers": []},
    }
    manifest = defaults | given
    manifest |= {
        "format_version": FORMAT_VERSION,
        "run_id": str(manifest["run_id"] or path.resolve().name),
        "heartbeat_at": moment,
        "status": "running",
        "error": None,
        "last_step": None,
        "versions": library_versions() | (given.get("versions") or {}),
        "process": this_process(),
        "launch": launch or environment_launch(),
        "segment": 0,
        "recorded": (given.get("recorded") or {}) | {"weights": weights},
    }
    manifest["name"] = manifest["name"] or manifest["run_id"]
    check_manifest(manifest)
    if path.exists() and not path.is_dir():
        raise RunExistsError(f"{path} is a file, not a folder for a run")
    path.mkdir(parents=True, exist_ok=True)
    if holds_run(path):
        raise RunExistsError(f"{path} already holds a run; resume it or choose another folder")
    if any(list_parts(path / table) for table in TABLES):
        raise RunExistsError(f"{path} already holds part files of a run; choose another folder")
    create_manifest(path, manifest)
    return manifest


def holds_run(path: Place) -> bool:
    """Whether there is a run at this path that could be resumed."""
    return (path / MANIFEST_NAME).is_file()


def resume_run(path: Place, given: dict[str, Any], *, launch: str | None = None) -> dict[str, Any]:
    """Take over a run as its next segment; of two processes at once, one wins.

    Args:
        path: the run's folder.
        given: manifest values that replace those there, `FIXED_KEYS` apart.
        launch: as in `create_run`.

    Returns:
        The manifest as written.

    Raises:
        RunExistsError: a live process on this machine still writes to it. A writer on another machine cannot be
            seen from here; whoever resumes there must know that it is gone. In an object store, which has no
            locks, also another that resumes at the same moment, unless the two just miss each other.
        RunNotFoundError, RunUnreadableError: no run there, or none that can be read.
        ValueError: values of which a run could not be read.
    """
    with storage.lock(path):
        manifest = read_manifest(path)
        process, this = manifest.get("process"), this_process()
        # This very process may take over from a writer of its own that it has given up (RunWriter knows of others).
        if (
            isinstance(process, dict)
            and process.get("pid") != this["pid"]
            and manifest.get("status") == "running"
            and process_alive(process)
        ):
            raise RunExistsError(f"{path} is still being written by process {process['pid']}")
        manifest |= {name: value for name, value in given.items() if name not in FIXED_KEYS}
        check_manifest(manifest)
        manifest |= {
            "heartbeat_at": now(),
            "status": "running",
            "error": None,
            "last_step": manifest.get("last_step"),
            "versions": (manifest.get("versions") or {}) | library_versions(),
            "process": this,
            "launch": launch or environment_launch(),
            "segment": int(manifest.get("segment") or 0) + 1,
        }
        # before the other ranks can see that they may write, and of those too that this launch no longer has
        storage.remove(path, leftover_manifests(path))
        for table in TABLES:
            remove_leftovers(path / table)
        replace_manifest(path, manifest, alone=True)
    return manifest


def join_run(path: Place, rank: int, *, resume: bool, launch: str | None = None, seconds: float) -> dict[str, Any]:
    """Join the run that rank 0 of this launch creates or resumes, as another rank; waits for rank 0.

    A run.json that an earlier launch has left is never joined: that of this launch has its `launch`. Where the caller
    gives none, it has the environment's, and a rank 0 that lives or has closed the run since this process began.

    Args:
        path: the run's folder; it need not exist yet.
        rank: this rank.
        resume: parts of this rank may be there already.
        launch: as rank 0 gives it.
        seconds: how long to wait.

    Returns:
        The manifest as rank 0 wrote it.

    Raises:
        RunExistsError: parts of this rank are there already and `resume` is off.
        RunNotFoundError: rank 0 has opened no run there in time; says what is there instead.
    """
    mine = any(part_rank(name) == rank for table in TABLES for name in list_parts(path / table))
    if mine and not resume:
        raise RunExistsError(f"{path} already holds parts of rank {rank}")
    found = ""

    def look() -> dict[str, Any] | None:
        nonlocal found
        try:
            manifest = read_manifest(path)
        except (RunNotFoundError, RunUnreadableError) as error:
            found = str(error)
            return None
        reason = _not_ours(manifest, rank, launch)
        found = f"the run at {path} {reason}"
        return None if reason else manifest

    manifest = wait_for(look, seconds)
    if manifest is None:
        raise RunNotFoundError(f"rank {rank} waited {seconds:g} s for rank 0 to open its run: {found}")
    _joined.add(_identity(manifest, rank))
    for table in TABLES:
        remove_leftovers(path / table, rank)
    return manifest


def _not_ours(manifest: dict[str, Any], rank: int, launch: str | None) -> str | None:
    """Why a rank of this launch cannot join the run of this manifest; None where it can."""
    if manifest.get("launch") != (launch or environment_launch()):
        return "is of another launch" if launch else f"is of another launch or host; {_HOW_TO_MEET}"
    if launch is not None:
        return None
    if _identity(manifest, rank) in _joined:
        return "is one that this process has joined before"
    if manifest.get("status") == "running":
        return None if process_alive(manifest.get("process")) else "is of an earlier launch, whose rank 0 is gone"
    closed_at, began_at = time.time() - heartbeat_age(manifest), this_process()["started_at"]
    return (
        None
        if closed_at >= began_at + _START_ERROR_S
        else f"is {manifest.get('status')} since before this process began"
    )


def _identity(manifest: dict[str, Any], rank: int) -> tuple[Any, Any, int]:
    return manifest.get("created_at"), manifest.get("segment"), rank
