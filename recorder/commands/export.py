"""`routescope export`: a run as one zip file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import CANCELLED, FAILED, CommandError, RunArgument, run_path_of


def export(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.zip", help="The zip; RUN.zip in this folder by default.")
    ] = None,
) -> None:
    """Write a run as one zip file, for another machine: routescope import zip FILE.zip."""
    from ..archive import ArchiveError, export_zip
    from ..manifest import RunNotFoundError, RunUnreadableError

    place = run_path_of(run)
    target = out or Path(f"{place.resolve().name}.zip")
    if target.suffix != ".zip":
        raise CommandError(f"--out must end in .zip, got {str(target)!r}")
    if not target.absolute().parent.is_dir():
        raise CommandError(f"--out {target}: there is no folder {target.absolute().parent}")
    try:
        export_zip(place, target)
    except FileExistsError as error:  # the target, or somebody still writes to the run
        raise CommandError(str(error)) from None
    except (RunNotFoundError, RunUnreadableError, ArchiveError, OSError) as error:
        raise CommandError(f"exporting {run} failed: {error}", FAILED) from None
    except KeyboardInterrupt:
        raise CommandError("cancelled; nothing was exported", CANCELLED) from None
    print(target)
