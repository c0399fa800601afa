"""`python -m app.report RUN... --out FILE`: what `routescope report` runs once it has found the runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path


def main() -> None:
    """Write the report; progress, and one line for what goes wrong, on stderr."""
    parser = argparse.ArgumentParser(prog="python -m app.report", description="One HTML page of one or several runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder or URI")
    parser.add_argument("--out", type=Path, required=True, help="the HTML file")
    given = parser.parse_args()
    try:
        write(given.runs, given.out)
    except KeyboardInterrupt:
        print("routescope: cancelled", file=sys.stderr)
        sys.exit(130)
    except Exception as error:  # whatever is wrong with a run, a person gets a line
        why = " ".join(str(error).split())
        print(f"routescope: {why if isinstance(error, OSError | ValueError) else f'{error!r}'}", file=sys.stderr)
        sys.exit(1)


def write(runs: list[str], out: Path) -> None:
    """Write the report of the runs at these places to `out`, whole or not at all."""
    # The caches of the dashboard serve here as well; that there is no dashboard around them is no news.
    logging.disable(logging.WARNING)
    from app.report.contents import report_html
    from recorder.reader import Run

    opened = [Run(run) for run in runs]
    text = report_html(opened, _say)
    half = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(out)
    finally:
        half.unlink(missing_ok=True)
    _say(f"{len(text.encode()) / 1e6:.1f} MB")
    print(out)


def _say(text: str) -> None:
    print(f"report: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
