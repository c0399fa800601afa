"""Whole-run counts against counting one decision at a time; what is kept, and when it is still valid."""

import concurrent.futures
import multiprocessing
import os
import pickle
import signal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from analysed_runs import LAYERS, answers_of, log_moment, record, slow_answers, slow_settling
from toy_runs import NEVER, layer, model

from recorder import Run
from recorder.analysis import analyse, stored_analysis
from recorder.analysis.counts import Counts, Key, Sparse
from recorder.analysis.plan import plan_analysis
from recorder.writer import RunWriter


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    writer = record(path)  # left open: a run that is closed has its parts joined
    writer.flush()
    return Run(path)


def same_tables(one, other):
    for name in one.tables:
        assert one.table(name).equals(other.table(name)), name


@pytest.mark.parametrize("phase", ["train", "probe"])
def test_counts_are_those_of_counting_one_by_one(run, phase):
    assert len(plan_analysis(run).jobs) > 4, "several parts"
    expected = slow_answers(run, phase)
    found = answers_of(analyse(run, keep=False), phase)
    assert set(found) == set(expected)
    assert len(expected) == 12
    for name, counts in expected.items():
        assert found[name] == counts, name


def test_settling(run):
    analysis = analyse(run, keep=False)
    settling, last = slow_settling(run)
    rows = analysis.table("settling").to_pylist()
    assert {(row["layer"], row["router"], row["step"]) for row in rows} == set(settling)
    for row in rows:
        saturation, churn = settling[row["layer"], row["router"], row["step"]]
        assert row["saturation"] == pytest.approx(saturation, rel=1e-12)
        assert row["churn"] == (None if churn is None else pytest.approx(churn, rel=1e-12))
    rows = analysis.table("fluctuation").to_pylist()
    assert {(r["layer"], r["router"], r["rank"], r["token"]): r["last_fluctuation"] for r in rows} == last


def test_statistics_are_of_every_step(run):
    (row,) = analyse(run, keep=False).table("stats", phase="train", layer=3).to_pylist()
    stats = run.layer_stats(3)
    assert row["load"] == run.load(3).sum(axis=0).tolist()
    assert row["tokens"] == stats["tokens"].sum()
    assert row["router_entropy"] == pytest.approx(stats["router_entropy"].mean(), rel=1e-12), "equal tokens each step"


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_executors_agree_to_the_last_digit(run, kind):
    alone = analyse(run, executor=concurrent.futures.ThreadPoolExecutor(1), keep=False)
    if kind == "threads":
        pool = concurrent.futures.ThreadPoolExecutor(3)
    else:
        pool = concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
    with pool:
        same_tables(alone, analyse(run, executor=pool, keep=False))


def test_a_killed_worker_process_does_not_lose_the_job(run):
    """A pool of the standard library works no more after that: the rest is counted in this process."""
    killed = []

    def kill_one(done, of):
        if done == 2:
            killed.append(next(iter(pool._processes)))
            os.kill(killed[0], signal.SIGKILL)

    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = analyse(run, executor=pool, keep=False, progress=kill_one)
        assert len(killed) == 1
    same_tables(found, analyse(run, keep=False))


def test_only_what_is_asked_for_is_counted(run):
    whole = analyse(run, keep=False)
    some = analyse(run, tables=["loads", "coactivation"])
    assert some.kept == "not asked for"
    assert not (run.path / "analysis").exists()
    for name in whole.tables:
        if name in ("loads", "coactivation"):
            assert some.table(name).equals(whole.table(name))
        else:
            assert some.table(name).num_rows == 0, name
    assert analyse(run, tables=["settling"]).table("settling").equals(whole.table("settling"))
    with pytest.raises(ValueError, match="unknown table 'load'"):
        analyse(run, tables=["load"])


