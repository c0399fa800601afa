"""Expert choice against hand values and a slow reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core.balancers import make_balancer
from moe_core.expert_choice import ExpertChoiceRouter
from moe_core.layers import MoELayer
from moe_core.routing import rerouted_assignments

nan, inf = math.nan, math.inf
SCORES = [[0.9, 0.7], [0.8, 0.1], [0.1, 0.6], [0.2, 0.1]]  # expert 0 likes tokens 0, 1; expert 1 tokens 0, 2


def route(scores, top_k=1, mask=None, **options):
    logits = torch.logit(torch.tensor(scores))
    router = ExpertChoiceRouter(4, logits.shape[1], top_k, score_function="sigmoid", **options)
    return router.route_logits(logits, token_mask=None if mask is None else torch.tensor(mask))


def test_each_expert_takes_its_best_tokens():
    routing = route(SCORES)
    assert routing.expert_ids_TK.tolist() == [[0, 1], [0, -1], [1, -1], [-1, -1]]
    assert routing.weights_TK.flatten().tolist() == pytest.approx([0.9, 0.7, 0.8, 0, 0.6, 0, 0, 0], abs=1e-6)
    assert routing.load().tolist() == [2, 2]
    assert rerouted_assignments(routing) is None


def test_a_fixed_number_of_slots_keeps_the_best_scores():
    routing = route(SCORES, max_experts_per_token=1)
    assert routing.expert_ids_TK.tolist() == [[0], [0], [1], [-1]]
    assert route([[0.9, 0.1], [0.1, 0.9]], max_experts_per_token=2).expert_ids_TK.tolist() == [[0, -1], [1, -1]]


def test_padding_is_neither_taken_nor_counted_and_ties_go_to_the_earlier_token():
    routing = route(SCORES, mask=[False, True, True, True])  # 3 tokens: ceil(3 / 2) = 2 for each expert
    # expert 0: tokens 1 and 3; expert 1: token 2, then 1 and 3 alike: 1
    assert routing.expert_ids_TK.tolist() == [[-1, -1], [0, 1], [1, -1], [0, -1]]


def test_c22_invalid_rows_are_set_apart():
    router = ExpertChoiceRouter(4, 2, 1)
    logits = torch.tensor([[1.0, 0.0], [nan, nan], [nan, 5.0], [-inf, -inf], [inf, 0.0], [0.0, 1.0], [-inf, 9.0]])
    routing = router.route_logits(logits)
    assert routing.invalid_T.tolist() == [False, True, True, True, True, False, False]
    # 3 tokens, 2 for each expert; expert 0 may not take the last one
    assert routing.expert_ids_TK[:, 0].tolist() == [0, -1, -1, -1, -1, 1, 1]
    assert routing.expert_ids_TK[5].tolist() == [1, 0]
    assert routing.weights_TK.isfinite().all()
    assert routing.scores_TE[1:5].eq(0).all()


def test_it_looks_ahead():
    earlier = route([[0.5, 0.4], [0.3, 0.2]])
    later_token_changed = route([[0.5, 0.4], [0.9, 0.9]])
    assert earlier.expert_ids_TK[0].tolist() == [0, 1]
    assert later_token_changed.expert_ids_TK[0].tolist() == [-1, -1]


@settings(deadline=None, max_examples=40)
@given(T=st.integers(0, 9), E=st.integers(1, 5), data=st.data())
def test_choices_equal_a_slow_reference(T, E, data):
    top_k = data.draw(st.integers(1, E))
    values = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=T * E, max_size=T * E))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=T, max_size=T)), dtype=torch.bool)
    logits = torch.tensor(values).view(T, E)
    routing = ExpertChoiceRouter(4, E, top_k).route_logits(logits, token_mask=mask)
    scores = logits.softmax(-1)
    real = [t for t in range(T) if mask[t]]
    takes = math.ceil(len(real) * top_k / E)
    taken = {(t, e) for e in range(E) for t in sorted(real, key=lambda t: (-scores[t, e].item(), t))[:takes]}
    for t in range(T):
        experts = sorted((e for e in range(E) if (t, e) in taken), key=lambda e: (-scores[t, e].item(), e))
        assert routing.expert_ids_TK[t].tolist() == experts + [-1] * (routing.top_k - len(experts))
    assert routing.top_k == max([1, *(sum((t, e) in taken for e in range(E)) for t in range(T))])
    assert routing.load().tolist() == [min(takes, len(real))] * E


def test_in_a_layer_with_a_gradient_for_the_router():
    torch.manual_seed(0)
    layer = MoELayer(6, 8, 4, 2, router=ExpertChoiceRouter(6, 4, 2), balancer=make_balancer("z", 4, 2))
    x = torch.randn(2, 8, 6)
    out = layer(x)
    assert out.routing.load().tolist() == [8, 8, 8, 8]
    flat, expected = x.view(16, 6), torch.zeros(16, 6)
    for t in range(16):
        for e, weight in zip(out.routing.expert_ids_TK[t].tolist(), out.routing.weights_TK[t], strict=True):
            if e >= 0:
                expected[t] += (weight * layer.experts[e](flat[t : t + 1])[0]).detach()
    torch.testing.assert_close(out.hidden.view(16, 6), expected)
    out.hidden.square().sum().backward()
    assert layer.router.weight.grad.abs().sum() > 0
    assert layer(x[:, :0]).hidden.shape == (2, 0, 6)


def test_float32_under_autocast_with_a_learned_bias():
    router = ExpertChoiceRouter(32, 8, 2, bias=True)
    torch.nn.init.normal_(router.bias)
    x = torch.randn(10, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = router(x)
    assert routing.logits_TE.dtype == routing.weights_TK.dtype == torch.float32
    torch.testing.assert_close(routing.logits_TE, x.float() @ router.weight.T + router.bias, rtol=1e-5, atol=1e-5)


def test_a_selection_bias_is_refused():
    with pytest.raises(ValueError, match="expert_bias"):
        ExpertChoiceRouter(4, 2, 1)(torch.randn(3, 4), torch.zeros(2))
    for balancer in ("sign-bias", "quantile", "sign-bias+z"):
        with pytest.raises(ValueError, match="no effect on a ExpertChoiceRouter"):
            MoELayer(4, 8, 4, 2, router=ExpertChoiceRouter(4, 4, 2), balancer=make_balancer(balancer, 4, 2))
    with pytest.raises(ValueError, match="max_experts_per_token=5.*num_experts=4"):
        ExpertChoiceRouter(4, 4, 2, max_experts_per_token=5)
