import json

import numpy as np
import pytest

from recorder.reader import Run
from recorder.summary import run_row, summarise
from recorder.writer import RunWriter

LAYERS = [
    {"index": 0, "kind": "dense", "router": None},
    {"index": 1, "kind": "moe", "router": 0, "num_experts": 4, "top_k": 1},
    {"index": 3, "kind": "moe", "router": 1, "num_experts": 8, "top_k": 2},
]
LAYER_KEYS = {
    "layer",
    "num_experts",
    "top_k",
    "tokens",
    "max_violation",
    "max_violation_window",
    "load_cv",
    "load_entropy",
    "router_entropy",
    "dead_experts",
    "idle_experts",
    "gini",
    "drop_rate",
    "aux_loss",
    "dead_ids",
    "idle_ids",
}


def log(writer, step, layer, load, **more):
    load = np.array(load)
    writer.log_layer_stats(
        step,
        layer=layer,
        router=layer // 2,
        load=load,
        gate_mass=np.ones(len(load)),
        mean_prob=np.full(len(load), 1 / len(load)),
        **({"tokens": int(load.sum()) // (1 + layer // 2)} | more),
    )


@pytest.fixture
def run(tmp_path):
    """Three recorded steps; with window 2 the first counts for nothing."""
    manifest = {"name": "toy", "config": {"balancer": "aux+z"}, "model": {"layers": LAYERS}}
    with RunWriter(tmp_path / "r1", manifest=manifest) as writer:
        # loads [0,100,0,0] | [40,20,20,0] and [0,20,20,40]: each step has one dead expert, the window none
        for step, load in enumerate([[0, 100, 0, 0], [40, 20, 20, 0], [0, 20, 20, 40]]):
            log(writer, step, 1, load, aux_loss=[9.0, 1.0, 3.0][step], dropped=np.array([0, 4 * step, 0, 0]))
        log(writer, 0, 3, [20] * 8)
        log(writer, 1, 3, [80] + [0] * 7, router_entropy=0.25)
        log(writer, 2, 3, [0] * 8, router_entropy=None)  # no tokens: says nothing
        for step, loss in enumerate([99.0, 2.0, 4.0]):
            writer.log_step(step, tokens=80, loss=loss, ce_loss=None if step == 1 else 1.5)
        writer.log_step(2, phase="probe", tokens=5, loss=50.0)
        log(writer, 2, 1, [1, 0, 0, 0], phase="probe")
    return Run(tmp_path / "r1")


def test_x10_summary_by_hand(run):
    summary = summarise(run, window=2)
    assert summary["losses"] == {"loss": 3.0, "ce_loss": 1.5, "aux_loss": None, "z_loss": None}
    assert {name: summary[name] for name in ("run_id", "name", "status", "last_step", "window")} == {
        "run_id": "r1",
        "name": "toy",
        "status": "finished",
        "last_step": 2,
        "window": 2,
    }
    first, second = summary["layers"]
    assert first.keys() >= LAYER_KEYS
    assert (first["layer"], first["num_experts"], first["top_k"], first["tokens"]) == (1, 4, 1, 80.0)
    assert first["max_violation"] == pytest.approx(1.0)  # 40 / 20 - 1 in both steps
    assert first["max_violation_window"] == pytest.approx(0.0)  # [40, 40, 40, 40]
    assert first["load_cv"] == pytest.approx(np.sqrt(0.5))  # deviations 20, 0, 0, 20 of a mean of 20
    assert first["load_entropy"] == pytest.approx(0.75)
    assert first["gini"] == pytest.approx(0.375)  # sorted 0, 20, 20, 40: 2 * 280 / (4 * 80) - 5 / 4 + ...
    assert (first["dead_experts"], first["idle_experts"]) == (0, 0)
    assert first["dead_ids"] == first["idle_ids"] == []
    assert first["aux_loss"] == pytest.approx(2.0)
    assert first["drop_rate"] == pytest.approx((4 / 80 + 8 / 80) / 2)
    assert first["router_entropy"] is None
    assert second["max_violation"] == pytest.approx(7.0)  # the step without tokens is left out
    assert second["max_violation_window"] == pytest.approx(7.0)
    assert second["load_entropy"] == pytest.approx(0.0)
    assert second["router_entropy"] == pytest.approx(0.25)
    assert (second["dead_experts"], second["idle_experts"]) == (7, 7)
    assert second["dead_ids"] == second["idle_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert (second["drop_rate"], second["aux_loss"]) == (None, None)
    assert second["tokens"] == pytest.approx(20.0)  # 40 and 0
    assert isinstance(second["dead_experts"], int)


def test_summary_is_plain_json(run):
    for value in (summarise(run), summarise(run, window=1), run_row(run)):
        assert json.loads(json.dumps(value, allow_nan=False)) == value


def test_window_of_one_step_without_tokens(run):
    second = summarise(run, window=1)["layers"][1]
    for name in ("max_violation", "max_violation_window", "load_cv", "dead_experts", "idle_experts", "gini"):
        assert second[name] is None
    assert second["dead_ids"] == []


def test_idle_includes_dead(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        # uniform share 25: below 2.5 is idle, 0 is dead
        log(writer, 0, 1, [95, 3, 2, 0])
    [layer] = summarise(Run(tmp_path / "run"))["layers"]
    assert (layer["dead_ids"], layer["idle_ids"]) == ([3], [2, 3])
    assert (layer["num_experts"], layer["top_k"]) == (4, 1)


def test_run_row_is_the_worst_layer(run):
    row = run_row(run, window=2)
    assert row == {
        "run_id": "r1",
        "name": "toy",
        "path": str(run.path),
        "status": "finished",
        "balancer": "aux+z",
        "num_experts": 8,
        "top_k": 2,
        "last_step": 2,
        "loss": 3.0,
        "ce_loss": 1.5,
        "max_violation": pytest.approx(7.0),
        "max_violation_window": pytest.approx(7.0),
        "dead_experts": 7,
        "idle_experts": 7,
        "tags": [],
    }


@pytest.mark.parametrize("model", [{}, {"layers": LAYERS}], ids=["no model", "model"])
def test_a_run_without_steps(tmp_path, model):
    RunWriter(tmp_path / "run", manifest={"model": model})
    row = run_row(Run(tmp_path / "run"))
    assert row["status"] == "running"
    assert row["num_experts"] == (8 if model else None)
    for name in ("balancer", "last_step", "loss", "max_violation", "dead_experts", "idle_experts"):
        assert row[name] is None
    assert len(summarise(Run(tmp_path / "run"))["layers"]) == (2 if model else 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_r23_a_loss_that_blew_up_has_no_mean(tmp_path, bad):
    with RunWriter(tmp_path / "run") as writer:
        for step, loss in enumerate([1.0, bad, 3.0]):
            writer.log_step(step, tokens=1, loss=loss)
    assert summarise(Run(tmp_path / "run"))["losses"]["loss"] is None
    assert summarise(Run(tmp_path / "run"), window=1)["losses"]["loss"] == 3.0


def test_window_must_be_positive(run):
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        summarise(run, window=0)
