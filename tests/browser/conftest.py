"""A real dashboard server and a real Chromium on it."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from app import jobs

SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
PATIENCE_MS = 60_000  # a page takes a second or two; the machine may be busy
expect.set_options(timeout=PATIENCE_MS)


@dataclass
class Dashboard:
    """A running server: where it is, the folder it records into, its log."""

    url: str
    runs: Path
    log: Path

    def open(self, page: Page, path: str) -> None:
        page.goto(f"{self.url}/{path}")
        self.settle(page)

    def go(self, page: Page, title: str) -> None:
        """Change the page by the menu."""
        page.get_by_role("link", name=title, exact=True).click()
        page.wait_for_url(re.compile(rf"/{title.lower()}\b"))
        self.settle(page)

    def settle(self, page: Page) -> None:
        """Wait until Streamlit has drawn the page and nothing runs any more."""
        page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
        page.locator("[data-testid=stAppViewContainer] h1").first.wait_for()
        page.wait_for_function("() => !document.querySelector('[data-testid=stSkeleton], [data-stale=true]')")


@dataclass
class Trouble:
    """What a browser complained about: console errors, uncaught exceptions, requests that left this machine."""

    found: list[str] = field(default_factory=list)

    def watch(self, page: Page, url: str) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.found.append(f"uncaught: {error}"))
        page.on("request", lambda request: self._request(request.url, url))

    def _console(self, message) -> None:
        # Opened below its root, Streamlit looks for its own base path by trying; those 404s are its own.
        probing = "404" in message.text and "/_stcore/" in str(message.location.get("url", ""))
        if message.type == "error" and not probing:
            self.found.append(f"console: {message.text} {message.location}")

    def _request(self, requested: str, url: str) -> None:
        if not requested.startswith((url, url.replace("http", "ws"), "data:", "blob:")):
            self.found.append(f"request to {requested}")


def faults_on(page: Page) -> list[str]:
    """Exceptions that Streamlit shows on the page."""
    return [element.inner_text() for element in page.locator("[data-testid=stException]").all()]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        message = "no Chromium found: install the package chromium (Debian: apt-get install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    flags = [*FLAGS, "--no-sandbox"] if os.geteuid() == 0 else FLAGS
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """`routescope app` on an empty folder of one's own and the sample runs."""
    home = tmp_path_factory.mktemp("dashboard")
    runs = home / "runs"
    runs.mkdir()
    yield from serve(home, runs, [runs, SAMPLES])


def serve(home: Path, runs: Path, folders: list[Path]) -> Iterator[Dashboard]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = home / "server.log"
    command = [sys.executable, "-m", "recorder.cli", "app", *map(str, folders), "--port", str(port)]
    environment = {**os.environ, "STREAMLIT_SERVER_HEADLESS": "true"}
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=home, stdout=output, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, server, log)
        yield Dashboard(url, runs, log)
    finally:
        server.terminate()
        server.wait(timeout=30)
        # recordings outlive the server on purpose: not those of a test that failed
        for job in jobs.jobs(runs):
            jobs.cancel(job)
    text = log.read_text()
    assert not re.search(r"Traceback|Error|[Ww]arning|deprecat", text), text


def _wait_until_healthy(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server does not answer: {log.read_text()}")


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard) -> Iterator[Page]:
    """A fresh browser window; fails the test for anything it complained about."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    trouble = Trouble()
    trouble.watch(page, dashboard.url)
    yield page
    faults = faults_on(page)
    context.close()
    assert trouble.found == []
    assert faults == []
