"""Whether a toy run that was cancelled or killed can be continued, told without torch, so that pages can ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..manifest import run_status
from ..storage import Place
from .config import ToyConfig

#: The training as it stood at the end of some step; in the run's folder until the run has finished.
CHECKPOINT = "checkpoint.pt"


def why_not(run: Place, manifest: Mapping[str, Any]) -> str | None:
    """Why the run cannot be continued, in one line; None where it can.

    run: its folder, or its place in an object store. manifest: its run.json.
    """
    try:
        ToyConfig.from_manifest(manifest)
    except ValueError as error:
        return str(error)
    status = run_status(dict(manifest))
    if status == "running":
        return "it is still being recorded"
    if status == "finished":
        return "it has finished: there is no step left"
    if not (run / CHECKPOINT).is_file():
        return "it keeps no checkpoint: it ended before the first one, or an earlier version recorded it"
    return None
