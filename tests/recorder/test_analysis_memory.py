"""The analysis holds no more for more rows."""

import tracemalloc
import weakref
from concurrent.futures import Executor, Future

import numpy as np
import pyarrow.compute as pc
from analysed_runs import LAYERS, answers_of, record, slow_answers
from toy_runs import NEVER, model

from recorder import Run
from recorder.analysis import analyse, store
from recorder.analysis.plan import plan_analysis
from recorder.writer import RunWriter


class Watched(Executor):
    """Runs each task at once, and tells how many results there ever were at the same time."""

    _max_workers = 1

    def __init__(self):
        self.results, self.most = [], 0

    def submit(self, work, task):
        future = Future()
        future.set_result(work(task))
        self.results.append(weakref.ref(future.result()[0]))
        self.most = max(self.most, sum(result() is not None for result in self.results))
        return future


def steps_over_parts(path, steps):
    """A run each of whose steps begins in one part and ends in the next: all are one job."""
    writer = RunWriter(path, manifest=model(*LAYERS), **NEVER)
    for step in range(steps):
        rng = np.random.default_rng(step)
        for item in LAYERS:
            ids = np.argsort(rng.random((8, item["num_experts"])), axis=1)[:, :2]
            place = {"layer": item["index"], "router": item["router"]}
            writer.log_decisions(step, **place, experts_TK=ids, weights_TK=np.ones((8, 2)))
            if item is LAYERS[1]:
                writer.flush()
        at = np.arange(8)
        writer.log_tokens(step, sequence_T=at, position_T=at, token_id_T=at, text_T=[f"<{token}>" for token in at])
        writer.log_step(step, tokens=8)
    writer.flush()
    return Run(path)


def test_results_are_added_up_as_they_come(tmp_path):
    run = steps_over_parts(tmp_path / "run", steps=12)
    (job,) = plan_analysis(run).jobs
    assert len(job.tasks) > 10, "a task for each part, though no part ends with a step"
    executor = Watched()
    assert answers_of(analyse(run, executor=executor, keep=False)) == slow_answers(run)
    assert len(executor.results) == len(job.tasks)
    assert executor.most <= 3


def test_a_result_is_as_large_for_three_times_the_rows(tmp_path):
    held = []
    for steps in (20, 60):
        record(tmp_path / str(steps), steps=range(steps), probes=(), flush_every=steps).flush()
        (task,) = plan_analysis(Run(tmp_path / str(steps)), ["vocabulary"]).jobs[0].tasks
        task.count()  # what is loaded once
        tracemalloc.start()
        counts = task.count()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert counts.sparse
    assert held[1] < 1.2 * held[0]


def test_of_a_kept_table_only_the_rows_near_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_GROUP_ROWS", 4)
    record(tmp_path / "run").flush()
    run = Run(tmp_path / "run")
    analyse(run)
    digest = plan_analysis(run).digest
    whole = store.Store(run.path).read_table("vocabulary", digest)
    some = store.Store(run.path).read_table("vocabulary", digest, {"phase": "train", "layer": 3})
    mine = whole.filter(pc.and_(pc.equal(whole["phase"], "train"), pc.equal(whole["layer"], 3)))
    assert mine.num_rows <= some.num_rows <= mine.num_rows + 2 * 3 < whole.num_rows
    kept = run.analysis()
    assert kept.table("vocabulary", phase="train", layer=3).equals(mine)
    assert kept.num_rows("vocabulary") == whole.num_rows
