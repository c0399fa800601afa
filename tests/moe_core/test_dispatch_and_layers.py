"""Dispatchers, capacity, experts, MoELayer and MoETransformer."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core import MoELayer, MoETransformer, MoETransformerConfig, SwitchAuxLoss, TopKRouter
from moe_core.balancers import make_balancer
from moe_core.capacity import drop_over_capacity, dropped_load, expert_capacity
from moe_core.dispatchers import make_dispatcher, naive_dispatch, sorted_dispatch
from moe_core.experts import ExpertBank, make_expert
from moe_core.routing import Routing


def routing_of(ids, num_experts, weights=None):
    ids = torch.tensor(ids)
    ids = ids[:, None] if ids.ndim == 1 else ids
    T = ids.shape[0]
    weights = torch.full(ids.shape, 0.5) if weights is None else torch.tensor(weights).view(ids.shape)
    return Routing(torch.zeros(T, num_experts), torch.zeros(T, num_experts), ids, weights)


def run(dispatch, x, routing, experts):
    """Output and every gradient (input, weights, expert parameters; None stays None)."""
    x = x.clone().requires_grad_()
    weights = routing.weights_TK.clone().requires_grad_()
    experts.zero_grad()
    y = dispatch(x, replace(routing, weights_TK=weights), experts)
    if y.requires_grad:  # without a single assignment there may be no graph at all
        (y * torch.arange(1, y.numel() + 1).view_as(y).cos()).sum().backward()
    return y, [x.grad, weights.grad, *(p.grad for p in experts.parameters())]


@settings(deadline=None, max_examples=80)
@given(
    T=st.integers(0, 17),
    E=st.integers(1, 6),
    data=st.data(),
    activation=st.sampled_from(["swiglu", "gelu"]),
    with_drops=st.booleans(),
)
def test_sorted_equals_naive_with_all_gradients(T, E, data, activation, with_drops):
    K = data.draw(st.integers(1, E))
    # a few favourites, so that experts with 0, 1 and many tokens all occur; -1 = no route
    row = st.lists(st.integers(-1, E - 1), min_size=K, max_size=K)
    ids = data.draw(st.lists(row, min_size=T, max_size=T))
    torch.manual_seed(T * 31 + E)
    routing = Routing(
        torch.zeros(T, E),
        torch.zeros(T, E),
        torch.tensor(ids, dtype=torch.int64).view(T, K),
        torch.rand(T, K),
        kept_TK=torch.rand(T, K) < 0.7 if with_drops else None,
    )
    experts = ExpertBank(E, 8, 5, activation)
    x = torch.randn(T, 8)
    y_naive, grads_naive = run(naive_dispatch, x, routing, experts)
    y_sorted, grads_sorted = run(sorted_dispatch, x, routing, experts)
    torch.testing.assert_close(y_sorted, y_naive, rtol=1e-5, atol=1e-5)
    for ours, reference in zip(grads_sorted, grads_naive, strict=True):
        if reference is None:
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(
                torch.zeros_like(reference) if ours is None else ours, reference, rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("dispatch", [naive_dispatch, sorted_dispatch])
def test_output_equals_a_sum_by_hand(dispatch):
    routing = routing_of([[2, 0], [0, -1]], 3, [[0.75, 0.25], [1.0, 0.0]])
    experts = [lambda x: x + 1, lambda x: x * math.nan, lambda x: x * 10]
    y = dispatch(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), routing, experts)
    assert y.tolist() == [[0.75 * 10 + 0.25 * 2, 0.75 * 20 + 0.25 * 3], [4.0, 5.0]]


@pytest.mark.parametrize("dispatch", [naive_dispatch, sorted_dispatch])
def test_an_idle_expert_gets_no_gradient_and_adamw_leaves_it_alone(dispatch):
    experts = ExpertBank(3, 4, 6)
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, weight_decay=0.5)
    before = [p.clone() for p in experts[1].parameters()]
    dispatch(torch.randn(5, 4), routing_of([0, 2, 0, 0, 2], 3), experts).sum().backward()
    optimizer.step()
    assert all(p.grad is None for p in experts[1].parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, experts[1].parameters(), strict=True))


def test_unknown_dispatcher_is_named():
    with pytest.raises(ValueError, match="'magic'.*'auto', 'naive', 'masked', 'sorted', 'grouped'"):
        make_dispatcher("magic")


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


def test_experts_by_hand():
    x = torch.tensor([[1.0, -2.0]])
    swiglu = make_expert(2, 1, "swiglu")
    with torch.no_grad():
        swiglu.gate_up.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        swiglu.down.copy_(torch.tensor([[1.0], [2.0]]))
    silu_1 = 1 / (1 + math.exp(-1))
    assert swiglu(x).detach().flatten().tolist() == pytest.approx([-2 * silu_1, -4 * silu_1])
    gelu = make_expert(2, 1, "gelu")
    with torch.no_grad():
        gelu.up.copy_(torch.tensor([[1.0, 0.0]]))
        gelu.down.copy_(torch.tensor([[1.0], [2.0]]))
    gelu_1 = 0.5 * (1 + math.erf(1 / math.sqrt(2)))
    assert gelu(x).detach().flatten().tolist() == pytest.approx([gelu_1, 2 * gelu_1])


def test_a_layer_is_shared_plus_weighted_experts():
    torch.manual_seed(0)
    layer = MoELayer(6, 8, 4, 2, num_shared_experts=2)
    x = torch.randn(2, 5, 6)
    out = layer(x)
    flat = x.view(10, 6)
    for t in range(10):
        expected = layer.shared(flat[t : t + 1])[0]
        for k in range(2):
            e = out.routing.expert_ids_TK[t, k].item()
            expected = expected + out.routing.weights_TK[t, k] * layer.experts[e](flat[t : t + 1])[0]
        torch.testing.assert_close(out.hidden.view(10, 6)[t], expected)
    assert layer.shared.down.shape == (6, 16)  # one network of the summed width


def test_padding_goes_nowhere():
    layer = MoELayer(6, 8, 4, 2)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    out = layer(torch.randn(2, 3, 6), token_mask=mask)
    assert out.routing.load().sum() == 6
    assert out.hidden[~mask].eq(0).all()


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


def test_a_router_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="1 of 8 experts.*top_k=2 of num_experts=4"):
        MoELayer(4, 8, 4, 2, router=TopKRouter(4, 8, 1))
    with pytest.raises(ValueError, match=r"token_mask.*\(2, 2\).*\(2, 3\)"):
        MoELayer(4, 8, 4, 2)(torch.zeros(2, 3, 4), token_mask=torch.ones(2, 2))


def small(**changes):
    options = {"vocab_size": 50, "d_model": 16, "num_heads": 2, "d_ff": 24, "num_experts": 4, **changes}
    return MoETransformer(MoETransformerConfig(**options))


def test_c30_dense_layers_have_no_aux_loss_and_layers_are_summed():
    model = small(balancer="aux+z", aux_coef=1.0)
    ids = torch.randint(50, (2, 7))
    out = model(ids, labels=ids)
    assert [losses is None for losses in out.layer_losses] == [True, False, True, False]
    assert [routing is None for routing in out.routings] == [True, False, True, False]
    per_layer = [losses["aux_loss"] for losses in out.layer_losses if losses]
    assert torch.equal(out.losses["aux_loss"], per_layer[0] + per_layer[1])
    assert out.loss.item() == pytest.approx(sum(v.item() for v in out.losses.values()), rel=1e-6)


def test_cross_entropy_by_hand():
    model = small()
    ids = torch.randint(50, (2, 5))
    out = model(ids, labels=ids)
    log_probs = out.logits.log_softmax(-1)
    by_hand = -sum(log_probs[b, s, ids[b, s + 1]] for b in range(2) for s in range(4)) / 8
    assert out.losses["ce_loss"].item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_attention_is_causal_and_padding_is_not_seen():
    model = small(num_experts=4, top_k=4, renormalize=True).eval()
    ids = torch.randint(50, (1, 8))
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 50
    a, b = model(ids).logits, model(changed).logits
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])
    mask = torch.tensor([[False, False, True, True, True, True, True, True]])
    other = ids.clone()
    other[0, :2] = 0
    a, b = model(ids, token_mask=mask).logits, model(other, token_mask=mask).logits
    torch.testing.assert_close(a[:, 2:], b[:, 2:])
    assert a.isfinite().all()


def test_padding_is_left_out_of_the_loss():
    model = small(balancer="aux").eval()
    ids = torch.randint(50, (1, 6))
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.int64)], dim=1)
    mask = torch.tensor([[True] * 6 + [False] * 4])
    a, b = model(ids, labels=ids), model(padded, labels=padded, token_mask=mask)
    for name in a.losses:
        assert a.losses[name].item() == pytest.approx(b.losses[name].item(), rel=1e-5), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 15}, "d_model=15.*num_heads=2"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"top_k": 5}, "top_k=5.*num_experts=4"),
        ({"balancer": "magic"}, "'magic'"),
        ({"activation": "relu"}, "'relu'"),
        ({"moe_frequency": 0}, "moe_frequency"),
    ],
)
def test_bad_configs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


@pytest.mark.parametrize("balancer", ["none", "aux", "sign-bias", "quantile", "sign-bias+aux+z"])
def test_state_dict_round_trip_and_bfloat16(balancer):
    model = small(balancer=balancer)
    ids = torch.randint(50, (2, 9))
    model(ids, labels=ids).loss.backward()
    twin = small(balancer=balancer)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(ids).logits, twin.eval()(ids).logits)
    half = model.to(torch.bfloat16)
    assert half(ids).logits.dtype == torch.bfloat16
    for name, buffer in half.named_buffers():
        assert buffer.dtype in (torch.float32, torch.int64), name


def test_make_balancer_inside_the_model_learns_its_rate():
    model = small(balancer="sign-bias", bias_rate=0.25)
    assert model.layers[1].mlp.balancer.rate == 0.25
    assert type(model.layers[1].mlp.balancer) is type(make_balancer("sign-bias", 4, 1))
