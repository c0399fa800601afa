"""A large run opened in the dashboard: seconds of server time for each page, cold and after a change, and memory.

    python benchmarks/analysis_app.py RUN [--pages overview,replay,...]

Each page is drawn in a process of its own, in-process as the server would: first cold, with nothing cached but the
files' bytes, then with another layer and another step, where the page has those. RUN is one that
`benchmarks/analysis.py --keep DIR` left; after `routescope analyse RUN` pages take the counts kept with it, before it
those of all decisions are counted when a page asks for them, and the page says so.

Bars: the first page (Overview) within 2 s when cold, a change within 200 ms, resident memory below 700 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = "overview,replay,tokens,specialisation,coactivation,settling,placement"
CHANGES = 5
MOST_FIRST_S, MOST_CHANGE_S, MOST_MIB = 2.0, 0.2, 700.0


def measure(page: str, run: Path) -> dict[str, Any]:
    """Draw a page, then change its layer and its step some times."""
    import psutil
    from streamlit.testing.v1 import AppTest
    from streamlit.util import calc_hash

    import app.sidebar  # noqa: F401 (with what every page needs: a server has that loaded already)

    test = AppTest.from_file(ROOT / "app" / "main.py", default_timeout=600)
    test._page_hash = calc_hash(page)
    test.query_params["run"] = run.name
    worked = time.process_time()
    found: dict[str, Any] = {"cold": timed(test.run), "processor": time.process_time() - worked}
    for name in ("layer", "step"):
        times = [seconds for place in range(CHANGES) if (seconds := changed(test, name, place)) is not None]
        found[name] = statistics.median(times) if times else None
    found["problems"] = [str(problem.value) for problem in test.exception]
    found["mib"] = psutil.Process().memory_info().rss / (1 << 20)
    return found


def timed(run: Any) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def changed(test: Any, name: str, place: int) -> float | None:
    """Seconds to draw the page with another value of a widget; None where it has no such widget."""
    for kind in ("selectbox", "button_group", "slider", "select_slider"):
        for widget in getattr(test, kind, []):
            if widget.key != name:
                continue
            if kind == "slider":
                value = widget.min + (place + 1) * widget.step
            else:
                value = widget.options[(place + 1) % len(widget.options)]
                value = int(value) if str(value).isdigit() else value
            return timed(widget.set_value(value).run)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pages", default=PAGES)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.pages, given.run)))
        return
    environment = os.environ | {"ROUTESCOPE_DIRS": str(given.run.resolve().parent)}
    first, change, memory = 0.0, 0.0, 0.0
    for page in given.pages.split(","):
        command = [
            sys.executable,
            "-m",
            "benchmarks.analysis_app",
            str(given.run.resolve()),
            "--child",
            "--pages",
            page,
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        found = json.loads(done.stdout.splitlines()[-1])
        shown = {name: "-" if found[name] is None else f"{1000 * found[name]:.0f} ms" for name in ("layer", "step")}
        print(
            f"  {page:16} cold {found['cold']:6.2f} s ({found['processor']:.2f} s of processor)  "
            f"another layer {shown['layer']:>8}  another step "
            f"{shown['step']:>8}  {found['mib']:5.0f} MiB  {'; '.join(found['problems'])}",
            flush=True,
        )
        first = found["cold"] if page == "overview" else first
        change = max(change, *(found[name] or 0.0 for name in ("layer", "step")))
        memory = max(memory, found["mib"])
    for text, value, bar in (
        ("first page, cold, in seconds", first, MOST_FIRST_S),
        ("slowest change in seconds", change, MOST_CHANGE_S),
        ("greatest resident memory in MiB", memory, MOST_MIB),
    ):
        print(f"  {text}: {value:.2f} (at most {bar:.4g}) {'ok' if value <= bar else 'MISSED'}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
