import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runs import (
    NEVER,
    layer,
    log_stats,
    model,
    part_names,
    start,
)

from recorder.reader import Run
from recorder.schema import lists_to_matrix
from recorder.writer import RunWriter


def test_flush_by_steps(tmp_path):
    writer = RunWriter(tmp_path / "run", flush_steps=10, **NEVER)
    for step in range(25):
        log_stats(writer, step)
        writer.log_step(step, tokens=4)
    run = Run(tmp_path / "run")
    assert (len(run.steps()), len(run.layer_stats())) == (20, 20)
    assert run.manifest["last_step"] == 19
    assert part_names(tmp_path / "run", "steps") == ["part-r00000-000000.parquet", "part-r00000-000001.parquet"]
    writer.flush()
    assert run.refresh()
    assert (len(run.steps()), run.last_step) == (25, 24)
    assert not run.refresh()


def test_flush_by_rows(tmp_path):
    writer = RunWriter(tmp_path / "run", flush_rows=100, **NEVER)
    for step in range(3):
        writer.log_decisions(step, layer=0, router=0, experts_TK=np.zeros((40, 1), int), weights_TK=np.ones((40, 1)))
    assert Run(tmp_path / "run").decision_steps().tolist() == [0, 1, 2]


def test_flush_by_bytes_of_wide_statistics(tmp_path):
    writer = RunWriter(tmp_path / "run", flush_bytes=1 << 20, **NEVER)
    load = np.arange(896)
    for step in range(120):  # 20 kB a row: load and expert_bias, gate_mass and mean_prob of 896 experts
        log_stats(writer, step, load=load, expert_bias=load / 896)
        writer.log_step(step, tokens=int(load.sum()))
    assert 1 < len(part_names(tmp_path / "run", "layer_stats")) <= 4
    writer.flush()
    assert Run(tmp_path / "run").load(0).tolist() == [load.tolist()] * 120


def test_a_huge_step_makes_parts_of_bounded_size(tmp_path):
    limit = 1 << 20
    writer = RunWriter(tmp_path / "run", manifest=model(layer(0, 0, 64, top_k=8)), flush_bytes=limit, **NEVER)
    rng = np.random.default_rng(0)
    ids, weights = rng.integers(0, 64, (100_000, 8)), rng.random((100_000, 8), dtype=np.float32)
    writer.log_decisions(0, layer=0, router=0, experts_TK=ids, weights_TK=weights)
    writer.log_tokens(0, sequence_T=np.zeros(len(ids), int), position_T=np.arange(len(ids)))
    writer.log_step(0, tokens=len(ids))
    writer.flush()
    folder = tmp_path / "run" / "decisions"
    sizes = [(part.stat().st_size, pq.read_table(part).nbytes) for part in folder.iterdir()]
    assert len(sizes) >= 7, "71 bytes a row"
    assert all(stored < limit and in_memory < 1.2 * limit for stored, in_memory in sizes)
    frame = Run(tmp_path / "run").decisions(0, 0)
    np.testing.assert_array_equal(lists_to_matrix(frame["experts"]), ids)
    writer.finalize()
    np.testing.assert_array_equal(lists_to_matrix(Run(tmp_path / "run").decisions(0, 0)["experts"]), ids)


