"""Placement: costs and loads of ranks against pandas on the files and a plan made by hand."""

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from opened import tables
from planted import Collapse, Planted, write_planted

from app import placing
from app.figures.inputs import LoadSeries

COLLAPSE = {3: Collapse(step=0, experts=(0, 1), share=0.9)}
TRUTH = Planted(num_experts=8, top_k=1, steps=60, collapse=COLLAPSE)


def table(test, column):
    assert not test.exception, test.exception
    return next(frame for frame in tables(test) if column in frame)


def loads(run: Path, layer: int) -> np.ndarray:
    rows = pq.read_table(run / "layer_stats").to_pandas(ignore_metadata=True)
    return np.stack(rows[(rows["layer"] == layer) & (rows["phase"] == "train")].sort_values("step")["load"].to_list())


@pytest.fixture
def run(shown):
    return write_planted(shown / "run", TRUTH)


def test_contiguous_loads_and_costs_are_those_of_the_files(run, open_page):
    test = open_page("placement", run="run", layer=3, ranks=4, spares=0, window=10)
    load_SE = loads(run, 3)
    ranks_SR = load_SE.reshape(60, 4, 2).sum(axis=2)
    frame = table(test, "rank 0")
    contiguous = frame[frame["placement"] == "contiguous"]
    np.testing.assert_array_equal(contiguous[[f"rank {rank}" for rank in range(4)]], ranks_SR)
    cost_S = ranks_SR.max(axis=1) / ranks_SR.mean(axis=1)
    numbers = table(test, "slowest rank, planned")
    costs = next(e for e in tables(test) if "step" in e and "slowest rank, planned" in e)
    np.testing.assert_allclose(costs["slowest rank, contiguous"], cost_S)
    layers = next(e for e in tables(test) if "layer" in e and "slowest rank, planned" in e)
    assert layers["layer"].tolist() == [1, 3]
    assert layers["slowest rank, contiguous"].iloc[1] == pytest.approx(cost_S[-10:].mean())
    assert len(numbers)
    assert f"{cost_S[-10:].mean():.3g} times a perfect split in layer 3" in test.title[0].value
    captions = "\n".join(element.value for element in test.caption)
    assert f"Slowest of 2 layers: layer 3 with {cost_S[-10:].mean():.3g} times contiguous" in captions
    assert "Spare replicas come in steps of 4" in captions


def test_the_title_is_of_the_chosen_layer_and_the_caption_of_the_slowest(run, open_page):
    test = open_page("placement", run="run", layer=1, ranks=4, spares=0, window=10)
    assert not test.exception, test.exception
    cost = {}
    for layer in (1, 3):
        ranks_SR = loads(run, layer)[-10:].reshape(10, 4, 2).sum(axis=2)
        cost[layer] = (ranks_SR.max(axis=1) / ranks_SR.mean(axis=1)).mean()
    assert cost[3] > 2 > cost[1]
    assert f"works {cost[1]:.3g} times a perfect split in layer 1" in test.title[0].value
    captions = "\n".join(element.value for element in test.caption)
    assert f"Slowest of 2 layers: layer 3 with {cost[3]:.3g} times contiguous" in captions


def test_the_layer_that_stays_slow_with_the_plan_is_named(samples, open_page):
    """Of this run layer 1 waits longest contiguous, but a plan helps it much and layer 3 little."""
    test = open_page("placement", run="none", layer=1, ranks=4, spares=0)
    assert not test.exception, test.exception
    layers = next(e for e in tables(test) if "layer" in e and "slowest rank, planned" in e)
    by_layer = layers.set_index("layer")
    before, after = by_layer["slowest rank, contiguous"], by_layer["slowest rank, planned"]
    assert (before.idxmax(), after.idxmax()) == (1, 3)
    captions = "\n".join(element.value for element in test.caption)
    said = f"layer 1 with {before[1]:.3g} times contiguous, layer 3 with {after[3]:.3g} times by the plan"
    assert said in captions
    assert after[3] > 2


