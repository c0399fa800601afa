"""Streamlit's server as its command starts it, which writes down how long each run of a page's script takes.

    python benchmarks/timed_server.py TIMES SCRIPT [streamlit's options] [-- folders]

TIMES gets a line for each run, its seconds: from the moment the server begins to draw a page, or a part of one, until
all of it is drawn and handed over to be sent.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from streamlit.runtime.scriptrunner.script_runner import ScriptRunner
from streamlit.web import cli


def main() -> None:
    times = Path(sys.argv[1])
    run_script = ScriptRunner._run_script

    def timed(self: ScriptRunner, *given: Any) -> None:
        start = time.perf_counter()
        try:
            run_script(self, *given)
        finally:
            with times.open("a") as file:
                file.write(f"{time.perf_counter() - start:.6f}\n")

    ScriptRunner._run_script = timed  # type: ignore[method-assign]
    sys.argv = ["streamlit", "run", *sys.argv[2:]]
    cli.main(prog_name="streamlit")


if __name__ == "__main__":
    main()
