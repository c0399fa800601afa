"""A large run opened in the dashboard: server time of each page, cold and after a change, and memory.

    python benchmarks/analysis_app.py RUN [--pages overview,replay,...] [--changes 5]

Each page is opened by a real Chromium on a server of its own, which has drawn the glossary before: what every page
needs is loaded, of the run nothing is cached but the files' bytes. Then another layer and another step are chosen
there as a person does, where the page has those. Server time, *cpu* and *seen* are those of `benchmarks/app_pages.py`.
RUN is one that `benchmarks/analysis.py --keep DIR` left; after `routescope analyse RUN` pages take the counts kept
with it, before it those of all decisions are counted when a page asks for them, and the page says so.

Bars: the first page (Overview) within 2 s when cold, a change within 200 ms (the median of some, each to a layer or
step that was not drawn before), resident memory below 700 MB.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.dashboard import PATIENCE_MS, Server, Traffic, chromium, dashboard, settle

PAGES = "overview,replay,tokens,specialisation,coactivation,settling,placement"
MOST_FIRST_S, MOST_CHANGE_S, MOST_MIB = 2.0, 0.2, 700.0


def measure(browser: Browser, name: str, run: Path, changes: int) -> dict[str, Any]:
    """Open a page, then change its layer and its step some times."""
    with dashboard([run.resolve().parent]) as server:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        traffic = Traffic()
        traffic.watch(page.context.new_cdp_session(page))
        page.goto(f"{server.url}/glossary")
        settle(page)
        address = f"{server.url}/{name}?run={run.name}"
        found: dict[str, Any] = {"cold": took(page, traffic, server, lambda: page.goto(address))}
        for what, act in (("layer", another_layer), ("step", another_step)):
            if page.locator(f".st-key-{what}").count():
                times = [took(page, traffic, server, lambda act=act: act(page)) for _ in range(changes)]
                found[what] = tuple(statistics.median(one[place] for one in times) for place in range(3))
        found["mib"] = server.process.memory_info().rss / (1 << 20)
        page.context.close()
    return found


def took(page: Page, traffic: Traffic, server: Server, act: Any) -> tuple[float, float, float]:
    """Seconds of the server, of its processors, and until all was seen, that an act costs."""
    drawn, worked = len(server.drawn()), server.cpu_seconds()
    traffic.seen.clear()
    act()
    page.wait_for_timeout(150)  # the server has heard of it
    settle(page)
    page.wait_for_timeout(500)
    settle(page)
    return sum(server.drawn()[drawn:]), server.cpu_seconds() - worked, sum(traffic.seen)


def another_layer(page: Page) -> None:
    """The next one of the list."""
    choice = page.locator(".st-key-layer")
    shown = choice.locator("input").input_value()
    options = page.locator("[role=option]")
    while not options.count():  # a list that opens while the page is drawn closes again
        choice.locator("input").click()
        page.wait_for_timeout(300)
    texts = options.all_inner_texts()
    options.nth((texts.index(shown) + 1) % len(texts)).click()


def another_step(page: Page) -> None:
    """The one before."""
    page.locator(".st-key-step input[type=range], .st-key-step [role=slider]").first.press("ArrowLeft")


def _seconds(found: tuple[float, float, float] | None) -> str:
    return "-" if found is None else "{:.2f} s ({:.2f} cpu, {:.2f} seen)".format(*found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pages", default=PAGES)
    parser.add_argument("--changes", type=int, default=5)
    given = parser.parse_args()
    first, change, memory = 0.0, 0.0, 0.0
    with chromium() as browser:
        for name in given.pages.split(","):
            found = measure(browser, name, given.run, given.changes)
            said = "  ".join(f"{what} {_seconds(found.get(what)):31}" for what in ("cold", "layer", "step"))
            print(f"  {name:16} {said} {found['mib']:5.0f} MiB", flush=True)
            first = found["cold"][0] if name == "overview" else first
            change = max(change, *(found[what][0] for what in ("layer", "step") if what in found), 0.0)
            memory = max(memory, found["mib"])
    for text, value, bar in (
        ("first page, cold, in seconds", first, MOST_FIRST_S),
        ("slowest change in seconds", change, MOST_CHANGE_S),
        ("greatest resident memory in MiB", memory, MOST_MIB),
    ):
        print(f"  {text}: {value:.2f} (at most {bar:.4g}) {'ok' if value <= bar else 'MISSED'}")


if __name__ == "__main__":
    main()
