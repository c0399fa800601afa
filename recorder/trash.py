"""Runs that a person deleted: moved into `.trash/` of their folder of runs, to be put back or removed for good.

A deleted run keeps its name and stands two folders down (`.trash/<when>-<id>/<run>`), where no list of runs looks. The
folder of runs must be local: an object store cannot rename, so that moving would mean to copy every part.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from recorder import storage
from recorder.about import read_about
from recorder.compact import refuse_other_ranks_at_work
from recorder.manifest import RunExistsError, RunNotFoundError, RunUnreadableError, read_manifest, run_status
from recorder.storage import ObjectPath, Place

TRASH_NAME = ".trash"
_ENTRY = re.compile(r"(?P<when>\d{8}T\d{6})-[0-9a-f]{8}")
_WHEN = "%Y%m%dT%H%M%S"


@dataclass(frozen=True, kw_only=True)
class Trashed:
    """A run in the trash.

    path        where it is now; its last part is the run's own folder name
    name        what people called it
    deleted_at  UTC
    size        bytes on disk
    """

    path: Path
    name: str
    deleted_at: datetime
    size: int

    @property
    def folder(self) -> Path:
        """The folder of runs it was in."""
        return self.path.parents[2]


def discard(run: Place) -> Trashed:
    """Move a run into the trash of its folder.

    Raises:
        RunExistsError: somebody still writes to it.
        RunNotFoundError: there is no run at this path.
        ValueError: it is in an object store, or the trash is no folder of its own.
        OSError: it cannot be moved; it is where it was.
    """
    if isinstance(run, ObjectPath):
        raise ValueError(f"{run} is in an object store, which cannot move a run: delete it with the store's own tools")
    with storage.lock(run):  # a resume holds it while it takes the run over
        try:
            manifest = read_manifest(run)
            if run_status(manifest) == "running":
                raise RunExistsError(f"{run.name} is still being written; cancel it first")
            refuse_other_ranks_at_work(run, manifest)
            name = read_about(run).name or str(manifest.get("name") or run.name)
        except RunUnreadableError:
            name = run.name
        trash = _trash_of(run.parent)
        trash.mkdir(exist_ok=True)
        entry = trash / f"{datetime.now(UTC):{_WHEN}}-{uuid.uuid4().hex[:8]}"
        entry.mkdir()
        try:
            run.rename(entry / run.name)
        except OSError:
            entry.rmdir()
            raise
    return _trashed(entry / run.name, name)


def trashed(folder: Path) -> list[Trashed]:
    """The runs in the trash of a folder of runs, the last deleted first; none where there is no trash."""
    found = []
    for entry in _entries(folder):
        for path in sorted(entry.iterdir()):
            try:
                name = read_about(path).name or str(read_manifest(path).get("name") or path.name)
            except (RunNotFoundError, RunUnreadableError):
                name = path.name
            found.append(_trashed(path, name))
    return sorted(found, key=lambda run: run.path.parent.name, reverse=True)


def held(folder: Path) -> int:
    """How many runs are in the trash of a folder of runs."""
    return len(_entries(folder))


def restore(run: Trashed) -> Path:
    """Put a run back where it was and return its folder.

    Raises:
        FileExistsError: there is another of that name by now.
        FileNotFoundError: it is no longer in the trash.
        OSError: it cannot be moved.
    """
    target = run.folder / run.path.name
    if os.path.lexists(target):
        raise FileExistsError(f"there is another {run.path.name} in {run.folder} by now; rename its folder first")
    if not os.path.lexists(run.path):
        raise FileNotFoundError(f"{run.path.name} is no longer in the trash")
    run.path.rename(target)
    run.path.parent.rmdir()
    return target


def remove_for_good(runs: Iterable[Trashed]) -> None:
    """Delete runs that are in the trash. Links are removed, and never what they lead to.

    Raises:
        OSError: something cannot be deleted; what could has been.
    """
    for run in runs:
        if run.path.is_symlink():
            run.path.unlink()
        elif run.path.exists():
            shutil.rmtree(run.path)
        if run.path.parent.is_dir() and not any(run.path.parent.iterdir()):
            run.path.parent.rmdir()


def _entries(folder: Path) -> list[Path]:
    trash = folder / TRASH_NAME
    if trash.is_symlink() or not trash.is_dir():
        return []
    return [entry for entry in trash.iterdir() if _ENTRY.fullmatch(entry.name) and _is_folder(entry)]


def _trash_of(folder: Path) -> Path:
    trash = folder / TRASH_NAME
    # What a link leads to may hold anything, and is not ours to empty.
    if os.path.lexists(trash) and not _is_folder(trash):
        raise ValueError(f"{trash} is no folder of its own (a link, or a file), so nothing can be moved there")
    return trash


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _trashed(path: Path, name: str) -> Trashed:
    match = _ENTRY.fullmatch(path.parent.name)
    assert match is not None
    when = datetime.strptime(match["when"], _WHEN).replace(tzinfo=UTC)
    return Trashed(path=path, name=name, deleted_at=when, size=_size(path))


def _size(path: Path) -> int:
    if path.is_symlink():
        return 0
    return sum((Path(place) / name).lstat().st_size for place, _, files in os.walk(path) for name in files)
