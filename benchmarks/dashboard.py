"""The real dashboard, a Chromium on it, and what the one sends the other: for the benchmarks of the app."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
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
    """What one browser window was sent: script runs as (start, end) in seconds, and bytes by kind."""

    runs: list[tuple[float, float]] = field(default_factory=list)
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
    def server_seconds(self) -> float:
        """Time that the server spent in runs of the script."""
        return sum(end - start for start, end in self.runs)

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
            self.runs.append((self._started, event["timestamp"]))
            self._started = None

    def _loaded(self, event: dict[str, Any]) -> None:
        static = "/static/" in self._urls.get(event["requestId"], "")
        self.bytes["static" if static else "http"] += int(event["encodedDataLength"])


@contextmanager
def dashboard(folders: list[Path]) -> Iterator[tuple[str, psutil.Process]]:
    """A running server on these folders: its address, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "recorder.cli", "app", *map(str, folders), "--port", str(port)]
    environment = {**os.environ, "STREAMLIT_SERVER_HEADLESS": "true"}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
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
        yield url, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(timeout=30)


def settle(page: Page) -> None:
    """Wait until the page is drawn and nothing runs any more."""
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
    page.locator("[data-testid=stAppViewContainer] h1").first.wait_for()
    page.wait_for_function("() => !document.querySelector('[data-testid=stSkeleton], [data-stale=true]')")


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time of a process and those it started."""
    return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])
