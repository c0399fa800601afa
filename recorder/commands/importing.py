"""`routescope import`: a run of another system's dump, or of a zip that `routescope export` wrote."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from .common import CANCELLED, FAILED, RUNS_FOLDER, CommandError, warn

ZIP = "zip"


def import_(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="zip: an exported run; megatron | sglang | vllm: what wrote a dump.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The zip or dump; see docs/import.md.")],
    out: Annotated[Path, typer.Option(help="Folder that holds runs.")] = RUNS_FOLDER,
    model: Annotated[
        str | None, typer.Option(help="Published model's name or config.json, for what a dump does not know.")
    ] = None,
    name: Annotated[str, typer.Option(help="Shown in the dashboard; by default the file's, or the zipped run's.")] = "",
    phase: Annotated[str | None, typer.Option(help="train | probe | eval | generate; by default the format's.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Record the ids of tokens, where there are any.")] = (
        False
    ),
) -> None:
    """Make a run of another system's dump of routing, or of an exported run."""
    # the run is moved to its place when it is whole; on the way out of here its workshop is cleared away
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if kind == ZIP:
            path = _zipped(file, out, name, {"--model": model, "--phase": phase, "--token-ids": token_ids})
        else:
            path = _dumped(kind, file, out, model=model, name=name, phase=phase, token_ids=token_ids)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"importing {file} failed: {error}", FAILED) from None
    except KeyboardInterrupt:
        raise CommandError("cancelled; nothing was imported", CANCELLED) from None
    print(path)


def _dumped(kind: str, file: Path, out: Path, **options: str | bool | None) -> Path:
    from ..importers import KINDS, import_dump

    if kind not in KINDS:
        raise CommandError(f"KIND must be one of {', '.join([*KINDS, ZIP])}, got {kind!r}")
    return import_dump(kind, file, out, **options)  # type: ignore[arg-type]


def _zipped(file: Path, out: Path, name: str, foreign: dict[str, str | bool | None]) -> Path:
    from ..archive import import_zip
    from ..importers import local_folder

    given = [option for option, value in foreign.items() if value]
    if given:
        raise CommandError(f"{given[0]} is for dumps; a zipped run knows its own")
    if not file.is_file():
        raise CommandError(f"{file}: there is no such file")
    imported = import_zip(file, local_folder(out), name=name)
    for problem in imported.report.problems:
        warn(f"{imported.path}: {problem}")
    if not imported.report.problems:
        warn(imported.report.summary)
    return imported.path
