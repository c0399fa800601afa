"""What `routescope analyse` does and says."""

import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moe_core import metrics
from recorder.analysis.analyse import Analysis, analyse
from recorder.catalog import first_line
from recorder.manifest import plain
from recorder.reader import Run

_CONNECT_S = "10s"
#: Sample runs are read-only: what is computed of them is not kept beside them.
_SAMPLES = "sample_runs"


class ClusterError(Exception):
    """The cluster cannot be used, in one line; `began`: any longer, as it failed on the way."""

    def __init__(self, reason: str, *, began: bool = False) -> None:
        super().__init__(reason)
        self.began = began


@dataclass(frozen=True, kw_only=True)
class Report:
    """One line, and a row for each router; `problems` as in `Analysis`."""

    headline: str
    columns: list[str]
    rows: list[list[Any]]
    problems: tuple[str, ...]
    details: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """{run_id, path, kept, read_jobs, counted_jobs, problems, tables: {name: rows}, layers: [{column: value}]}."""
        layers = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        document: dict[str, Any] = plain(self.details | {"problems": self.problems, "layers": layers})
        return document


def analyse_run(run: Run, scheduler: str | None, *, in_terminal: bool) -> Report:
    """Analyse a run with threads here, or on a Dask cluster.

    Raises:
        ClusterError: the cluster cannot be reached or fails, or the extra `distributed` is not installed.
        StorageError: the object store cannot be reached.
    """
    sample = run.path.resolve().parent.name == _SAMPLES
    with _executor(scheduler) as executor:
        analysis = analyse(run, executor=executor, keep=not sample, progress=_show if in_terminal else None)
    why = "sample runs are read-only" if sample else analysis.kept
    where = f"kept in {run.path / 'analysis'}" if why is None else f"not kept: {why}"
    counted = f"{analysis.counted_jobs} of {analysis.counted_jobs + analysis.read_jobs} results counted anew"
    columns = ["phase", "layer", "router", "tokens", "assignments", "load_entropy"]
    columns += ["router_entropy", "repeat_rate", "repeat_chance", "saturation_before", "churn"]
    return Report(
        headline=f"{run.run_id}: {counted}, {where}",
        columns=columns,
        rows=[_row(analysis, place) for place in analysis.table("loads").select(columns[:3]).to_pylist()],
        problems=analysis.problems,
        details={
            "run_id": run.run_id,
            "path": str(run.path),
            "kept": why is None,
            "read_jobs": analysis.read_jobs,
            "counted_jobs": analysis.counted_jobs,
            "tables": {name: analysis.num_rows(name) for name in analysis.tables},
        },
    )


def _row(analysis: Analysis, place: dict[str, Any]) -> list[Any]:
    (loads,) = analysis.table("loads", **place).to_pylist()
    stats = analysis.table("stats", **place).to_pylist()
    repeats = analysis.table("repeats", **place).to_pylist()
    settling = analysis.table("settling", **place).to_pylist()
    values = {
        "tokens": loads["tokens"],
        "assignments": sum(loads["load"]),
        "load_entropy": metrics.load_entropy(loads["load"]),
        "router_entropy": stats[0]["router_entropy"] if stats else None,
        "repeat_rate": metrics.repeat_rate(repeats[0]["repeats"], repeats[0]["pairs"]) if repeats else None,
        "repeat_chance": metrics.repeat_chance(loads["first_choices"]),
        # the final probe's own is 1
        "saturation_before": settling[-2]["saturation"] if len(settling) > 1 else None,
        "churn": settling[-1]["churn"] if settling else None,
    }
    row: list[Any] = plain([*place.values(), *values.values()])
    return row


@contextmanager
def _executor(scheduler: str | None) -> Iterator[Executor | None]:
    if scheduler is None:
        yield None
        return
    try:
        from distributed import Client, KilledWorker
    except ImportError:
        raise ClusterError("--scheduler needs dask: pip install 'routescope[distributed]'") from None
    for logger in ("distributed", "distributed.client", "distributed.core"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # tracebacks of what we say in a line
    try:
        client = Client(scheduler, timeout=_CONNECT_S)
    except (OSError, ValueError, TimeoutError) as error:
        raise ClusterError(f"--scheduler {scheduler}: {first_line(error)}") from None
    try:
        if not client.nthreads():
            print(f"routescope: {scheduler} has no workers: waiting for one", file=sys.stderr, flush=True)
        yield _Cluster(client)
    except (CancelledError, KilledWorker, ImportError) as error:
        reason = "the scheduler has gone" if isinstance(error, CancelledError) else first_line(error)
        raise ClusterError(f"--scheduler {scheduler}: {reason}; what was kept so far stays", began=True) from None
    finally:
        client.close()


class _Cluster(Executor):
    """A Dask client's own futures: unlike those of its `get_executor` they end when the scheduler has gone."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # not pure: a task's result depends on files, which Dask cannot know of
        return self._client.submit(call, *args, pure=False, **kwargs)


def _show(done: int, of: int) -> None:
    print(f"\r{done} of {of} results", end="\n" if done == of else "", file=sys.stderr, flush=True)