class TestKept:
    def test_only_new_parts_are_counted(self, tmp_path):
        writer = record(tmp_path / "run", steps=range(4), probes=())
        writer.flush()
        run = Run(tmp_path / "run")
        first = analyse(run)
        assert (first.kept, first.read_jobs) == (None, 0)
        again = analyse(Run(run.path))
        assert again.counted_jobs == 0
        same_tables(first, again)
        assert stored_analysis(run) is not None

        log_moment(writer, 4, seed=99)
        writer.log_step(4, tokens=32)
        writer.flush()
        assert run.refresh()
        assert stored_analysis(run) is None, "made of other parts"
        grown = analyse(run)
        assert grown.counted_jobs == 2, "one part of decisions and one of layer_stats"
        assert grown.read_jobs == first.counted_jobs
        assert answers_of(grown) == slow_answers(run)

        writer.finalize()  # joins the parts: nothing that was kept is of use
        run.refresh()
        closed = analyse(run)
        assert closed.read_jobs == 0
        for name in {*closed.tables} - {"stats"}:
            assert grown.table(name).equals(closed.table(name)), name
        entropy = [analysis.table("stats")["router_entropy"].to_numpy() for analysis in (grown, closed)]
        np.testing.assert_allclose(*entropy, rtol=1e-14, err_msg="a mean, summed in another order")
        kept = {file.stem for file in (run.path / "analysis" / "partials").iterdir()}
        assert kept == {job.name for job in plan_analysis(run).jobs}, "what is of no use any more is gone"

    def test_a_part_that_somebody_put_in_place_of_another_is_counted_anew(self, tmp_path):
        """Of the same name and the same size: only its time tells."""
        record(tmp_path / "run").flush()
        file = sorted((tmp_path / "run" / "decisions").iterdir())[0]
        rows = pq.read_table(file, partitioning=None)
        plain = {"compression": None, "use_dictionary": False}
        pq.write_table(rows, file, **plain)
        size = file.stat().st_size
        run = Run(tmp_path / "run")
        analyse(run)
        swapped = [[{0: 1, 1: 0}.get(expert, expert) for expert in experts] for experts in rows["experts"].to_pylist()]
        rows = rows.set_column(rows.column_names.index("experts"), "experts", pa.array(swapped, rows["experts"].type))
        pq.write_table(rows, file, **plain)
        assert file.stat().st_size == size
        run = Run(run.path)
        assert stored_analysis(run) is None
        again = analyse(run)
        assert again.counted_jobs == 2, "that part's, and the probes in it"
        assert answers_of(again) == slow_answers(run)
        assert stored_analysis(run) is not None

    def test_damaged_results_are_made_again(self, tmp_path):
        record(tmp_path / "run").flush()
        run = Run(tmp_path / "run")
        first = analyse(run)
        for file in [*(run.path / "analysis" / "partials").iterdir(), run.path / "analysis" / "fluctuation.parquet"]:
            file.write_bytes(b"PAR1")
        same_tables(first, analyse(run))
        assert stored_analysis(run) is not None

    def test_tables_are_plain_parquet(self, tmp_path):
        record(tmp_path / "run").flush()
        analysis = analyse(Run(tmp_path / "run"))
        for name in analysis.tables:
            frame = pd.read_parquet(tmp_path / "run" / "analysis" / f"{name}.parquet", dtype_backend="pyarrow")
            assert list(frame.columns) == analysis.table(name).column_names
            assert len(frame) == analysis.table(name).num_rows

    def test_not_asked_for_nothing_is_written(self, run):
        assert analyse(run, keep=False).kept == "not asked for"
        assert run.repeat_rate().shape[0] == 3
        assert not (run.path / "analysis").exists()

    def test_where_the_folder_cannot_be_written(self, tmp_path):
        record(tmp_path / "run").flush()
        (tmp_path / "run" / "analysis").write_text("in the way")
        analysis = analyse(Run(tmp_path / "run"))
        assert analysis.kept is not None
        assert analysis.table("loads").num_rows == 6

    def test_in_an_object_store(self, s3, tmp_path):
        record(f"{s3}/run").flush()
        record(tmp_path / "run").flush()
        there = analyse(Run(f"{s3}/run"))
        assert there.kept is None
        same_tables(there, analyse(Run(tmp_path / "run"), keep=False))
        assert analyse(Run(f"{s3}/run")).counted_jobs == 0


