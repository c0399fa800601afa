"""One question to the decisions of a run, asked once by one engine: seconds, peak memory, and the answer as an array.

    python -m benchmarks.analysis_queries duckdb:unnest loads RUN ANSWER.npy

Questions: *loads*, how often each expert of each layer was chosen, (layers, experts); *coactivation*, how many tokens
chose each pair of experts of a layer, with how many chose an expert on the diagonal, (layers, experts, experts).
Imports are not timed; the files' bytes lie in the page cache. `benchmarks/analysis.py` asks all in turn.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

#: Of the run that `benchmarks.analysis_run` writes. Here, so that a peer's process holds no more than the peer.
LAYERS, EXPERTS, TOP_K = 16, 64, 8
SLOTS = range(TOP_K)
PAIRS = [(i, j) for i in SLOTS for j in SLOTS if i <= j]  # with (i, i): how many tokens chose an expert
QUESTIONS = ("loads", "coactivation")

Ask = Callable[[], np.ndarray]


def dense(layer: np.ndarray, *experts_and_count: np.ndarray) -> np.ndarray:
    """Rows of a grouped result as an array; several rows of one cell add up."""
    *experts, count = experts_and_count
    answer = np.zeros((LAYERS,) + (EXPERTS,) * len(experts), dtype=np.int64)
    np.add.at(answer, tuple(np.asarray(part, dtype=np.int64) for part in (layer, *experts)), np.asarray(count))
    return answer


def both_ways(answer: np.ndarray) -> np.ndarray:
    """Of pairs counted in one order of the slots: those of both orders."""
    other = answer.transpose(0, 2, 1).copy()
    diagonal = np.arange(EXPERTS)
    other[:, diagonal, diagonal] = 0
    return answer + other


def routescope(way: str, question: str, run: str) -> Ask:
    """way: workers, as threads1 or processes2, or `default` for what the library takes by itself."""
    from recorder.analysis import analyse
    from recorder.reader import Run

    executor = None if way == "default" else workers(*way.split("-"))
    tables = QUESTIONS if question == "both" else (question,)

    def ask() -> np.ndarray:
        analysis = analyse(Run(run), tables=tables, keep=False, executor=executor)
        name, column = ("loads", "load") if question == "loads" else ("coactivation", "together")
        rows = analysis.table(name)
        answer = np.zeros((LAYERS, EXPERTS) if question == "loads" else (LAYERS, EXPERTS, EXPERTS), dtype=np.int64)
        place = (rows["layer"].to_numpy(),)
        place += () if question == "loads" else (rows["expert"].to_numpy(),)
        np.add.at(answer, place, np.array(rows[column].to_pylist()))  # phases add up
        return answer

    return ask


def workers(kind: str, number: str) -> Executor:
    """Threads or processes, of which each has started and has imported what it needs."""
    many = int(number)
    if kind == "threads":
        return ThreadPoolExecutor(many)
    executor = ProcessPoolExecutor(many, mp_context=get_context("spawn"))
    for started in [executor.submit(_start) for _ in range(many)]:
        started.result()
    return executor


def _start() -> None:
    import recorder.analysis  # noqa: F401

    time.sleep(1.0)  # busy meanwhile, so that the next one is given to another process


def duckdb(way: str, question: str, run: str) -> Ask:
    import duckdb as engine

    files = f"read_parquet('{run}/decisions/*.parquet')"
    rows = f"WITH d AS MATERIALIZED (SELECT layer, experts FROM {files}) "
    slots = " UNION ALL ".join(f"SELECT layer, experts[{i + 1}] a, count(*) n FROM d GROUP BY ALL" for i in SLOTS)
    pairs = " UNION ALL ".join(
        f"SELECT layer, experts[{i + 1}] a, experts[{j + 1}] b, count(*) n FROM d GROUP BY ALL" for i, j in PAIRS
    )
    one = f"SELECT layer, experts, unnest(experts) a FROM {files}"
    two = f"SELECT layer, a, unnest(experts) b FROM ({one})"
    sql = {
        ("unnest", "loads"): f"SELECT layer, a, count(*) n FROM ({one}) GROUP BY ALL",
        ("slots", "loads"): f"{rows} SELECT layer, a, sum(n)::BIGINT n FROM ({slots}) GROUP BY ALL",
        ("unnest", "coactivation"): f"SELECT layer, a, b, count(*) n FROM ({two}) GROUP BY ALL",
        ("slots", "coactivation"): f"{rows} SELECT layer, a, b, sum(n)::BIGINT n FROM ({pairs}) GROUP BY ALL",
    }[way, question]
    connection = engine.connect()

    def ask() -> np.ndarray:
        answer = dense(*connection.execute(sql).fetchnumpy().values())
        return both_ways(answer) if (way, question) == ("slots", "coactivation") else answer

    return ask


def polars(way: str, question: str, run: str) -> Ask:
    import polars as pl

    def slots(lazy: pl.LazyFrame) -> pl.LazyFrame:
        return lazy.select("layer", *(pl.col("experts").arr.get(i).alias(f"e{i}") for i in SLOTS))

    def ask() -> np.ndarray:
        lazy = pl.scan_parquet(f"{run}/decisions/*.parquet").select("layer", "experts")
        if (way, question) == ("explode", "loads"):
            grouped = lazy.explode("experts").group_by("layer", "experts").len()
        elif (way, question) == ("slots", "loads"):
            wide = slots(lazy)
            each = [wide.group_by("layer", pl.col(f"e{i}").alias("a")).len() for i in SLOTS]
            grouped = pl.concat(each).group_by("layer", "a").sum()
        elif way == "explode":
            twice = lazy.select("layer", a="experts", b="experts").explode("a").explode("b")
            grouped = twice.group_by("layer", "a", "b").len()
        else:
            wide = slots(lazy)
            both = [
                wide.group_by("layer", pl.col(f"e{i}").alias("a"), pl.col(f"e{j}").alias("b")).len() for i, j in PAIRS
            ]
            grouped = pl.concat(both).group_by("layer", "a", "b").sum()
        found = grouped.collect(engine="streaming")
        answer = dense(*(found[name].to_numpy() for name in found.columns))
        return both_ways(answer) if (way, question) == ("slots", "coactivation") else answer

    return ask


def pandas(way: str, question: str, run: str) -> Ask:
    import pandas as pd

    def ask() -> np.ndarray:
        frame = pd.read_parquet(f"{run}/decisions", columns=["layer", "experts"], dtype_backend="pyarrow")
        layer_T = frame["layer"].to_numpy()
        ids_TK = frame["experts"].list.flatten().to_numpy().reshape(len(frame), TOP_K)
        columns = [(i,) for i in SLOTS] if question == "loads" else PAIRS
        answers = []
        for slots in columns:
            if way == "groupby":
                keys = {f"e{place}": ids_TK[:, slot] for place, slot in enumerate(slots)}
                sizes = pd.DataFrame({"layer": layer_T} | keys).groupby(["layer", *keys]).size()
                index = [sizes.index.get_level_values(level).to_numpy() for level in range(len(slots) + 1)]
                answers.append(dense(*index, sizes.to_numpy()))
            else:  # one number for each cell, and how often each is there
                shape = (LAYERS,) + (EXPERTS,) * len(slots)
                counts = pd.Series(np.ravel_multi_index((layer_T, *(ids_TK[:, slot] for slot in slots)), shape))
                counts = counts.value_counts()
                answers.append(dense(*np.unravel_index(counts.index.to_numpy(), shape), counts.to_numpy()))
        answer = np.sum(answers, axis=0)
        return answer if question == "loads" else both_ways(answer)

    return ask


#: By engine: how to ask it, and the ways that a competent user would write the question.
ENGINES = {
    "routescope": (routescope, ("default",)),
    "duckdb": (duckdb, ("unnest", "slots")),
    "polars": (polars, ("explode", "slots")),
    "pandas": (pandas, ("groupby", "value_counts")),
}


def peak_mib() -> float:
    """Greatest resident memory of this program so far; Linux's `ru_maxrss` would begin with that of who started it."""
    if (status := Path("/proc/self/status")).exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / (1 << 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << (20 if sys.platform == "darwin" else 10))


def main() -> None:
    named, question, run, out = sys.argv[1:]
    engine, way = named.split(":")
    ask = ENGINES[engine][0](way, question, run)
    started, worked = time.perf_counter(), time.process_time()
    answer = ask()
    seconds, cpu = time.perf_counter() - started, time.process_time() - worked
    np.save(out, answer)
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_mib": peak_mib()}))


if __name__ == "__main__":
    main()
