"""The analysis of a run: tasks, the executor they go to, and the sum of their results."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recorder.analysis.count_decisions import DecisionTask
from recorder.analysis.count_stats import StatsTask
from recorder.analysis.counts import Counts
from recorder.analysis.memory import give_back
from recorder.analysis.plan import Job, Plan, Task, plan_analysis
from recorder.analysis.settling import ProbeTask, merge_probes
from recorder.analysis.store import Store
from recorder.analysis.tables import BY_TOKEN, TABLES, make_tables
from recorder.analysis.token_rows import TokensError
from recorder.catalog import first_line
from recorder.reader import Run
from recorder.storage import StorageError

#: Tasks handed out ahead of the one whose result is awaited, for each worker: results must not pile up.
_AHEAD = 2
#: For executors that do not tell how many workers they have (a cluster's): enough for it to be busy.
_MANY_WORKERS = 64
#: More of our own would each hold memory and wait for each other: numpy counts under Python's lock.
_MOST_THREADS = 4
#: So often a part may be replaced by a compaction while the run is read.
_ATTEMPTS = 10

#: The counts of a task, and a line for each part that they lack.
Done = tuple[Counts, list[str]]
#: How a table is got at: its name, the values that are asked for (more rows may come), and columns (None = all).
Load = Callable[[str, Mapping[str, Any], Sequence[str] | None], pa.Table]


class Analysis:
    """What a whole run was counted to: a table for each question.

    Attributes:
        tables: their names.
        problems: one line for each part that could not be read and is not in the counts.
        kept: None where the tables lie in the run's folder; otherwise why they do not, in one line.
        read_jobs, counted_jobs: how many results were there already, and how many had to be made.
    """

    tables = TABLES

    def __init__(
        self,
        load: Load,
        *,
        problems: Iterable[str] = (),
        kept: str | None = None,
        read_jobs: int = 0,
        counted_jobs: int = 0,
    ) -> None:
        self._load = load
        self._loaded: dict[str, pa.Table] = {}
        self.problems = tuple(problems)
        self.kept = kept
        self.read_jobs, self.counted_jobs = read_jobs, counted_jobs

    def table(self, name: str, **equals: Any) -> pa.Table:
        """The rows of one table with these values (phase, layer, router ...; None = any), as Arrow.

        Raises:
            ValueError: an unknown table.
        """
        _check_table(name)
        wanted = {column: value for column, value in equals.items() if value is not None}
        rows = self._loaded.get(name)
        if rows is None and name in BY_TOKEN:
            rows = self._load(name, wanted, None)
        elif rows is None:
            rows = self._loaded[name] = self._load(name, {}, None)
        tests = [pc.equal(rows[column], value) for column, value in wanted.items()]
        mask = reduce(pc.and_, tests) if tests else None
        return rows if mask is None or pc.all(mask, skip_nulls=False).as_py() else rows.filter(mask)

    def num_rows(self, name: str) -> int:
        """How many rows a table has, which need not be read for that."""
        return int(self._load(name, {}, ["layer"]).num_rows)

    def frame(self, name: str, **equals: Any) -> pd.DataFrame:
        """The same as a pandas frame on Arrow dtypes."""
        frame: pd.DataFrame = self.table(name, **equals).to_pandas(types_mapper=pd.ArrowDtype)
        return frame


def analyse(
    run: Run,
    *,
    tables: Sequence[str] = TABLES,
    executor: Executor | None = None,
    keep: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Count what all decisions of a run say, or take what has been counted already.

    Args:
        run: as it is now; look for new parts with its `refresh` first.
        tables: count only what these need, which may be much less; the others are then empty, and nothing is kept.
        executor: any of concurrent.futures, or a Dask cluster's `Client.get_executor(pure=False)`, whose workers see
            the run at the same path; None = threads of this process.
        keep: write results into the run's folder, `analysis/`, and take them from there the next time. Where the
            folder cannot be written they stay in memory (`Analysis.kept` says why).
        progress: told how many jobs are done, and of how many.

    Raises:
        ValueError: an unknown table.
        StorageError: the object store cannot be reached.
    """
    for name in tables:
        _check_table(name)
    found = stored_analysis(run)
    if found is not None:
        return found
    for attempt in range(_ATTEMPTS):
        try:
            return _count(run, plan_analysis(run, tables), executor, keep and set(tables) == set(TABLES), progress)
        except FileNotFoundError:  # a compaction replaced a part
            if attempt == _ATTEMPTS - 1:
                raise
            run.refresh()
    raise AssertionError("unreachable")


def stored_analysis(run: Run) -> Analysis | None:
    """What an earlier `analyse` kept with the run, where that is still all of it; None otherwise."""
    store = Store(run.path)
    written = store.tables_written()
    if written is None:  # to plan all of it takes a look at every step
        return None
    plan = plan_analysis(run)
    last = TABLES[-1]  # to be written
    if written < plan.newest or store.read_table(last, plan.digest, columns=["layer"]) is None:
        return None

    def load(name: str, equals: Mapping[str, Any], columns: Sequence[str] | None) -> pa.Table:
        table = store.read_table(name, plan.digest, equals, columns)
        if table is None:
            raise ValueError(f"{run.path}: analysis/{name}.parquet is gone or damaged; run routescope analyse again")
        return table

    return Analysis(load, problems=_known_problems(run), read_jobs=len(plan.jobs))


