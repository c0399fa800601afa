"""Who writes what when ranks see the same tokens."""

import numpy as np
import pytest
from toy_runs import NEVER

from recorder.joint_run import divide, open_run
from recorder.reader import Run
from recorder.writer import RunWriter


def model(*layers):
    """A rank's model: (index, kind, module) of its layers, its routers numbered from 0."""
    routers = 0
    entries = []
    for index, kind, module in layers:
        entries.append({"index": index, "kind": kind, "module": module, "router": None})
        if kind == "moe":
            entries[-1]["router"] = routers
            routers += 1
    return {"name": "toy", "parameters_total": 10, "parameters_active": 5, "layers": entries}


WHOLE = model((0, "dense", "layers.0"), (1, "moe", "layers.1"), (2, "moe", "layers.2"))
STAGES = (
    model((0, "dense", "layers.0"), (1, "moe", "layers.1")),
    model((2, "moe", "layers.2"), (10, "moe", "layers.10")),
)


def summary(plans):
    return [(plan.routers, plan.tokens) for plan in plans]


def test_data_parallel_ranks_write_all_they_have():
    whole, plans = divide([0, 1], [WHOLE, WHOLE])
    assert whole == WHOLE
    assert summary(plans) == [([(0, 0), (1, 1)], True)] * 2


def test_of_replicas_the_lowest_rank_writes():
    _, plans = divide([1, 0, 1, 0], [WHOLE] * 4)
    assert summary(plans) == [([(0, 0), (1, 1)], True)] * 2 + [([], False)] * 2


def test_stages_write_their_layers_under_numbers_of_the_whole_model():
    whole, plans = divide([0, 0, 1, 1], [STAGES[1], STAGES[0], STAGES[0], STAGES[1]])
    assert [(layer["index"], layer["router"]) for layer in whole["layers"]] == [(0, None), (1, 0), (2, 1), (10, 2)]
    assert whole["parameters_total"] is whole["parameters_active"] is None
    later, sooner = [(0, 1), (1, 2)], [(0, 0)]
    assert summary(plans) == [(later, True), (sooner, False), (sooner, True), (later, False)]


def test_stages_with_replicas():
    _, plans = divide([0, 0, 0, 0], [STAGES[0], STAGES[0], STAGES[1], STAGES[1]])
    assert summary(plans) == [([(0, 0)], True), ([], False), ([(0, 1), (1, 2)], False), ([], False)]


def test_a_stage_of_dense_layers_writes_none():
    dense = model()
    whole, plans = divide([0, 0], [dense, WHOLE])
    assert whole["layers"] == WHOLE["layers"]
    assert summary(plans) == [([], False), ([(0, 0), (1, 1)], True)]


def test_data_parallel_ranks_that_hold_different_routers_are_refused():
    with pytest.raises(ValueError, match=r"data_parallel_rank=0 hold no layers\.2 \(layer 2\)"):
        divide([0, 1], STAGES)


def test_shares_need_a_place_to_meet(tmp_path):
    with pytest.raises(ValueError, match="data_parallel_rank=0 needs torch.distributed"):
        open_run(tmp_path / "run", {"model": WHOLE}, rank=0, world_size=2, data_parallel_rank=0)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        open_run(tmp_path / "run", {"model": WHOLE}, rank=0, world_size=2, data_parallel_rank=-1)
    assert not (tmp_path / "run").exists()


def test_rows_of_one_share_from_two_processes(tmp_path):
    """Two processes of share 3 (two layers of the same tokens) and one of share 5."""
    writers = [RunWriter(tmp_path / "run", rank=rank, share=share, **NEVER) for rank, share in enumerate((3, 3, 5))]
    scalars = [{"tokens": 0, "wall_time_s": 1.0}, {"tokens": 4, "loss": 2.0}, {"tokens": 12, "loss": 4.0}]
    for writer, router, row in zip(writers, (0, 1, 0), scalars, strict=True):
        for layer in {router, 1} if writer.share == 5 else {router}:
            tokens = row["tokens"] or 4
            writer.log_layer_stats(
                0,
                layer=layer,
                router=layer,
                tokens=tokens,
                load=np.array([tokens, 0]),
                gate_mass=np.ones(2),
                mean_prob=np.array([1.0, 0.0]),
            )
            ids = np.zeros((tokens, 1), dtype=int)
            writer.log_decisions(0, layer=layer, router=layer, experts_TK=ids, weights_TK=np.ones((tokens, 1)))
        writer.log_step(0, **row)
    for writer in reversed(writers):
        writer.finalize()
    run = Run(tmp_path / "run")
    steps = run.steps()
    assert (steps["tokens"].to_list(), steps["loss"].to_list()) == ([16], [3.5])  # (4 * 2 + 12 * 4) / 16
    assert steps["wall_time_s"].to_list() == [1.0]
    for layer in range(2):
        assert run.load(layer).tolist() == [[16, 0]]
        rows = run.decisions(0, layer)
        assert rows["rank"].value_counts().to_dict() == {3: 4, 5: 12}
    assert run.incomplete_steps().empty
