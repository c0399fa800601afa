"""Lists of runs, from their manifests alone."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recorder.manifest import MANIFEST_NAME, read_manifest, run_status


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a list of runs shows. `status` is "unreadable" and `manifest` None where `error` says why."""

    path: Path
    run_id: str
    name: str
    status: str
    error: str | None
    manifest: dict[str, Any] | None


def list_runs(*folders: str | Path) -> list[RunInfo]:
    """The runs in these folders, oldest first; never raises for a run that cannot be read.

    Args:
        folders: folders of runs, or a run's own folder; one that does not exist holds none.

    Returns:
        One entry a folder with a run.json.
    """
    infos = []
    for folder in folders:
        try:
            candidates = [Path(folder), *sorted(Path(folder).iterdir())]
        except OSError:
            continue
        infos += [_info(path) for path in candidates if os.path.isfile(path / MANIFEST_NAME)]  # noqa: PTH113
    return sorted(infos, key=lambda info: str((info.manifest or {}).get("created_at") or ""))


def _info(path: Path) -> RunInfo:
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError) as error:
        return RunInfo(
            path=path, run_id=path.name, name=path.name, status="unreadable", error=str(error), manifest=None
        )
    run_id = str(manifest.get("run_id") or path.name)
    return RunInfo(
        path=path,
        run_id=run_id,
        name=str(manifest.get("name") or run_id),
        status=run_status(manifest),
        error=manifest.get("error"),
        manifest=manifest,
    )
