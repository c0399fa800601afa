"""One measurement at a time, in a process of its own, so that the server's threads and torch's never meet.

Two measurements at once would slow each other and both be wrong; so there is one for the whole server, and what it
found stays until the server stops, for every window that asks. No Streamlit here.
"""

import atexit
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_KEPT = 20  # results; the oldest goes first
_ROUND = re.compile(r"round (\d+) of (\d+)")
_PATIENCE_S = 2.0  # between asking a process to end and making it

State = Literal["running", "done", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a measurement is: rounds done (None while it warms up), rounds in all, seconds since its start."""

    done: int | None
    total: int | None
    elapsed_s: float


class Measurement:
    """A command that prints a JSON report on stdout and `round 3 of 10` lines on stderr.

    name: what is measured, as the page writes it. report: the result once `state` is "done". error: one line once it
    is "failed". Raises OSError where the command cannot be run.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.report: dict[str, Any] | None = None
        self.error: str | None = None
        self.state: State = "running"
        self._folder = tempfile.TemporaryDirectory(prefix="routescope-measurement-")
        self._started = time.monotonic()
        self._cancelled = False
        with self._path("out").open("wb") as out, self._path("err").open("wb") as err:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    def refresh(self) -> State:
        """See whether the process has ended, and take over its result where it has."""
        if self.state == "running" and self._process.poll() is not None:
            self._settle(self._process.returncode)
            self._folder.cleanup()
        return self.state

    def cancel(self) -> None:
        """End it now; nothing is kept. Does nothing where it has ended."""
        if self.refresh() != "running":
            return
        self._cancelled = True
        for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
            self._signal(number)
            try:
                self._process.wait(_PATIENCE_S)
                break
            except subprocess.TimeoutExpired:
                continue
        self.refresh()

    def progress(self) -> Progress:
        """How far it is."""
        rounds = _ROUND.findall(self._text("err"))
        done, total = map(int, rounds[-1]) if rounds else (None, None)
        return Progress(done=done, total=total, elapsed_s=time.monotonic() - self._started)

    def _settle(self, code: int) -> None:
        if self._cancelled:
            self.state = "cancelled"
            return
        try:
            if code == 0:
                self.report = json.loads(self._text("out"))
                self.state = "done"
                return
        except ValueError:
            self.error = "its report could not be read"
        self.state = "failed"
        said = [line for line in self._text("err").splitlines() if line.strip() and not _ROUND.fullmatch(line)]
        if code < 0:
            self.error = f"its process was ended by signal {-code}, perhaps for lack of memory"
        elif said:
            self.error = said[-1].removeprefix("routescope: ")
        else:
            self.error = self.error or f"its process ended with code {code}"

    def _signal(self, number: int) -> None:
        if self._process.poll() is not None:
            return
        if hasattr(os, "killpg"):
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _text(self, name: str) -> str:
        try:
            return self._path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


class Bench:
    """The server's one place to measure: what runs now, and what was found, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Measurement | None = None
        self._reports: OrderedDict[str, dict[str, Any]] = OrderedDict()
        atexit.register(self.cancel)  # a measurement that nobody waits for would only slow the machine

    def start(self, name: str, command: Sequence[str]) -> Measurement | None:
        """Start measuring; None where something is being measured already. Raises OSError."""
        with self._lock:
            if self._refreshed() is not None:
                return None
            self._current = Measurement(name, command)
            return self._current

    def running(self) -> Measurement | None:
        """What is being measured now."""
        with self._lock:
            return self._refreshed()

    def ended(self, name: str) -> Measurement | None:
        """The last measurement, where it is of this name and gave no result: it failed, or was cancelled."""
        with self._lock:
            self._refreshed()
            last = self._current
            return last if last and last.name == name and last.state in ("failed", "cancelled") else None

    def report(self, name: str) -> dict[str, Any] | None:
        """What was found last under this name."""
        with self._lock:
            self._refreshed()
            return self._reports.get(name)

    def cancel(self) -> None:
        """End what is being measured."""
        with self._lock:
            if self._current is not None:
                self._current.cancel()

    def _refreshed(self) -> Measurement | None:
        current = self._current
        if current is None:
            return None
        if current.refresh() == "done" and current.report is not None:
            self._reports[current.name] = current.report
            self._reports.move_to_end(current.name)
            while len(self._reports) > _KEPT:
                self._reports.popitem(last=False)
            self._current = None
        return current if current.state == "running" else None
