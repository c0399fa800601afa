"""The `routescope` command."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import typer
from typer.exceptions import TyperException

from .commands import bench, compare, dashboard, export, importing, layout, listing, record, report, upkeep
from .commands.common import CANCELLED, DONE, FAILED, CommandError

cli = typer.Typer(
    name="routescope",
    help="Record, read and replay the routing of mixture-of-experts training runs.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

commands: dict[str, Callable[..., Any]] = {  # in the order that --help lists them
    "record": record.record,
    "import": importing.import_,
    "export": export.export,
    "runs": listing.runs,
    "summary": listing.summary,
    "compare": compare.compare,
    "report": report.report,
    "verify": upkeep.verify,
    "compact": upkeep.compact,
    "analyse": upkeep.analyse,
    "layout": layout.layout,
    "app": dashboard.app,
}
for name, command in commands.items():
    cli.command(name)(command)
cli.add_typer(bench.bench, name="bench")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; print one line and exit with its code on any error that a person can act on."""
    given = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    try:
        code = cli(args=given, standalone_mode=False)
    except CommandError as error:
        _fail(str(error), error.exit_code)
    except TyperException as error:
        _fail(_with_value(error.format_message().strip(), given) or "see routescope --help", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("cancelled", CANCELLED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; say nothing more
        sys.exit(DONE)
    except OSError as error:  # output to a full disk, say
        _fail(str(error), FAILED)
    sys.exit(code if isinstance(code, int) else DONE)


def _with_value(message: str, given: Sequence[str]) -> str:
    """The parser's message with the value that was typed, which it leaves out of some."""
    match = re.match(
        r"Invalid value for '(?P<option>--[a-z-]+)': (?:Value error, )?(?P<why>.*)", message, flags=re.DOTALL
    )
    if match is None:
        return " ".join(message.split())
    option = match["option"]
    typed = [after for at, after in pairwise(given) if at == option]
    typed += [text.partition("=")[2] for text in given if text.startswith(f"{option}=")]
    value = f" {typed[-1]!r}" if typed and repr(typed[-1]) not in match["why"] else ""
    return " ".join(f"invalid value for {option}{value}: {match['why']}".split())


def _fail(message: str, code: int) -> None:
    print(f"routescope: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
