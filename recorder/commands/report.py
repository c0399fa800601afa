"""`routescope report`: runs as one page of HTML."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .common import FAILED, CommandError, open_run, warn_of_problems


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Paths, URIs or ids of 1 to 12 runs.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write; one that is there is replaced.")],
) -> None:
    """One self-contained HTML page with diagnosis, metrics and figures of one or several runs; it opens offline."""
    if out.is_dir():
        raise CommandError(f"--out {out} is a folder; name a file, such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise CommandError(f"--out {out}: there is no folder {out.parent}")
    if len(runs) > 12:
        raise CommandError(f"report takes 1 to 12 runs, got {len(runs)}")
    if find_spec("app") is None:
        raise CommandError("the dashboard (package `app`), which draws the figures, is not installed", FAILED)
    opened = [open_run(run) for run in runs]
    for run in opened:
        warn_of_problems(run)
    sys.stdout.flush()
    # Not imported: the recorder does without the app, which stands on it. -P: a folder `app` of the user's own, where
    # they are, is another.
    places = [str(run.path) for run in opened]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "app.report", "--out", str(out), "--", *places])