def test_flush_by_time_and_heartbeat(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("recorder.writer.time", SimpleNamespace(monotonic=lambda: clock.now))
    writer = RunWriter(tmp_path / "run", flush_seconds=10.0)
    stats = tmp_path / "run" / "layer_stats"
    log_stats(writer, 0)
    before = writer.manifest["heartbeat_at"]
    time.sleep(0.002)
    clock.now = 12.0
    log_stats(writer, 0, router=1)  # the same step: a heartbeat, but no part with half a step
    assert writer.manifest["heartbeat_at"] > before
    assert not stats.exists()
    writer.log_step(0, tokens=4)  # the step is over: a part
    assert len(Run(tmp_path / "run").layer_stats()) == 2
    log_stats(writer, 1)
    clock.now = 24.0
    log_stats(writer, 2)  # the next step has begun without log_step: the last one goes out
    assert Run(tmp_path / "run").layer_stats()["step"].to_list() == [0, 0, 1]
    clock.now = 44.0
    log_stats(writer, 2, router=1)  # twice the time: whatever is there
    assert Run(tmp_path / "run").layer_stats()["step"].to_list() == [0, 0, 1, 2, 2]
    clock.now = 54.0
    writer.log_event(2, "non_finite", "loss is nan")
    assert Run(tmp_path / "run").events()["kind"].to_list() == ["non_finite"]


def test_r18_killed_after_step_57(tmp_path):
    process = start(
        """
        writer = RunWriter(args[0], flush_steps=10, flush_seconds=1e9)
        for step in range(1, 101):
            writer.log_step(step, tokens=8, loss=step / 2)
            if step == 57:
                os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path / "run",
    )
    while process.poll() is None and not (tmp_path / "run" / "run.json").exists():
        time.sleep(0.005)
    # Wait without reaping: a dead child of the dashboard stays a zombie for a while, and is no writer.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Run(tmp_path / "run").status == "unfinished"
    assert process.wait() == -signal.SIGKILL
    run = Run(tmp_path / "run")
    assert run.status == "unfinished"
    assert run.problems == []
    assert run.steps()["step"].to_list() == list(range(1, 51))
    assert run.steps()["loss"].to_list() == [step / 2 for step in range(1, 51)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phase": "test"}, "train, probe, eval, generate, got 'test'"),
        ({"load": np.array([1, 2, 3])}, "load has 3 experts, router 0 has 2"),
        ({"gate_mass": np.ones(3)}, "gate_mass has 3 experts, router 0 has 2"),
        ({"mean_prob": np.ones((1, 2))}, r"mean_prob must have shape \(E,\), got \(1, 2\)"),
        ({"dropped": np.ones(1)}, "dropped has 1 experts"),
        ({"expert_bias": np.ones(4)}, "expert_bias has 4 experts"),
        ({"load": np.array([1.5, 2])}, "load must hold whole numbers"),
        ({"load": np.array([-1, 2])}, "load must hold whole numbers"),
        ({"load": np.array([np.nan, 2])}, "load must hold whole numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
def test_layer_stats_are_validated(tmp_path, arguments, message):
    writer = RunWriter(tmp_path / "run", manifest=model(layer(0, 0, 2)), **NEVER)
    right = {"load": np.array([1, 3]), "gate_mass": np.ones(2), "mean_prob": np.ones(2) / 2}
    with pytest.raises(ValueError, match=message):
        writer.log_layer_stats(0, layer=0, router=0, tokens=2, **(right | arguments))
    writer.log_layer_stats(0, layer=0, router=0, tokens=2, **right)
    writer.finalize()
    assert len(Run(tmp_path / "run").layer_stats()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts_TK": np.array([[0, 4]])}, r"expert id 4 is outside \[-1, 4\) of router 0"),
        ({"experts_TK": np.array([[0, -2]])}, r"expert id -2 is outside \[-1, 4\)"),
        ({"experts_TK": np.array([0, 1])}, r"shape \(T, K\), got int64 \(2,\)"),
        ({"experts_TK": np.array([[0.0, 1.0]])}, "must be integers"),
        ({"weights_TK": np.ones((2, 2))}, r"weights_TK has shape \(2, 2\), experts_TK \(1, 2\)"),
        ({"kept_TK": np.ones((1, 1), bool)}, "kept_TK must be bool"),
        ({"kept_TK": np.ones((1, 2))}, "kept_TK must be bool"),
        ({"tokens_T": np.arange(2)}, r"tokens_T must have shape \(1,\), got \(2,\)"),
        ({"tokens_T": np.array([0.5])}, "tokens_T must be integers"),
        ({"tokens_T": np.array([2**31])}, "tokens_T must fit 32 bits"),
        ({"step": -1}, "step must be a whole number, at least 0, got -1"),
        ({"step": 1.5}, r"got 1\.5"),
        ({"phase": "Train"}, "got 'Train'"),
    ],
)
def test_decisions_are_validated(tmp_path, arguments, message):
    writer = RunWriter(tmp_path / "run", manifest=model(layer(0, 0, 4)), **NEVER)
    right = {"step": 0, "experts_TK": np.array([[0, 3]]), "weights_TK": np.ones((1, 2))}
    with pytest.raises(ValueError, match=message):
        writer.log_decisions(layer=0, router=0, **(right | arguments))


def test_tokens_are_validated(tmp_path):
    writer = RunWriter(tmp_path / "run", **NEVER)
    right = {"sequence_T": np.zeros(2, int), "position_T": np.arange(2)}
    for wrong, message in [
        ({"position_T": np.arange(3)}, "position_T must have shape"),
        ({"text_T": ["a"]}, "text_T has 1 entries for 2 tokens"),
        ({"domain_T": [1, 2]}, "domain_T must hold str or None"),
        ({"phase": "probes"}, "'probes'"),
    ]:
        with pytest.raises(ValueError, match=message):
            writer.log_tokens(0, **(right | wrong))


def test_ids_are_checked_against_the_load_where_the_manifest_is_silent(tmp_path):
    writer = RunWriter(tmp_path / "run", **NEVER)
    log_stats(writer, 0, load=(1, 1, 2))
    with pytest.raises(ValueError, match="expert id 3"):
        writer.log_decisions(0, layer=0, router=0, experts_TK=np.array([[3]]), weights_TK=np.ones((1, 1)))


def test_finalize_twice_keeps_the_first(tmp_path):
    writer = RunWriter(tmp_path / "run")
    writer.finalize("failed", error="disk full")
    writer.finalize("finished")
    run = Run(tmp_path / "run")
    assert (run.status, run.manifest["error"]) == ("failed", "disk full")
    for call in (lambda: writer.log_step(0, tokens=1), writer.flush, lambda: writer.update_manifest(seed=1)):
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_finalize_refuses_other_statuses(tmp_path):
    with pytest.raises(ValueError, match="'running'"):
        RunWriter(tmp_path / "run").finalize("running")


@pytest.mark.parametrize(
    ("raised", "status", "error"),
    [
        (None, "finished", None),
        (RuntimeError("out of memory\nmany more lines"), "failed", "RuntimeError: out of memory"),
        (KeyError(), "failed", "KeyError"),
        (KeyboardInterrupt(), "cancelled", None),
    ],
)
def test_context_manager(tmp_path, raised, status, error):
    def use():
        with RunWriter(tmp_path / "run", **NEVER) as writer:
            writer.log_step(0, tokens=1, loss=2.0)
            if raised is not None:
                raise raised

    if raised is None:
        use()
    else:
        with pytest.raises(type(raised)):
            use()
    run = Run(tmp_path / "run")
    assert (run.status, run.manifest["error"]) == (status, error)
    assert run.steps()["loss"].to_list() == [2.0]


def test_arrays_are_copied(tmp_path):
    """R13: a bias that changes in place is recorded as it was."""
    writer = RunWriter(tmp_path / "run", **NEVER)
    bias, ids, weights = np.zeros(2, np.float32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    for step in range(3):
        bias += np.float32([-0.5, 0.5])
        log_stats(writer, step, expert_bias=bias)
        ids[:] = step % 2
        weights[:] = step
        writer.log_decisions(step, layer=0, router=0, experts_TK=ids, weights_TK=weights)
    writer.finalize()
    run = Run(tmp_path / "run")
    assert [row[0] for row in run.layer_stats()["expert_bias"]] == [-0.5, -1.0, -1.5]
    assert [run.decisions(step, 0)["experts"][0][0] for step in range(3)] == [0, 1, 0]
    assert [run.decisions(step, 0)["weights"][0][0] for step in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("known", [True, False], ids=["E known", "E unknown"])
@pytest.mark.parametrize(
    ("num_experts", "ids"),
    [
        pytest.param(300, [[0, 299], [-1, 5]], id="R16-300"),
        pytest.param(256, [[255, -1], [-1, 255]], id="R16-256"),
        pytest.param(200, [[199, 127], [128, -1]], id="R16-200"),
    ],
)
def test_r16_ids_round_trip(tmp_path, num_experts, ids, known):
    manifest = model(layer(1, 0, num_experts)) if known else None
    with RunWriter(tmp_path / "run", manifest=manifest) as writer:
        writer.log_decisions(0, layer=1, router=0, experts_TK=np.array(ids), weights_TK=np.ones((2, 2)))
    frame = Run(tmp_path / "run").decisions(0, 1)
    assert lists_to_matrix(frame["experts"]).tolist() == ids


def test_r23_nan_inf_and_null_stay_apart(tmp_path):
    values = [2.0, float("inf"), float("nan"), float("-inf"), None]
    with RunWriter(tmp_path / "run", flush_steps=2) as writer:
        for step, loss in enumerate(values):
            writer.log_step(step, tokens=1, loss=loss)
    column = Run(tmp_path / "run").steps()["loss"]
    assert column.isna().to_list() == [False, False, False, False, True]
    assert repr(column.to_list()[:4]) == "[2.0, inf, nan, -inf]"
    for file in (tmp_path / "run" / "steps").iterdir():
        assert pq.read_table(file)["loss"].null_count == 1


scalar = st.none() | st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(scalar, scalar), min_size=1, max_size=30), flush_steps=st.integers(1, 9))
def test_steps_round_trip(tmp_path_factory, rows, flush_steps):
    path = tmp_path_factory.mktemp("runs") / "run"
    with RunWriter(path, flush_steps=flush_steps) as writer:
        for step, (loss, grad_norm) in enumerate(rows):
            writer.log_step(step, tokens=step, loss=loss, grad_norm=grad_norm)
    frame = Run(path).steps()
    assert len(part_names(path, "steps")) == 1
    assert frame["step"].to_list() == list(range(len(rows)))
    for place, name in enumerate(("loss", "grad_norm")):
        given_values = [row[place] for row in rows]
        assert frame[name].isna().to_list() == [value is None for value in given_values]
        read = frame[name].to_numpy(dtype=np.float64, na_value=0.0)
        expected = np.array([0.0 if value is None else value for value in given_values])
        np.testing.assert_array_equal(read, expected)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_decisions_round_trip(tmp_path_factory, data):
    """Any T, K and E, several routers of different K in one part, small parts and compacted ones."""
    path = tmp_path_factory.mktemp("runs") / "run"
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    shapes = data.draw(
        st.lists(
            st.tuples(st.integers(1, 700), st.integers(1, 5), st.sampled_from([5, 127, 128, 300, 40_000])),
            min_size=1,
            max_size=3,
        )
    )
    steps = data.draw(st.integers(1, 3))
    full = data.draw(st.booleans())
    layers = [layer(2 * number, number, E, K) for number, (_, K, E) in enumerate(shapes)]
    expected = {}
    with RunWriter(path, manifest=model(*layers), flush_rows=data.draw(st.integers(1, 2000)), full_weights=full) as w:
        for step in range(steps):
            for router, (T, K, E) in enumerate(shapes):
                ids = rng.integers(-1, E, (T, K))
                weights = rng.random((T, K)).astype(np.float32)
                kept = rng.random((T, K)) < 0.5 if rng.random() < 0.5 else None
                tokens = rng.permutation(T)
                expected[step, router] = (ids, weights, kept, tokens)
                w.log_decisions(
                    step,
                    layer=2 * router,
                    router=router,
                    experts_TK=ids,
                    weights_TK=weights,
                    kept_TK=kept,
                    tokens_T=tokens,
                )
    run = Run(path)
    assert run.problems == []
    assert len(part_names(path, "decisions")) == 1
    assert run.decision_steps().tolist() == list(range(steps))
    for (step, router), (ids, weights, kept, tokens) in expected.items():
        order = np.argsort(tokens)
        frame = run.decisions(step, 2 * router)
        assert frame["token"].to_list() == list(range(len(tokens)))
        np.testing.assert_array_equal(lists_to_matrix(frame["experts"]), ids[order])
        read = lists_to_matrix(frame["weights"])
        assert read.dtype == np.float32
        if full:
            np.testing.assert_array_equal(read, weights[order])
        else:
            np.testing.assert_allclose(read, weights[order], rtol=2**-11)
        if kept is None:
            assert frame["kept"].isna().all()
        else:
            np.testing.assert_array_equal(lists_to_matrix(frame["kept"]), kept[order])


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=20))
def test_tokens_round_trip(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("runs") / "run"
    count = len(texts)
    with RunWriter(path) as writer:
        writer.log_tokens(3, phase="probe", sequence_T=np.zeros(count, int), position_T=np.arange(count), text_T=texts)
    frame = Run(path).tokens(3, "probe")
    assert frame["text"].isna().to_list() == [text is None for text in texts]
    assert frame["text"].dropna().to_list() == [text for text in texts if text is not None]
    assert frame["position"].to_list() == list(range(count))
    assert frame["token_id"].isna().all()
    assert Run(path).tokens(3, "train").empty