def test_the_plan_parts_the_two_hot_experts_and_no_plan_without_copies_is_better(run, open_page):
    test = open_page("placement", run="run", layer=3, ranks=4, spares=0, window=50)
    slots = table(test, "experts, planned")
    held = [set(map(int, row.split(", "))) for row in slots["experts, planned"]]
    assert not any({0, 1} <= experts for experts in held)
    assert set().union(*held) == set(range(8))
    load_E = loads(run, 3)[-50:].sum(axis=0)
    worst = slots["load / perfect split, planned"].max()
    assert worst == pytest.approx(max(load_E[list(experts)].sum() for experts in held) * 4 / load_E.sum())
    # by trying them all: 8 experts in 4 pairs
    best = min(max(load_E[list(pair)].sum() for pair in pairs) for pairs in pairings(tuple(range(8))))
    assert worst == pytest.approx(best * 4 / load_E.sum())


def pairings(left):
    if not left:
        yield ()
        return
    for other in left[1:]:
        rest = tuple(one for one in left[1:] if one != other)
        for more in pairings(rest):
            yield ((left[0], other), *more)


def test_spare_replicas_go_to_the_hot_experts_and_never_share_a_rank(run, open_page):
    test = open_page("placement", run="run", layer=3, ranks=4, spares=4, window=50)
    slots = table(test, "experts, planned")
    held = [list(map(int, row.split(", "))) for row in slots["experts, planned"]]
    assert all(len(experts) == len(set(experts)) == 3 for experts in held)
    copies = np.bincount(list(itertools.chain(*held)), minlength=8)
    assert copies.sum() == 12
    assert (copies[:2] > 1).all()
    load_E = loads(run, 3)[-50:].sum(axis=0)
    ranks = np.array([sum(load_E[expert] / copies[expert] for expert in experts) for experts in held])
    np.testing.assert_allclose(slots["load / perfect split, planned"], ranks / ranks.mean())
    # three copies of each: two ranks must hold two of them, 2 x 0.45 / 3 = 0.3 of the load, 1.2 times a perfect split
    assert copies[:2].tolist() == [3, 3]
    assert 1.2 < slots["load / perfect split, planned"].max() < 1.3 < slots["load / perfect split, contiguous"].max()
    assert "Experts with copies: 0, 1" in "\n".join(element.value for element in test.caption)
    assert "and 4 spare replicas" in test.title[0].value


def test_one_expert_a_layer_cannot_be_placed(shown, open_page):
    write_planted(shown / "run", Planted(num_experts=1, top_k=1, steps=5))
    test = open_page("placement", run="run")
    assert not test.exception, test.exception
    assert "two or more" in test.info[0].value
    assert test.title[0].value == "Placement"


def test_choices_fit_every_layer():
    assert placing.rank_choices([16, 8]) == [2, 4, 8]
    assert placing.rank_choices([1, 8]) == []
    assert placing.spare_choices([16, 8], 4) == [0, 4, 8, 12, 16]
    assert placing.spare_choices([10], 4) == [2, 6, 10, 14, 18]
    assert placing.spare_choices([8, 9], 4) == []


def test_the_exported_plan_by_hand():
    load_SE = np.array([[1, 1, 1, 1], [6, 1, 1, 0], [6, 1, 1, 0]])
    series = LoadSeries(run="a", layer=5, steps_S=np.array([0, 10, 20]), load_SE=load_SE, top_k=1)
    placed = placing.place(series, ranks=2, spares=2, window=2)
    document = json.loads(json.dumps(placing.plan_document("a", [placed])))
    (plan,) = document["layers"]
    assert (document["run"], plan["layer"], plan["first_step"], plan["last_step"]) == ("a", 5, 10, 20)
    # 12 of 16 assignments are expert 0's: a copy on either rank; the other copy goes to expert 1 or 2
    assert plan["replicas"][0] == 2
    assert all(0 in rank and len(set(rank)) == 3 for rank in plan["ranks"])
    assert placed.cost(placing.CONTIGUOUS) == pytest.approx(7 / 4)
    assert placing.balancedness([placed], placing.CONTIGUOUS) == pytest.approx(4 / 7)


def test_ranks_are_offered_on_which_every_layer_has_as_many_slots_a_rank() -> None:
    assert placing.rank_choices([16, 16]) == [2, 4, 8, 16]
    assert placing.rank_choices([4, 6]) == [2], "4 + s and 6 + s are never both multiples of 4"
    assert placing.rank_choices([4, 5]) == []
