"""`routescope import`: a run of another system's dump."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from .common import CANCELLED, FAILED, RUNS_FOLDER, CommandError


def import_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="megatron | sglang | vllm: what wrote it.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The dump; see docs/import.md.")],
    out: Annotated[Path, typer.Option(help="Folder that holds runs.")] = RUNS_FOLDER,
    model: Annotated[
        str | None, typer.Option(help="Published model's name or config.json, for what a dump does not know.")
    ] = None,
    name: Annotated[str, typer.Option(help="Shown in the dashboard; the file's name by default.")] = "",
    phase: Annotated[str | None, typer.Option(help="train | probe | eval | generate; by default the format's.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Record the ids of tokens, where there are any.")] = (
        False
    ),
) -> None:
    """Make a run of another system's dump of routing."""
    from ..importers import import_dump

    # the run is moved to its place when it is whole; on the way out of here its workshop is cleared away
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        path = import_dump(kind, file, out, model=model, name=name, phase=phase, token_ids=token_ids)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"importing {file} failed: {error}", FAILED) from None
    except KeyboardInterrupt:
        raise CommandError("cancelled; nothing was imported", CANCELLED) from None
    print(path)
