"""`routescope verify`, `compact` and `analyse`: the files of a run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .common import (
    DONE,
    FAILED,
    WRONG_ARGUMENTS,
    AsJson,
    CommandError,
    RunArgument,
    open_run,
    print_json,
    print_table,
    run_path_of,
    warn,
)


def verify(
    run: RunArgument,
    as_json: AsJson = False,
) -> int:
    """Read a run to its last byte and say whether its rows go together."""
    from ..verify import verify_run

    report = verify_run(run_path_of(run))
    if as_json:
        print_json(report.as_json())
    else:
        for problem in report.problems:
            print(problem)
        for note in report.notes:
            warn(f"{report.path}: note: {note}")
        if not report.problems:
            print(report.summary)
    return FAILED if report.problems else DONE


def compact(
    run: RunArgument,
) -> None:
    """Join the many small parts of a run that crashed into few; runs that end do so by themselves."""
    from ..compact import compact_run
    from ..manifest import RunExistsError, RunUnreadableError

    path = run_path_of(run)
    try:
        done = compact_run(path)
    except (RunExistsError, RunUnreadableError, OSError) as error:
        raise CommandError(str(error), FAILED) from None
    sizes = f"{done.bytes_before / 1e6:.1f} MB -> {done.bytes_after / 1e6:.1f} MB"
    print(f"{path}: {done.parts_before} parts -> {done.parts_after}, {sizes}")


def analyse(
    run: RunArgument,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A Dask scheduler (tcp://host:8786); threads by default."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Count what all decisions of a run say, and keep the counts with the run."""
    from ..analysis.command import ClusterError, analyse_run

    opened = open_run(run)
    try:
        report = analyse_run(opened, scheduler, in_terminal=sys.stderr.isatty())
    except ClusterError as error:
        raise CommandError(str(error), FAILED if error.began else WRONG_ARGUMENTS) from None
    except (OSError, ValueError) as error:
        raise CommandError(f"{opened.path}: {error}", FAILED) from None
    for problem in report.problems:
        warn(f"{opened.path}: cannot be read, and is left out: {problem}")
    if as_json:
        print_json(report.as_json())
    else:
        print(report.headline)
        print_table(report.columns, report.rows)
    return FAILED if report.problems else DONE
