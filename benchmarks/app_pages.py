"""What the dashboard costs: server time and bytes of each page, the runs page with many runs, memory under replay.

    python benchmarks/app_pages.py [--pages runs,overview] [--run none] [--repeats 3] [--many 200] [--replay-minutes 0]

It starts the real dashboard on the sample runs and opens each page in a real Chromium (Debian: package chromium).

*Server time*: how long the server takes to draw the page, from the beginning of a run of its script to its end,
summed over the runs that opening the page takes; measured in the server (`benchmarks/timed_server.py`). *cpu* is
processor time of the server meanwhile, with what it takes to send. *Seen* is the time from the first message about a
drawing to the last, as they reach the browser, which draws them on the same processors. *First* is the first opening
after the start of the server, the others are medians of `--repeats` more, each in a fresh browser window.

*Sent*: all WebSocket frames to the browser, uncompressed, and what else came by HTTP beside Streamlit's own static
files. Those are the same for every page and stay in the browser; they are shown apart.

*Many runs*: a folder of so many copies of the sample runs, each with a run_id and a name of its own.

*Replay*: the replay page plays by itself, from the start again at each end, for so many minutes; memory of the server
(RSS) and of the page (JavaScript heap after a collection) every half minute. *Growth* is the median of the last third
over the median of the middle third: the first third fills the caches.

Bars: 2 s and 5 MB a page; 1 s for the runs page after the first time; memory flat, that is growth below 5 %.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser
from playwright.sync_api import TimeoutError as PlaywrightTimeout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from app.navigation import VIEWS
from benchmarks.dashboard import PATIENCE_MS, Server, Traffic, chromium, dashboard, settle

SAMPLES = Path(__file__).resolve().parents[1] / "sample_runs"
BARS = {"seconds": 2.0, "megabytes": 5.0, "many_seconds": 1.0, "growth": 1.05}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """One opening of a page. server_s, cpu_s: of the server; runs: of the script."""

    server_s: float
    cpu_s: float
    seen_s: float
    megabytes: float
    static_megabytes: float
    runs: int


def open_page(browser: Browser, address: str, server: Server) -> Opened:
    """Open a page in a fresh window and measure."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    traffic = Traffic()
    traffic.watch(context.new_cdp_session(page))
    drawn, worked = len(server.drawn()), server.cpu_seconds()
    page.goto(f"{server.url}/{address}")
    settle(page)
    page.wait_for_timeout(300)  # a run that the page asks for once it is drawn
    settle(page)
    opened = Opened(
        server_s=sum(server.drawn()[drawn:]),
        cpu_s=server.cpu_seconds() - worked,
        seen_s=sum(traffic.seen),
        megabytes=traffic.megabytes,
        static_megabytes=traffic.bytes["static"] / 1e6,
        runs=len(traffic.seen),
    )
    context.close()
    return opened


def measure(browser: Browser, address: str, server: Server, repeats: int) -> dict[str, Any]:
    """A page for the first time, and the medians of opening it again."""
    first = open_page(browser, address, server)
    again = [open_page(browser, address, server) for _ in range(repeats)]
    return {
        "first_s": first.server_s,
        "first_cpu_s": first.cpu_s,
        "again_s": statistics.median(one.server_s for one in again),
        "again_seen_s": statistics.median(one.seen_s for one in again),
        "again_cpu_s": statistics.median(one.cpu_s for one in again),
        "megabytes": max(one.megabytes for one in [first, *again]),
        "static_megabytes": first.static_megabytes,
        "script_runs": first.runs,
    }


def pages(browser: Browser, names: list[str], run: str, repeats: int) -> dict[str, dict[str, Any]]:
    """Every page on the sample runs."""
    found = {}
    print(
        f"{'page':<16}{'first s':>9}{'cpu':>7}{'again s':>9}{'cpu':>7}{'seen':>7}{'sent MB':>9}{'static MB':>11}"
        "  within bars"
    )
    with tempfile.TemporaryDirectory() as home, dashboard([Path(home), SAMPLES]) as server:
        # the first window of all pays for the start of the server and is no page's doing
        open_page(browser, "glossary", server)
        for name in names:
            row = found[name] = measure(browser, f"{name}?run={run}", server, repeats)
            _print_row(name, row, BARS["seconds"])
    return found


