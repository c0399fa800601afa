"""Loads and co-activation of a large run, counted by routescope and by pandas, DuckDB and Polars from the same files.

    python benchmarks/analysis.py [--assignments 100e6] [--rounds 3] [--keep DIR] [--peers duckdb,polars,pandas]

A run of 16 MoE layers with 64 experts, top 8, is written in a temporary folder (with --keep in DIR, and used again from
there), another of twice the size beside it for the memory. Every question is asked in a process of its own, all in turn
within a round; figures are medians. Of each peer two ways of asking are tried in the first round, and the faster one is
kept. All answers must be equal. Peers: extra `bench`; what is not installed is left out and named.

Bars: loads in half the time of the fastest peer, co-activation in a fifth; peak memory below 1 GB, and at most 10 %
more for twice the assignments; two workers at least 1.6 times as fast as one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.analysis_queries import ENGINES, QUESTIONS
from benchmarks.analysis_run import large_run

ROOT = Path(__file__).resolve().parents[1]
FASTER = {"loads": 2.0, "coactivation": 5.0}
MOST_MIB, MOST_GROWTH, LEAST_OF_TWO = 1000.0, 1.10, 1.6

Figures = dict[str, float]


def ask(named: str, question: str, run: Path) -> tuple[Figures, np.ndarray]:
    """One question in a process of its own: its figures and its answer."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.npy"
        command = [sys.executable, "-m", "benchmarks.analysis_queries", named, question, str(run.resolve()), str(out)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        return json.loads(done.stdout), np.load(out)


def compare(question: str, run: Path, peers: list[str], rounds: int) -> dict[str, Figures]:
    """Medians by engine and way; ends the script where answers differ."""
    entrants = [f"{engine}:{way}" for engine in ("routescope", *peers) for way in ENGINES[engine][1]]
    measured: dict[str, list[Figures]] = {}
    expected = None
    for number in range(rounds):
        for named in entrants:
            figures, answer = ask(named, question, run)
            expected = answer if expected is None else expected
            if not np.array_equal(answer, expected):
                sys.exit(f"{question}: {named} counts otherwise than {entrants[0]}")
            measured.setdefault(named, []).append(figures)
            print(f"  {question}, round {number + 1}: {named} {figures['seconds']:.2f} s", file=sys.stderr)
        if number == 0:
            best = {engine: min(ways(measured, engine), key=lambda way: seconds(measured[way])) for engine in peers}
            entrants = [entrants[0], *best.values()]
    return {named: medians(found) for named, found in measured.items()}


def ways(measured: dict[str, list[Figures]], engine: str) -> list[str]:
    return [named for named in measured if named.startswith(f"{engine}:")]


def seconds(found: list[Figures]) -> float:
    return statistics.median(one["seconds"] for one in found)


def medians(found: list[Figures]) -> Figures:
    return {name: statistics.median(one[name] for one in found) for name in found[0]} | {"rounds": len(found)}


def verdict(text: str, value: float, bar: float, *, at_least: bool) -> str:
    met = value >= bar if at_least else value <= bar
    return f"  {text}: {value:.2f} ({'at least' if at_least else 'at most'} {bar:.4g}) {'ok' if met else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assignments", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, default=None, help="keep the runs in this folder, and use them again")
    parser.add_argument("--peers", default="duckdb,polars,pandas")
    given = parser.parse_args()
    peers = [name for name in given.peers.split(",") if name]
    if unknown := [name for name in peers if name not in ENGINES]:
        parser.error(f"--peers {unknown[0]}: known are duckdb, polars and pandas")
    missing = [name for name in peers if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed, and left out: {', '.join(missing)} (pip install --editable '.[bench]')")
    peers = [name for name in peers if name not in missing]
    folder = tempfile.TemporaryDirectory(prefix="routescope-analysis-") if given.keep is None else None
    with folder or nullcontext(given.keep) as place:
        run, double = (large_run(Path(place), int(times * given.assignments)) for times in (1, 2))
        lines = []
        for question in QUESTIONS:
            found = compare(question, run, peers, given.rounds)
            print(f"\n{question} of {given.assignments / 1e6:.0f} million assignments; {os.cpu_count()} processors, "
                  f"load average {os.getloadavg()[0]:.1f}")  # fmt: skip
            for named, one in found.items():
                print(
                    f"  {named:24} {one['seconds']:8.2f} s {one['cpu_seconds']:8.2f} processor s "
                    f"{one['peak_mib']:7.0f} MiB  ({one['rounds']:.0f} rounds)"
                )
            if peers:
                ours = found.pop("routescope:default")["seconds"]
                best = min(found, key=lambda named: found[named]["seconds"])
                text = f"{question}: {best} / routescope"
                lines.append(verdict(text, found[best]["seconds"] / ours, FASTER[question], at_least=True))
        both: dict[str, list[Figures]] = {}
        for _ in range(given.rounds):
            for way in ("threads-1", "threads-2", "processes-1", "processes-2"):
                both.setdefault(way, []).append(ask(f"routescope:{way}", "both", run)[0])
            both.setdefault("double", []).append(ask("routescope:threads-2", "both", double)[0])
        took = {way: medians(found) for way, found in both.items()}
        for kind in ("threads", "processes"):
            one, two = (took[f"{kind}-{number}"]["seconds"] for number in (1, 2))
            text = f"both: {kind}, one {one:.2f} s / two {two:.2f} s"
            lines.append(verdict(text, one / two, LEAST_OF_TWO, at_least=True))
        peak, of_double = took["threads-2"]["peak_mib"], took["double"]["peak_mib"]
        lines += [
            verdict("both: peak memory in MiB", peak, MOST_MIB, at_least=False),
            verdict("both: of twice as many / of these", of_double / peak, MOST_GROWTH, at_least=False),
        ]
        print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
