"""Expert capacity and drop policies against hand-computed values."""

import pytest
import torch

from moe_core import MoELayer, SwitchAuxLoss
from moe_core.capacity import drop_over_capacity, dropped_load, expert_capacity
from moe_core.routing import Routing


def routing_of(ids, num_experts, weights=None):
    ids = torch.tensor(ids)
    ids = ids[:, None] if ids.ndim == 1 else ids
    T = ids.shape[0]
    weights = torch.full(ids.shape, 0.5) if weights is None else torch.tensor(weights).view(ids.shape)
    return Routing(torch.zeros(T, num_experts), torch.zeros(T, num_experts), ids, weights)


def test_c19_first_come_first_served():
    routing = drop_over_capacity(routing_of([0, 0, 1, 0, 0, 2], 3), 2)
    assert routing.kept_TK[:, 0].tolist() == [True, True, True, False, False, True]
    assert (routing.load() - dropped_load(routing)).tolist() == [2, 1, 1]
    assert routing.load().tolist() == [4, 1, 1]  # counted before the drop
    assert dropped_load(routing).sum().item() / 6 == pytest.approx(0.3333, abs=1e-4)
    assert routing.expert_ids_TK[:, 0].tolist() == [0, 0, 1, 0, 0, 2]  # ids stay


def test_first_choices_come_before_second_choices():
    routing = drop_over_capacity(routing_of([[1, 0], [0, 1], [0, 1]], 2), 2)
    # expert 0: first choices of tokens 1 and 2 fill it; expert 1: first choice of token 0, then token 1
    assert routing.kept_TK.tolist() == [[True, False], [True, True], [True, False]]


def test_the_probs_policy_keeps_the_highest_weights():
    routing = drop_over_capacity(routing_of([0, 0, 0, 1], 2, [0.1, 0.9, 0.5, 0.2]), 2, "probs")
    assert routing.kept_TK[:, 0].tolist() == [False, True, True, True]


def test_no_choice_is_neither_kept_nor_counted_as_dropped():
    routing = drop_over_capacity(routing_of([0, -1, -1, 0], 2), 1)
    assert routing.kept_TK[:, 0].tolist() == [True, False, False, False]
    assert dropped_load(routing).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "capacity"),
    [
        ((1024, 16, 1, 1.25), 80),
        ((10, 4, 1, 1.25), 4),
        ((2, 4, 1, 1.25), 2),
        ((100, 8, 2, 1.0), 25),
        ((0, 8, 2, 1.0), 0),
    ],
)
def test_capacity(arguments, capacity):
    assert expert_capacity(*arguments) == capacity


def test_bad_capacity_and_policy_are_named():
    with pytest.raises(ValueError, match="capacity_factor=-1"):
        MoELayer(4, 8, 4, 1, capacity_factor=-1)
    with pytest.raises(ValueError, match="'magic'.*'position', 'probs'"):
        drop_over_capacity(routing_of([0], 2), 1, "magic")


def test_dropped_tokens_count_in_load_and_aux_loss():
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    torch.manual_seed(1)
    free = MoELayer(6, 8, 4, 1, balancer=SwitchAuxLoss(1.0))
    torch.manual_seed(1)
    tight = MoELayer(6, 8, 4, 1, balancer=SwitchAuxLoss(1.0), capacity_factor=0.5)
    a, b = free(x), tight(x)
    assert dropped_load(b.routing).sum() > 0
    assert torch.equal(a.routing.load(), b.routing.load())
    assert torch.equal(a.losses["aux_loss"], b.losses["aux_loss"])
    dropped = ~b.routing.kept_TK[:, 0]
    assert b.hidden[dropped].eq(0).all()
    assert torch.allclose(a.hidden[~dropped], b.hidden[~dropped], atol=1e-6)