def many_runs(browser: Browser, count: int, repeats: int) -> dict[str, Any]:
    """The runs page with so many runs in the folder."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        copies(folder, count)
        with dashboard([folder]) as server:
            row = measure(browser, "runs", server, repeats)
    _print_row(f"runs, {count} of them", row, BARS["many_seconds"])
    return row


def copies(folder: Path, count: int) -> None:
    """So many runs in a folder, made of the sample runs."""
    samples = sorted(path.parent for path in SAMPLES.glob("*/run.json"))
    for number in range(count):
        target = folder / f"run-{number:03d}"
        shutil.copytree(samples[number % len(samples)], target)
        manifest = json.loads((target / "run.json").read_text())
        manifest |= {"run_id": target.name, "name": f"{manifest['name']} {number}"}
        (target / "run.json").write_text(json.dumps(manifest))


def replay(browser: Browser, run: str, minutes: float) -> dict[str, Any]:
    """Memory over so many minutes of replay."""
    print(f"{'minute':>7}{'server MB':>11}{'heap MB':>9}{'step':>7}")
    rows: list[tuple[float, float, float]] = []
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as home, dashboard([Path(home), SAMPLES]) as server:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{server.url}/replay?run={run}&step=0")
        settle(page)
        devtools = context.new_cdp_session(page)
        play = page.locator(".st-key-play button").filter(has_text="Play").first
        start, next_sample = time.monotonic(), 0.0
        while (elapsed := time.monotonic() - start) < 60 * minutes:
            if play.count():
                with suppress(PlaywrightTimeout):  # drawn anew in between: there is a next time
                    play.click(timeout=3000)
            if elapsed >= next_sample:
                next_sample += 30
                devtools.send("HeapProfiler.collectGarbage")
                heap = devtools.send("Runtime.getHeapUsage")["usedSize"] / 1e6
                rows.append((elapsed / 60, server.process.memory_info().rss / 1e6, heap))
                step = page.locator(".st-key-step input[type=range]").input_value()
                seen.add(step)
                print(f"{rows[-1][0]:7.1f}{rows[-1][1]:11.1f}{heap:9.1f}{step:>7}", flush=True)
            page.wait_for_timeout(1000)
        context.close()
    if minutes > 1 and len(seen) < 2:
        sys.exit(f"the replay never left step {seen.pop()}: nothing was measured")
    third = len(rows) // 3
    growth = {
        name: statistics.median(row[place] for row in rows[-third:])
        / statistics.median(row[place] for row in rows[third : 2 * third])
        for name, place in (("server", 1), ("heap", 2))
        if third
    }
    for name, ratio in growth.items():
        print(f"{name}: growth {ratio:.3f} {'ok' if ratio < BARS['growth'] else 'OVER'}")
    return {"rows": rows, "growth": growth}


def _print_row(name: str, row: dict[str, Any], seconds: float) -> None:
    ok = row["again_s"] <= seconds and row["megabytes"] <= BARS["megabytes"]
    print(
        f"{name:<16}{row['first_s']:9.2f}{row['first_cpu_s']:7.2f}{row['again_s']:9.2f}{row['again_cpu_s']:7.2f}"
        f"{row['again_seen_s']:7.2f}"
        f"{row['megabytes']:9.2f}{row['static_megabytes']:11.2f}  {'ok' if ok else 'OVER'}",
        flush=True,
    )


def main() -> None:
    """Measure and print; `--json` writes the numbers too."""
    names = [view.name for view in VIEWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default=",".join(names), help="which, separated by commas; '' for none")
    parser.add_argument("--run", default="none", help="the sample run that pages show")
    parser.add_argument("--repeats", type=int, default=3, help="openings after the first")
    parser.add_argument("--many", type=int, default=200, help="runs in the folder of the second part; 0 leaves it out")
    parser.add_argument("--replay-minutes", type=float, default=0, help="0 leaves the third part out")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args()
    wanted = [name for name in options.pages.split(",") if name]
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"no page {', '.join(unknown)}; there are {', '.join(names)}")
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    found: dict[str, Any] = {}
    with chromium() as browser:
        if wanted:
            found["pages"] = pages(browser, wanted, options.run, options.repeats)
        if options.many:
            found["many"] = many_runs(browser, options.many, options.repeats)
        if options.replay_minutes:
            found["replay"] = replay(browser, options.run, options.replay_minutes)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
