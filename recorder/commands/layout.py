"""`routescope layout`: layers and parameters."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import WRONG_ARGUMENTS, AsJson, CommandError, open_run, print_json, print_table


def layout(
    what: Annotated[
        str, typer.Argument(metavar="NAME|FILE|RUN", help="A published model or size, a config.json, or a run.")
    ],
    context: Annotated[int, typer.Option(min=1, max=10**9, help="Tokens attended to, for FLOPs and cache.")] = 4096,
    as_json: AsJson = False,
) -> None:
    """Layers and parameters, total and active, of a published model, a Hugging Face config or a run."""
    from ..layout_command import model_report, report_of_run, tables, unknown

    try:
        report = model_report(what, context)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if report is None:
        try:
            report = report_of_run(open_run(what), context)
        except CommandError as error:
            raise CommandError(unknown(what)) if error.exit_code == WRONG_ARGUMENTS else error from None
    if as_json:
        print_json(report)
        return
    for heading, columns, rows in tables(report):
        print(heading)
        if columns:
            print_table(columns, rows)
