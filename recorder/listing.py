"""Lists of runs, from their manifests alone."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recorder import storage
from recorder.about import About, read_about
from recorder.manifest import MANIFEST_NAME, RunNotFoundError, read_manifest, run_status
from recorder.storage import ObjectPath, Place


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a list of runs shows. `status` is "unreadable" and `manifest` None where `error` says why.

    `name` is what people call it (`about.name`), else the manifest's.
    """

    path: Place
    run_id: str
    name: str
    status: str
    error: str | None
    manifest: dict[str, Any] | None
    about: About


def list_runs(*folders: str | Place) -> list[RunInfo]:
    """The runs in these folders, oldest first; never raises for a run that cannot be read.

    Args:
        folders: folders of runs, or a run's own folder, local or as a URI; one that does not exist holds none.

    Returns:
        One entry a folder with a run.json.

    Raises:
        StorageError: an object store cannot be reached or refuses.
        ValueError: a URI that cannot be used.
    """
    infos: list[RunInfo] = []
    for folder in folders:
        place = storage.locate(folder)
        infos += _stored_runs(place) if isinstance(place, ObjectPath) else _local_runs(place)
    return sorted(infos, key=lambda info: str((info.manifest or {}).get("created_at") or ""))


def _local_runs(folder: Path) -> list[RunInfo]:
    try:
        candidates = [folder, *sorted(folder.iterdir())]
    except OSError:
        return []
    found = [_info(path) for path in candidates if os.path.isfile(path / MANIFEST_NAME)]  # noqa: PTH113
    return [info for info in found if info is not None]


def _stored_runs(folder: ObjectPath) -> list[RunInfo]:
    """One listing, and one look for a run.json under each prefix, several at once."""
    found = folder.entries()
    paths = [folder] if MANIFEST_NAME in found else []
    paths += [folder / name for name, entry in sorted(found.items()) if not entry.is_file]
    return [info for info in storage.each(folder, _info, paths) if info is not None]


def _info(path: Place) -> RunInfo | None:
    try:
        return _info_of(path, read_manifest(path), read_about(path))
    except RunNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return _unreadable(path, error)


def _unreadable(path: Place, error: Exception) -> RunInfo:
    return RunInfo(
        path=path,
        run_id=path.name,
        name=path.name,
        status="unreadable",
        error=str(error),
        manifest=None,
        about=About(),
    )


def _info_of(path: Place, manifest: dict[str, Any], about: About) -> RunInfo:
    run_id = str(manifest.get("run_id") or path.name)
    return RunInfo(
        path=path,
        run_id=run_id,
        name=about.name or str(manifest.get("name") or run_id),
        status=run_status(manifest),
        error=manifest.get("error"),
        manifest=manifest,
        about=about,
    )
