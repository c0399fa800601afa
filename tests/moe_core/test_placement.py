"""Experts on ranks: by hand, against the best placement found by trying all, and what must hold for any input."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.metrics import rank_balancedness, slowest_rank_cost
from moe_core.placement import Placement, balanced_placement, contiguous_placement


@st.composite
def problems(draw):
    num_experts, num_ranks = draw(st.integers(1, 14)), draw(st.integers(1, 6))
    spare = -num_experts % num_ranks + num_ranks * draw(st.integers(0, 3))
    load = draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    return load, num_ranks, spare


def test_by_hand():
    # the busy expert gets both spare replicas: three of 30, and each rank two slots
    plan = balanced_placement([90, 10, 10, 10, 10, 10], num_ranks=4, spare_replicas=2)
    assert plan.replicas.tolist() == [3, 1, 1, 1, 1, 1]
    assert plan.experts_RS.tolist() == [[0, 3], [0, 4], [0, 5], [1, 2]]
    assert plan.rank_loads([90, 10, 10, 10, 10, 10]).tolist() == [40, 40, 40, 20]
    assert slowest_rank_cost(plan.rank_loads([90, 10, 10, 10, 10, 10])) == 40 / 35


def test_contiguous():
    placement = contiguous_placement(8, 4)
    assert placement.experts_RS.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placement.rank_loads([[8, 0, 0, 0, 0, 0, 0, 8], [1] * 8]).tolist() == [[8, 0, 0, 8], [2] * 4]
    uneven = contiguous_placement(5, 2)
    assert uneven.experts_RS.tolist() == [[0, 1, 2], [3, 4, -1]]
    assert uneven.rank_loads([1, 2, 3, 4, 5]).tolist() == [6, 9]


@pytest.mark.parametrize(
    ("loads", "num_ranks", "expected"),
    [
        pytest.param([[8, 0], [8, 0]], 2, 0.5, id="P1"),
        pytest.param([[10, 30, 10, 30]] * 3, 4, 2 / 3, id="P2"),
    ],
)
def test_one_expert_a_rank(loads, num_ranks, expected):
    placement = contiguous_placement(len(loads[0]), num_ranks)
    assert rank_balancedness(placement.rank_loads(loads)) == pytest.approx(expected, rel=1e-15)


@given(problems())
def test_what_holds_for_any_plan(problem):
    load, num_ranks, spare = problem
    plan = balanced_placement(load, num_ranks, spare)
    slots = (len(load) + spare) // num_ranks
    assert plan.experts_RS.shape == (num_ranks, slots), "as many slots on each rank, all of them in use"
    assert (plan.replicas >= 1).all()
    assert plan.replicas.sum() == len(load) + spare
    assert plan.rank_loads(load).sum() == pytest.approx(sum(load))
    if len(load) * num_ranks >= len(load) + spare:
        assert all(len(set(row)) == slots for row in plan.experts_RS.tolist()), "two replicas share a rank"
    again = balanced_placement(load, num_ranks, spare)
    assert again.experts_RS.tolist() == plan.experts_RS.tolist()
    assert Placement.from_json(json.loads(json.dumps(plan.as_json()))).experts_RS.tolist() == plan.experts_RS.tolist()


@given(problems())
def test_greedy_replication(problem):
    load, num_ranks, spare = problem
    replicas = balanced_placement(load, num_ranks, spare).replicas
    # No expert that could still take a replica is busier, replica by replica, than one was before its last one.
    for given_one in np.flatnonzero(replicas > 1):
        for other in np.flatnonzero(replicas < min(num_ranks, replicas.max() + 1)):
            if replicas[given_one] <= num_ranks:
                assert load[given_one] / (replicas[given_one] - 1) >= load[other] / replicas[other] - 1e-9


@given(st.lists(st.integers(0, 60), min_size=6, max_size=6))
def test_near_the_best_of_all_placements(load):
    plan = balanced_placement(load, 2)
    best = min(max(sum(half), sum(load) - sum(half)) for half in itertools.combinations(load, 3))
    # Longest processing time first is at worst 4/3 - 1/(3 R) of the best; equal numbers of slots cost a little more.
    assert plan.rank_loads(load).max() <= best * 1.5 + 1e-9


def test_replicas_make_a_hot_expert_cheap():
    rng = np.random.default_rng(0)
    load = rng.zipf(1.5, 64).clip(max=10_000)
    costs = [slowest_rank_cost(balanced_placement(load, 8, spare).rank_loads(load)) for spare in (0, 8, 16, 32)]
    assert slowest_rank_cost(contiguous_placement(64, 8).rank_loads(load)) >= costs[0]
    assert costs[0] > 1.5
    assert max(costs[1:]) < 1.05


def test_a_replica_moves_out_of_the_way():
    # Heaviest first leaves room only beside the other replica here; without the move they would share a rank.
    load, found = None, False
    rng = np.random.default_rng(1)
    for _ in range(300):
        load = rng.integers(0, 9, 5)
        plan = balanced_placement(load, 4, 7)
        assert all(len(set(row)) == 3 for row in plan.experts_RS.tolist())
        found |= bool((plan.replicas == 4).any())
    assert found


def test_more_replicas_than_ranks_share_one():
    assert balanced_placement([1.0], 2, 3).experts_RS.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: balanced_placement([1, 2, 3], 2), "take spare_replicas=1"),
        (lambda: balanced_placement([[1, 2]], 2), "shape"),
        (lambda: balanced_placement([1, -2], 2), "not negative"),
        (lambda: balanced_placement([1, float("nan")], 2), "finite"),
        (lambda: balanced_placement([1, 2], 0), "num_ranks=0"),
        (lambda: balanced_placement([1, 2], 2, -2), "spare_replicas=-2"),
        (lambda: contiguous_placement(4, 5), "num_ranks=5 is more than num_experts=4"),
        (lambda: contiguous_placement(4, 2).rank_loads([1, 2, 3]), "4 experts"),
        (lambda: Placement.from_json({"ranks": [[0]]}), "no plan"),
        (lambda: Placement.from_json({"num_experts": 2, "slots_per_rank": 2, "ranks": [[0, 1], [2]]}), "2 is outside"),
        (lambda: Placement.from_json({"num_experts": 2, "slots_per_rank": 1, "ranks": [[0]]}), r"experts \[1\] of 2"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()
