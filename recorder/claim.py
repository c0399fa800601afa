"""Who may write into a run folder: create it, go on with it, or join it as another rank."""

from typing import Any

from recorder import storage
from recorder.manifest import (
    MANIFEST_NAME,
    RunExistsError,
    create_manifest,
    library_versions,
    now,
    process_alive,
    read_manifest,
    replace_manifest,
    this_process,
)
from recorder.parts import list_parts, part_rank, remove_leftovers
from recorder.schema import FORMAT_VERSION, TABLES
from recorder.storage import Place

#: What identifies a run and its present writer; no caller sets these once the run exists.
FIXED_KEYS = ("format_version", "run_id", "created_at", "segment", "process")


def create_run(path: Place, given: dict[str, Any], *, weights: str) -> dict[str, Any]:
    """Create the folder and its run.json; of two processes at once, one wins.

    Args:
        path: the run's own folder; it may exist as long as it holds no run.
        given: manifest values of the caller, already plain JSON.
        weights: how gate weights are stored, "rounded" or "full".

    Returns:
        The manifest as written.

    Raises:
        RunExistsError: a run, part files or a file is there already.
    """
    if path.exists() and not path.is_dir():
        raise RunExistsError(f"{path} is a file, not a folder for a run")
    path.mkdir(parents=True, exist_ok=True)
    if (path / MANIFEST_NAME).exists():
        raise RunExistsError(f"{path} already holds a run; resume it or choose another folder")
    if any(list_parts(path / table) for table in TABLES):
        raise RunExistsError(f"{path} already holds part files of a run; choose another folder")
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
        "segment": 0,
        "recorded": (given.get("recorded") or {}) | {"weights": weights},
    }
    manifest["name"] = manifest["name"] or manifest["run_id"]
    create_manifest(path, manifest)
    return manifest


def resume_run(path: Place, given: dict[str, Any]) -> dict[str, Any]:
    """Take over a run as its next segment; of two processes at once, one wins.

    Args:
        path: the run's folder.
        given: manifest values that replace those there, `FIXED_KEYS` apart.

    Returns:
        The manifest as written.

    Raises:
        RunExistsError: a live process on this machine still writes to it. A writer on another machine cannot be
            seen from here; whoever resumes there must know that it is gone. In an object store, which has no
            locks, also another that resumes at the same moment, unless the two just miss each other.
        RunNotFoundError, RunUnreadableError: no run there, or none that can be read.
    """
    with storage.lock(path):
        manifest = read_manifest(path)
        process, this = manifest.get("process"), this_process()
        # This very process may take over from a writer of its own that it has given up.
        if (
            isinstance(process, dict)
            and process.get("pid") != this["pid"]
            and manifest.get("status") == "running"
            and process_alive(process)
        ):
            raise RunExistsError(f"{path} is still being written by process {process['pid']}")
        manifest |= {name: value for name, value in given.items() if name not in FIXED_KEYS}
        manifest |= {
            "heartbeat_at": now(),
            "status": "running",
            "error": None,
            "last_step": manifest.get("last_step"),
            "versions": (manifest.get("versions") or {}) | library_versions(),
            "process": this,
            "segment": int(manifest.get("segment") or 0) + 1,
        }
        replace_manifest(path, manifest, alone=True)
    for table in TABLES:
        remove_leftovers(path / table, 0)
    return manifest


def join_run(path: Place, rank: int, *, resume: bool) -> dict[str, Any]:
    """Join the run that rank 0 has created or resumed, as another rank.

    Returns:
        The manifest as rank 0 wrote it.

    Raises:
        RunExistsError: parts of this rank are there already and `resume` is off.
        RunNotFoundError, RunUnreadableError: no run there, or none that can be read.
    """
    manifest = read_manifest(path)
    mine = any(part_rank(name) == rank for table in TABLES for name in list_parts(path / table))
    if mine and not resume:
        raise RunExistsError(f"{path} already holds parts of rank {rank}")
    for table in TABLES:
        remove_leftovers(path / table, rank)
    return manifest