class TestManyWriters:
    def test_superseded_segments_are_left_out(self, tmp_path):
        path = tmp_path / "run"
        writer = record(path, steps=range(6), probes=(0, 2, 4), flush_every=1)
        writer.flush()
        writer.finalize("cancelled")
        resumed = RunWriter(path, manifest=model(*LAYERS), resume=True, **NEVER)
        for step in range(3, 8):
            log_moment(resumed, step, seed=7000 + step)
            if step in (4, 6):
                log_moment(resumed, step, seed=7500 + step, phase="probe")
            resumed.log_step(step, tokens=32)
        resumed.flush()
        run = Run(path)
        analysis = analyse(run, keep=False)
        assert answers_of(analysis) == slow_answers(run)
        settling, _ = slow_settling(run)
        assert {(r["layer"], r["router"], r["step"]) for r in analysis.table("settling").to_pylist()} == set(settling)
        assert {step for _, _, step in settling} == {0, 2, 4, 6}

    def test_a_resume_leaves_earlier_results_valid(self, tmp_path):
        path = tmp_path / "run"
        writer = record(path, steps=range(4), probes=(), flush_every=1)
        writer.flush()
        before = {job.name for job in plan_analysis(Run(path)).jobs}
        writer.finalize("cancelled")
        closed = {job.name for job in plan_analysis(Run(path)).jobs}
        resumed = RunWriter(path, manifest=model(*LAYERS), resume=True, **NEVER)
        log_moment(resumed, 10, seed=1)
        resumed.log_step(10, tokens=32)
        resumed.flush()
        after = {job.name for job in plan_analysis(Run(path)).jobs}
        assert closed < after
        assert len(before) > len(closed)

    def test_ranks_add_up(self, tmp_path):
        path = tmp_path / "run"
        writers = [RunWriter(path, manifest=model(*LAYERS), rank=rank, **NEVER) for rank in range(2)]
        for step in range(3):
            for rank, writer in enumerate(writers):
                log_moment(writer, step, seed=10 * step + rank)
                log_moment(writer, step, seed=100 + 10 * step + rank, phase="probe")
                writer.log_step(step, tokens=32)
        for writer in writers:
            writer.flush()
        run = Run(path)
        assert run.ranks == 2
        analysis = analyse(run, keep=False)
        for phase in ("train", "probe"):
            assert answers_of(analysis, phase) == slow_answers(run, phase)
        settling, last = slow_settling(run)
        for row in analysis.table("settling").to_pylist():
            saturation, _ = settling[row["layer"], row["router"], row["step"]]
            assert row["saturation"] == pytest.approx(saturation, rel=1e-12)
        rows = analysis.table("fluctuation").to_pylist()
        assert {(r["layer"], r["router"], r["rank"], r["token"]): r["last_fluctuation"] for r in rows} == last

    def test_a_step_in_two_parts(self, tmp_path):
        """A flush within a step: its layers, and with them the way from layer to layer, lie in two files."""
        path = tmp_path / "run"
        writer = RunWriter(path, manifest=model(*LAYERS), **NEVER)
        for step in range(3):
            rng = np.random.default_rng(step)
            for item in LAYERS:
                ids = np.argsort(rng.random((40, item["num_experts"])), axis=1)[:, :2]
                place = {"layer": item["index"], "router": item["router"]}
                writer.log_decisions(step, **place, experts_TK=ids, weights_TK=np.ones((40, 2)))
                if item["router"] == step % 3:
                    writer.flush()
            at = np.arange(40)
            writer.log_tokens(
                step, sequence_T=at // 10, position_T=at % 10, token_id_T=at, text_T=[f"<{i}>" for i in at]
            )
            writer.log_step(step, tokens=40)
        writer.flush()
        run = Run(path)
        assert len(list((path / "decisions").iterdir())) == 3
        (job,) = plan_analysis(run).jobs
        assert len(job.tasks) == 3, "read as one, by three"
        assert answers_of(analyse(run, keep=False)) == slow_answers(run)

    def test_a_run_without_tokens_and_without_decisions(self, tmp_path):
        writer = RunWriter(tmp_path / "run", manifest=model(*LAYERS), **NEVER)
        log_moment(writer, 0, seed=0, named=False)
        writer.flush()
        run = Run(tmp_path / "run")
        found = answers_of(analyse(run, keep=False))
        assert found == slow_answers(run)
        assert set(found) == {"load", "first_choices", "coactivation", "transitions"}

        RunWriter(tmp_path / "empty", manifest=model(*LAYERS), **NEVER).flush()
        empty = analyse(Run(tmp_path / "empty"), keep=False)
        assert all(empty.table(name).num_rows == 0 for name in empty.tables)

    def test_tokens_without_a_choice_at_any_probe(self, tmp_path):
        writer = RunWriter(tmp_path / "run", manifest=model(LAYERS[0]), **NEVER)
        for step in range(3):
            place = {"phase": "probe", "layer": 1, "router": 0}
            writer.log_decisions(step, **place, experts_TK=np.full((4, 2), -1), weights_TK=np.zeros((4, 2)))
        writer.flush()
        analysis = analyse(Run(tmp_path / "run"), keep=False)
        assert analysis.table("fluctuation").num_rows == 0
        rows = analysis.table("settling").to_pylist()
        assert [(row["tokens"], row["saturation"], row["churn"]) for row in rows] == [(0, None, None)] * 3

    def test_damaged_tokens_are_named_and_their_decisions_counted(self, tmp_path):
        record(tmp_path / "run", probes=()).flush()
        run = Run(tmp_path / "run")
        whole = analyse(run, keep=False)
        file = sorted((run.path / "tokens").iterdir())[0]
        content = bytearray(file.read_bytes())
        content[4:200] = bytes(196)
        file.write_bytes(content)
        run.refresh()
        analysis = analyse(run)
        assert [problem.partition(": ")[0] for problem in analysis.problems] == [f"tokens/{file.name}"]
        for name in ("loads", "coactivation", "transitions"):
            assert analysis.table(name).equals(whole.table(name)), name
        pairs = [sum(one.table("repeats")["pairs"].to_pylist()) for one in (analysis, whole)]
        assert 0 < pairs[0] < pairs[1]
        assert analyse(run).counted_jobs == 1, "it is not kept as if it were whole"

    def test_another_writers_order_of_rows(self, tmp_path):
        """Token by token instead of router by router, without the columns that may be missing."""
        record(tmp_path / "run", steps=range(3), probes=()).flush()
        expected = answers_of(analyse(Run(tmp_path / "run"), keep=False))
        for table in ("decisions", "tokens"):
            for file in (tmp_path / "run" / table).iterdir():
                rows = pq.read_table(file, partitioning=None)
                token = rows["token"].to_numpy()
                inner = [rows["layer"].to_numpy(), token] if table == "decisions" else [-token]
                order = np.lexsort([*inner, rows["step"].to_numpy()])
                pq.write_table(rows.take(pa.array(order)).drop_columns(["phase", "rank", "segment"]), file)
        assert answers_of(analyse(Run(tmp_path / "run"), keep=False)) == expected

    @pytest.mark.parametrize("where", ["keys", "experts"])
    def test_a_damaged_part_is_named_and_the_rest_counted(self, tmp_path, where):
        record(tmp_path / "run", probes=()).flush()
        run = Run(tmp_path / "run")
        whole = analyse(run, keep=False).table("loads", phase="train")["tokens"].to_pylist()
        file = sorted((run.path / "decisions").iterdir())[0]
        content = bytearray(file.read_bytes())
        start, stop = (4, 200) if where == "keys" else _pages(file, "experts.list.element")
        content[start:stop] = bytes(stop - start)
        file.write_bytes(content)
        run.refresh()
        analysis = analyse(run)
        assert len(analysis.problems) == 1
        assert file.name in analysis.problems[0]
        assert 0 < analysis.table("loads", phase="train")["tokens"].to_pylist()[0] < whole[0]
        again = analyse(Run(run.path))
        assert again.problems == analysis.problems
        same_tables(again, analysis)


