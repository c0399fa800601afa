"""Group-limited selection against hand values, a slow reference and transformers' DeepSeek routers.

Shapes: T tokens, E experts, K choices a token.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core import QuantileBalancer, SignBiasBalancer, TopKRouter
from moe_core.balancers import make_balancer
from moe_core.layers import MoELayer
from moe_core.routing import rerouted_assignments

inf = math.inf


def route(logits, top_k, num_groups, top_groups, bias=None, **options):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    router = TopKRouter(4, logits.shape[-1], top_k, num_groups=num_groups, top_groups=top_groups, **options)
    return router.route_logits(logits, None if bias is None else torch.tensor(bias))


SCORES = [0.9, 0.1, 0.6, 0.6, 0.5, 0.4, 0.8, 0.05]  # four groups of two


@pytest.mark.parametrize(
    ("bias", "ids"),
    [
        (None, [0, 6]),  # best of each group .9, .6, .5, .8: groups 0 and 3
        ([0.0] * 8, [0, 2]),  # sums 1.0, 1.2, .9, .85: groups 1 and 0; the tie of 2 and 3 goes to 2
        ([0.0] * 4 + [0.5, 0.5, 0.0, 0.0], [4, 5]),  # sums 1.0, 1.2, 1.9, .85: groups 2 and 1; corrected 1.0, .9
    ],
    ids=["max-without-bias", "two-best-with-bias", "bias-moves-groups"],
)
def test_groups_by_hand(bias, ids):
    routing = route(torch.logit(torch.tensor([SCORES])), 2, 4, 2, bias, score_function="sigmoid", renormalize=False)
    assert routing.expert_ids_TK.tolist() == [ids]
    assert routing.weights_TK[0].tolist() == pytest.approx([SCORES[e] for e in ids], abs=1e-6)
    assert routing.threshold_T is None


def test_rerouting_compares_with_the_same_rule_under_a_bias_of_zero():
    logits = torch.logit(torch.tensor([SCORES]))
    moved = route(logits, 2, 4, 2, [0.0] * 4 + [0.5, 0.5, 0.0, 0.0], score_function="sigmoid")
    assert rerouted_assignments(moved) == 2  # 4 and 5 in place of 0 and 2
    assert rerouted_assignments(route(logits, 2, 4, 2, [0.0] * 8, score_function="sigmoid")) == 0


def test_losing_groups_get_minus_infinity_and_not_zero():
    routing = route([[-1.0, -2.0, -3.0, -4.0]], 2, 2, 1, softmax_after_top_k=True)
    assert routing.expert_ids_TK.tolist() == [[0, 1]]  # a zero would put 2 and 3 first


def test_equal_groups_go_to_the_lowest():
    assert route(torch.zeros(3, 8), 3, 4, 2).expert_ids_TK.tolist() == [[0, 1, 2]] * 3


def test_a_row_whose_groups_hold_too_few_possible_experts_is_invalid():
    logits = torch.tensor([[1.0, -inf, 0.5, 0.4], [0.0, 1.0, -inf, 0.5]], requires_grad=True)
    for options in ({}, {"softmax_after_top_k": True}):
        routing = TopKRouter(4, 4, 2, num_groups=2, top_groups=1, **options).route_logits(logits)
        assert routing.invalid_T.tolist() == [True, False]
        assert routing.expert_ids_TK.tolist() == [[-1, -1], [1, 0]]
        logits.grad = None
        routing.weights_TK.square().sum().backward()
        assert logits.grad.isfinite().all()


@settings(deadline=None, max_examples=40)
@given(
    T=st.integers(0, 6),
    G=st.integers(1, 4),
    M=st.integers(1, 3),
    data=st.data(),
    with_bias=st.booleans(),
)
def test_choices_equal_a_slow_reference(T, G, M, data, with_bias):
    E, top_groups = G * M, data.draw(st.integers(1, G))
    top_k = data.draw(st.integers(1, top_groups * M))
    values = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=T * E, max_size=T * E))
    bias = torch.linspace(0.5, -0.5, E) if with_bias else None
    logits = torch.tensor(values).view(T, E)
    router = TopKRouter(4, E, top_k, score_function="sigmoid", num_groups=G, top_groups=top_groups)
    routing = router.route_logits(logits, bias)
    corrected = logits.sigmoid() if bias is None else logits.sigmoid() + bias
    for t in range(T):
        of_group = []
        for g in range(G):
            best_of_group = sorted(corrected[t, g * M : (g + 1) * M], reverse=True)[: 2 if with_bias else 1]
            of_group.append(sum(best_of_group).item())  # added up in float32, where equal sums must be equal
        best = sorted(range(G), key=lambda g: (-of_group[g], g))[:top_groups]
        eligible = [e for g in best for e in range(g * M, (g + 1) * M)]
        expected = sorted(eligible, key=lambda e: (-corrected[t, e].item(), e))[:top_k]
        assert routing.expert_ids_TK[t].tolist() == expected


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_equals_the_router_of_deepseek_in_transformers(version):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    T, D, E, K, G, top_groups = 40, 12, 16, 4, 4, 2
    x = torch.randn(T, D)
    shape = {"hidden_size": D, "num_attention_heads": 2, "num_experts_per_tok": K}
    shape |= {"n_group": G, "topk_group": top_groups}
    if version == "v2":
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek
        from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config

        config = DeepseekV2Config(
            **shape, n_routed_experts=E, topk_method="group_limited_greedy", routed_scaling_factor=3.0
        )
        theirs = deepseek.DeepseekV2TopkRouter(config)
        ours = TopKRouter(D, E, K, renormalize=False, routed_scaling_factor=3.0, num_groups=G, top_groups=top_groups)
        bias = None
    else:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
        from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

        config = DeepseekV3Config(**shape, n_routed_experts=E, norm_topk_prob=True, routed_scaling_factor=2.5)
        theirs = deepseek.DeepseekV3TopkRouter(config)
        ours = TopKRouter(
            D, E, K, score_function="sigmoid", routed_scaling_factor=2.5, num_groups=G, top_groups=top_groups
        )
        bias = torch.randn(E) * 0.2
        theirs.e_score_correction_bias.copy_(bias)
    torch.nn.init.normal_(theirs.weight)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight)
    routing = ours(x, bias)
    logits, weights, ids = theirs(x)
    torch.testing.assert_close(routing.logits_TE, logits)
    assert len(set(map(tuple, ids.sort(-1).values.tolist()))) > 1

    def dense(ids, weights):
        return torch.zeros(T, E).scatter(1, ids, weights)

    torch.testing.assert_close(dense(routing.expert_ids_TK, routing.weights_TK), dense(ids, weights))
    probe = torch.randn(T, E)
    (dense(routing.expert_ids_TK, routing.weights_TK) * probe).sum().backward()
    (dense(ids, weights) * probe).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 3}, "num_groups=3.*num_experts=8"),
        ({"num_groups": 0}, "num_groups=0"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups=5.*num_groups=4"),
        ({"num_groups": 8, "top_groups": 1}, "top_groups=1 of num_groups=8 leave 1 of num_experts=8.*top_k=2"),
    ],
)
def test_bad_groups_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TopKRouter(4, 8, 2, **options)


@pytest.mark.parametrize("balancer", ["quantile", "quantile-step", "quantile+z"])
def test_the_quantile_balancer_refuses_groups(balancer):
    router = TopKRouter(4, 8, 2, num_groups=4, top_groups=2)
    with pytest.raises(ValueError, match="refuses group-limited routing.*num_groups=4"):
        MoELayer(4, 8, 8, 2, router=router, balancer=make_balancer(balancer, 8, 2))
    with pytest.raises(ValueError, match="without groups"):
        QuantileBalancer(8, 2).observe(router(torch.randn(5, 4)))


def test_sign_bias_balances_groups():
    torch.manual_seed(0)
    router = TopKRouter(8, 16, 2, score_function="sigmoid", num_groups=4, top_groups=2)
    layer = MoELayer(8, 8, 16, 2, router=router, balancer=SignBiasBalancer(16, rate=1e-2))
    x = torch.randn(512, 8) + 0.5
    loads = []
    with torch.no_grad():
        router.weight.mul_(20)
        for _ in range(120):
            loads.append(layer.router(x, layer.balancer.expert_bias).load().float())
            layer.balancer.observe(layer.router(x, layer.balancer.expert_bias))
            layer.balancer.step()
    assert loads[-1].max() / loads[-1].mean() < 0.6 * loads[0].max() / loads[0].mean()
