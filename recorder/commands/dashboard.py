"""`routescope app`: the dashboard."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .common import FAILED, CommandError, no_folder, place_of


def app(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR]...", help="Folders of runs, or URIs; runs/ and the samples by default."),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the dashboard.")] = None,
) -> None:
    """Open the dashboard."""
    for place in map(place_of, folders or []):
        if not place.is_dir():
            raise CommandError(no_folder(place))
    spec = find_spec("app")
    if spec is None or not spec.submodule_search_locations:
        raise CommandError("the dashboard (package `app`) is not installed beside the recorder", FAILED)
    script = Path(next(iter(spec.submodule_search_locations))) / "main.py"
    command = [sys.executable, "-m", "streamlit", "run", str(script)]
    if port is not None:
        command += ["--server.port", str(port)]
    command += ["--", *(folders or [])]
    sys.stdout.flush()
    os.execv(sys.executable, command)