def _pages(file, column):
    """Where the pages of a column's first chunk lie in a file: from byte, to byte."""
    metadata = pq.read_metadata(file)
    places = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
    chunk = metadata.row_group(0).column(places[column])
    return chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size


class TestNotebook:
    def test_metrics_of_every_step(self, run):
        frame = run.metric("max_violation")
        assert list(frame.columns) == [1, 3, 4]
        assert frame.index.name == "step"
        load = run.load(3)
        expected = load.max(axis=1) / load.mean(axis=1) - 1
        np.testing.assert_allclose(frame[3], expected, rtol=1e-12)
        series = run.metric("max_violation", layer=3, window=2)
        pair = load[:2].sum(axis=0)
        assert series[1] == pytest.approx(pair.max() / pair.mean() - 1, rel=1e-12)
        assert series.attrs["unit"] == "share above uniform"
        entropy = run.metric("router_entropy", layer=1)
        assert entropy.tolist() == run.layer_stats(1)["router_entropy"].tolist()
        assert run.metric("drop_rate", layer=1).isna().all(), "not recorded here"

    def test_answers_have_names_and_units(self, run):
        counts = slow_answers(run)["coactivation"]
        share = run.coactivation(1)
        assert share.index.name == "expert"
        assert share.loc[2, 4] == counts[1, 0, 2, 4] / counts[1, 0, 2, 2]
        assert (np.diagonal(share) == 1).all()
        steps = run.decision_steps().tolist()
        assert run.coactivation(1, step=steps[0]).shape == (6, 6)
        flow = run.transitions(1)
        assert flow.shape == (6, 5)
        assert flow.attrs["next_layer"] == 3
        np.testing.assert_allclose(flow.sum(axis=1), 1)
        assert run.transitions(4).empty
        domains = run.domain_specialisation(3)
        assert domains.index.tolist() == ["code", "prose"]
        expected = slow_answers(run)
        assert domains.loc["code", 2] == expected["domains"][3, 1, "code", 2] / expected["domain_tokens"][3, 1, "code"]
        words = run.vocabulary(1).set_index("token_id")
        most = max(range(6), key=lambda e: expected["vocabulary"][1, 0, 3, e])
        assert words.loc[3, "share"] == expected["vocabulary"][1, 0, 3, most] / expected["occurrences"][1, 0, 3]
        assert run.vocabulary(1, min_occurrences=10**6)["share"].isna().all()
        drops = run.drops_by_position(3)
        assert drops.loc[2, "drop_rate"] == expected["dropped"][3, 1, 2] / expected["assignments"][3, 1, 2]
        assert run.drops_by_position(1).empty
        rates = run.repeat_rate().set_index("layer")
        assert rates.loc[1, "repeat_rate"] == expected["repeats"][1, 0] / expected["pairs"][1, 0]
        first = np.array([expected["first_choices"].get((1, 0, e), 0) for e in range(6)])
        assert rates.loc[1, "chance"] == pytest.approx(((first / first.sum()) ** 2).sum(), rel=1e-12)
        settling, last = slow_settling(run)
        assert run.saturation(3)[2] == pytest.approx(settling[3, 1, 2][0], rel=1e-12)
        assert run.churn().loc[5, 4] == pytest.approx(settling[4, 2, 5][1], rel=1e-12)
        assert np.isnan(run.churn(3)[0])
        assert len(run.last_fluctuation(1)) == sum(key[0] == 1 for key in last)

    def test_repr_says_what_the_run_is(self, run):
        assert repr(run) == "<Run 'run' (run): running, last step 5; 3 MoE layers E=5 k=2, E=6 k=2>"

    @pytest.mark.parametrize(
        ("ask", "words"),
        [
            (lambda run: run.metric("balance"), "unknown metric 'balance'; there are max_violation"),
            (lambda run: run.metric("z_loss", window=3), "z_loss is no metric of a load"),
            (lambda run: run.coactivation(2), r"layer 2 is no MoE layer of run; those are \[1, 3, 4\]"),
            (lambda run: run.coactivation(1, phase="eval"), "no decisions of layer 1 in phase eval"),
            (lambda run: run.coactivation(1, phase="test"), "phase must be one of"),
            (lambda run: run.coactivation(1, step=77), "no decisions of step 77"),
            (lambda run: run.analysis().table("load"), "unknown table 'load'; there are"),
        ],
    )
    def test_errors(self, run, ask, words):
        with pytest.raises(ValueError, match=words):
            ask(run)

    def test_several_routers_in_a_layer(self, tmp_path):
        layers = (layer(1, 0, 4, 2), layer(1, 1, 4, 2))
        writer = RunWriter(tmp_path / "run", manifest=model(*layers), **NEVER)
        log_moment(writer, 0, seed=0, layers=layers)
        log_moment(writer, 0, seed=1, phase="probe", layers=layers)
        writer.flush()
        run = Run(tmp_path / "run")
        with pytest.raises(ValueError, match=r"routers \[0, 1\]: name one"):
            run.coactivation(1)
        assert run.coactivation(1, router=1).shape == (4, 4)
        assert run.metric("gini").columns.tolist() == [(1, 0), (1, 1)]
        assert run.saturation().columns.tolist() == [(1, 0), (1, 1)]


