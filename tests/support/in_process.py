"""The `routescope` command, and pieces of Python, run in the tests' own process: a process of its own takes seconds of
the processor to load torch, and each test file starts a few with one of its own kind to show that they stand alone."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from recorder import cli

Result = subprocess.CompletedProcess[str]
CAUGHT = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]  # by `routescope record`


def routescope(*arguments: object, cwd: Path | str = ".") -> Result:
    """What `subprocess.run` gives of that command: exit code, output, errors. An exception nobody caught is raised."""
    with _told(cwd) as (out, err):
        try:
            cli.main(list(map(str, arguments)))
        except SystemExit as ended:
            code = ended.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def python(code: str, cwd: Path | str = ".", name: str = "<code>") -> Result:
    """The same of code that a person would run as a script, with names of its own."""
    with _told(cwd) as (out, err):
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    return subprocess.CompletedProcess(name, 0, out.getvalue(), err.getvalue())


@contextmanager
def _told(cwd: Path | str) -> Iterator[tuple[StringIO, StringIO]]:
    before = {number: signal.getsignal(number) for number in CAUGHT}
    out, err = StringIO(), StringIO()
    try:
        with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
            yield out, err
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
