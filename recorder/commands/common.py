"""What the subcommands share: exit codes, finding a run that a person named, tables and JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..storage import Place

DONE, FAILED, WRONG_ARGUMENTS, CANCELLED = 0, 1, 2, 130
RUNS_FOLDER = Path("runs")

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's path or URI, or its id in runs/ or sample_runs/.")
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: stable keys, null for no value.")]


class CommandError(Exception):
    """A failure that a person can act on: one line, and the exit code."""

    def __init__(self, message: str, exit_code: int = WRONG_ARGUMENTS) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def open_run(text: str) -> Any:
    """The run at a path, or with that id in the usual folders."""
    from ..reader import Run, RunNotFoundError, RunUnreadableError

    try:
        return Run(run_path_of(text))
    except (RunNotFoundError, RunUnreadableError) as error:
        raise CommandError(str(error), FAILED) from None


def run_path_of(text: str, *, also_in: Place = RUNS_FOLDER) -> Place:
    """The folder at a path, or of that id in the usual folders, that holds a run.json; a URI is taken as it is.

    also_in: another folder to look for that id in, before the usual ones.
    """
    place = place_of(text)
    if not isinstance(place, Path):
        return place
    candidates: list[Place] = list(
        dict.fromkeys([place, also_in / text, RUNS_FOLDER / text, Path("sample_runs") / text])
    )
    for path in candidates:
        if (path / "run.json").exists():
            return path
    looked = ", ".join(str(path) for path in candidates)
    raise CommandError(f"no run {text!r}: no run.json in any of {looked}; see: routescope runs")


def place_of(text: str) -> Place:
    """The folder, or the place in an object store, that a person typed."""
    from ..storage import locate

    try:
        return locate(text)
    except ValueError as error:
        raise CommandError(str(error)) from None


def no_folder(place: Place) -> str:
    from ..storage import ObjectPath

    return f"{place}: {place.why_not()}" if isinstance(place, ObjectPath) else f"{place} is not a folder"


def warn(message: str) -> None:
    print(f"routescope: {message}", file=sys.stderr)


def warn_of_problems(run: Any) -> None:
    for problem in run.problems:
        warn(f"{run.path}: cannot be read, and is left out: {problem}")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [list(columns)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