class TestCounts:
    def test_sums_grow(self):
        counts = Counts()
        counts.add(Key("a", "train", 0, 0), np.array([[1, 2]]))
        counts.add(Key("a", "train", 0, 0), np.array([[1], [5]]))
        assert counts.arrays[Key("a", "train", 0, 0)].tolist() == [[2, 2], [5, 0]]

    def test_sparse_counts(self):
        rng = np.random.default_rng(0)
        seen = rng.integers(0, 2**45, 1000)[rng.integers(0, 1000, 5000)]
        one, other = Sparse(), Sparse()
        one.see(seen[:10])
        one.see(seen[10:3000])
        other.see(seen[3000:])
        one.add(other)
        cells, times = one.items()
        expected = np.unique(seen, return_counts=True)
        assert (cells.tolist(), times.tolist()) == (expected[0].tolist(), expected[1].tolist())

    def test_travels_and_is_stored_as_it_is(self, run):
        for job in plan_analysis(run).jobs:
            counts = job.tasks[0].count()
            rows = pa.Table.from_batches(counts.batches()).to_pylist()
            for copy in (pickle.loads(pickle.dumps(counts)), Counts.from_batches(counts.batches())):
                assert str(pa.Table.from_batches(copy.batches()).to_pylist()) == str(rows), "NaN and all"
                assert {key: value.dtype for key, value in copy.arrays.items()} == {
                    key: value.dtype for key, value in counts.arrays.items()
                }