def _count(
    run: Run, plan: Plan, executor: Executor | None, keep: bool, progress: Callable[[int, int], None] | None
) -> Analysis:
    store = Store(run.path)
    partials = store.partials()
    there = {job.name for job in plan.jobs if partials.get(job.name, -1) >= job.newest}
    why_not = None if keep else "not asked for"
    problems: list[str] = []
    total = Counts()
    new = [job for job in plan.jobs if job.name not in there]
    with _threads(executor) as workers:
        results = _results(workers, new)
        for done, job in enumerate(plan.jobs, 1):
            counts = store.read_partial(job.name) if job.name in there else None
            if counts is None:
                fresh = job.name not in there
                counts, found = next(results) if fresh else next(_results(workers, [job]))
                problems += found
                if why_not is None and not found:
                    why_not = _tried(lambda job=job, counts=counts: store.write_partial(job.name, counts))  # type: ignore[misc]
            total.merge(counts)
            del counts  # before the next one is waited for
            give_back()
            if progress is not None:
                progress(done, len(plan.jobs))
    tables = make_tables(total)
    del total
    give_back()
    if why_not is None and not problems:
        names = [job.name for job in plan.jobs]
        why_not = _tried(lambda: store.write_tables(tables, plan.digest, names))
    elif problems:
        why_not = "parts cannot be read"
    read = len(plan.jobs) - len(new)
    return Analysis(
        lambda name, equals, columns: tables[name],
        problems=dict.fromkeys([*_known_problems(run), *problems]),  # the run may have met the same one
        kept=why_not,
        read_jobs=read,
        counted_jobs=len(new),
    )


def _results(executor: Executor, jobs: list[Job]) -> Iterator[tuple[Counts, list[str]]]:
    """The result of each job, in order, and what went wrong. Few tasks are under way at once."""
    ahead = _AHEAD * getattr(executor, "_max_workers", _MANY_WORKERS)
    tasks = deque(task for job in jobs for task in job.tasks)
    under_way: deque[Future[Done] | None] = deque()

    def hand_out() -> None:
        while tasks and len(under_way) < ahead:
            task = tasks.popleft()
            try:
                under_way.append(executor.submit(run_task, task))
            except BrokenExecutor:
                under_way.append(None)

    def done(job: Job) -> Done:  # a function, so that nothing stays behind while the next one is waited for
        counts = Counts()
        problems: list[str] = []
        for task in job.tasks:
            hand_out()
            try:
                problems += _add_result(counts, under_way.popleft(), task)
            except (FileNotFoundError, StorageError):
                raise
            except (OSError, ValueError, pa.ArrowException) as error:
                problems.append(f"{_what(job)}: {first_line(error)}")
        return counts, problems

    try:
        for job in jobs:
            yield done(job)
    finally:
        for future in under_way:
            if future is not None:
                with suppress(Exception):  # a cluster that has gone: what went wrong first is what is told
                    future.cancel()


def _add_result(total: Counts, future: Future[Done] | None, task: Task) -> list[str]:
    """Add what the executor made of a task, and tell what it lacks.

    A pool that lost a worker makes nothing any more, so that it is done here.
    """
    done = None
    if future is not None:
        with suppress(BrokenExecutor):
            done = future.result()
    counts, problems = run_task(task) if done is None else done
    if isinstance(task, ProbeTask):
        merge_probes(total, counts)
    else:
        total.merge(counts)
    return problems


def _known_problems(run: Run) -> list[str]:
    """Parts that the run itself could not open, and so are in no plan."""
    read = ("decisions/", "tokens/", "layer_stats/")
    return [problem for problem in run.problems if problem.startswith(read)]


def _check_table(name: str) -> None:
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; there are {', '.join(TABLES)}")


def run_task(task: Task) -> Done:
    """What an executor is given to run. Decisions count without those tokens whose part cannot be read."""
    problems: list[str] = []
    while True:
        try:
            counts = task.count()
            give_back()
            return counts, problems
        except TokensError as error:
            assert isinstance(task, DecisionTask)
            problems.append(str(error))
            task = replace(task, token_parts=tuple(part for part in task.token_parts if part.name != error.part))


def _what(job: Job) -> str:
    names = [
        f"{'layer_stats' if isinstance(task, StatsTask) else 'decisions'}/{part.name}"
        for task in job.tasks
        if not isinstance(task, ProbeTask)
        for part in task.parts
    ]
    return ", ".join(dict.fromkeys(names)) or "probes"


def _tried(write: Callable[[], None]) -> str | None:
    """Why something cannot be written; None where it was."""
    try:
        write()
    except StorageError:
        raise
    except OSError as error:
        return error.strerror or str(error)
    return None


class _threads:  # noqa: N801 (a context, not a thing)
    """The executor that was given, left open; or threads of our own for the time being."""

    def __init__(self, executor: Executor | None) -> None:
        self._own = (
            None
            if executor
            else ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS), thread_name_prefix="analysis")
        )
        self._executor = executor or self._own

    def __enter__(self) -> Executor:
        assert self._executor is not None
        return self._executor

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._own.shutdown(cancel_futures=True)
