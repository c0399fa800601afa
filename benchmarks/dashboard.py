"""The real dashboard, a Chromium on it, and what the one sends the other: for the benchmarks of the app."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, CDPSession, Page, sync_playwright
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

PATIENCE_MS = 120_000
_HERE = Path(__file__).resolve().parent
_TIMED, _SCRIPT = str(_HERE / "timed_server.py"), str(_HERE.parent / "app" / "main.py")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. Ends the script where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        sys.exit("no Chromium found: install the package chromium")
    flags = ["--disable-gpu", "--no-sandbox"] if os.geteuid() == 0 else ["--disable-gpu"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@dataclass
class Traffic:
    """What one browser window was sent: seconds from the first to the last message of each drawing, bytes by kind."""

    seen: list[float] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=lambda: {"frames": 0, "http": 0, "static": 0})
    _started: float | None = None
    _urls: dict[str, str] = field(default_factory=dict)

    def watch(self, devtools: CDPSession) -> None:
        """Listen to a page; call before it is opened."""
        devtools.on("Network.webSocketFrameReceived", self._frame)
        devtools.on("Network.requestWillBeSent", lambda e: self._urls.update({e["requestId"]: e["request"]["url"]}))
        devtools.on("Network.loadingFinished", self._loaded)
        devtools.send("Network.enable")

    @property
    def megabytes(self) -> float:
        """What this page itself was sent, Streamlit's static files not counted."""
        return (self.bytes["frames"] + self.bytes["http"]) / 1e6

    def _frame(self, event: dict[str, Any]) -> None:
        data = base64.b64decode(event["response"]["payloadData"])
        self.bytes["frames"] += len(data)
        message = ForwardMsg.FromString(data)
        kind = message.WhichOneof("type")
        if kind == "new_session":
            self._started = event["timestamp"]
        elif kind == "script_finished" and self._started is not None:
            self.seen.append(event["timestamp"] - self._started)
            self._started = None

    def _loaded(self, event: dict[str, Any]) -> None:
        static = "/static/" in self._urls.get(event["requestId"], "")
        self.bytes["static" if static else "http"] += int(event["encodedDataLength"])


@dataclass(frozen=True, kw_only=True)
class Server:
    """A dashboard that runs. times: the file of `benchmarks/timed_server.py`."""

    url: str
    process: psutil.Process
    times: Path

    def drawn(self) -> list[float]:
        """Seconds that each run of a page's script has taken so far."""
        return [float(line) for line in self.times.read_text().split()] if self.times.exists() else []

    def cpu_seconds(self) -> float:
        """Processor time of the server and the processes it started."""
        return sum(sum(one.cpu_times()[:2]) for one in [self.process, *self.process.children(recursive=True)])


@contextmanager
def dashboard(folders: list[Path]) -> Iterator[Server]:
    """A running server on these folders."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "STREAMLIT_SERVER_HEADLESS": "true"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a person's Python keeps what it has compiled
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as home:
        times = Path(home) / "times"
        command = [sys.executable, _TIMED, str(times), _SCRIPT, "--server.port", str(port), "--", *map(str, folders)]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"{url}/_stcore/health", timeout=2).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise
                    time.sleep(0.2)
            yield Server(url=url, process=psutil.Process(server.pid), times=times)
        finally:
            server.terminate()
            server.wait(timeout=30)


def settle(page: Page) -> None:
    """Wait until the page is drawn and nothing runs any more."""
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
    page.locator("[data-testid=stAppViewContainer] h1").first.wait_for()
    page.wait_for_function("() => !document.querySelector('[data-testid=stSkeleton], [data-stale=true]')")
