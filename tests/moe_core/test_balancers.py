"""Balancers against hand-computed values and a slow reference."""

import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_core import (
    MoELayer,
    NoBalancer,
    QuantileBalancer,
    RouterZLoss,
    SignBiasBalancer,
    SwitchAuxLoss,
    TopKRouter,
    metrics,
)
from moe_core.balancers import CombinedBalancer, attach_balancers, make_balancer
from moe_core.routing import Routing


def route(logits, top_k, mask=None, score_function="softmax", bias=None):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    router = TopKRouter(4, logits.shape[-1], top_k, score_function=score_function)
    return router.route_logits(logits, bias, None if mask is None else torch.tensor(mask))


def aux(routing):
    return SwitchAuxLoss(1.0).losses(routing)["aux_loss"].item()


def test_c1_each_layer_is_judged_on_its_own():
    per_layer = []
    for layer in range(4):
        logits = torch.zeros(8, 4)
        logits[:, layer] = 5.0
        per_layer.append(aux(route(logits, 1)))
    assert per_layer == pytest.approx([3.9207] * 4, abs=1e-4)


def test_c2_padding_is_in_neither_numerator_nor_denominator():
    logits = [[2.0, 0.0], [0.0, 2.0]] + [[2.0, 0.0]] * 4
    mask = [True, True, False, False, False, False]
    routing = route(logits, 1, mask)
    assert routing.load().tolist() == [1, 1]
    assert aux(routing) == pytest.approx(1.0, abs=1e-6)
    assert aux(route(logits, 1)) == pytest.approx(1.3385, abs=1e-4)


def test_c4_softmax_is_applied_once():
    routing = route([[4.0, 0.0, 0.0, 0.0]] * 6 + [[0.0, 4.0, 0.0, 0.0]] * 2, 1)
    assert aux(routing) == pytest.approx(2.3958, abs=1e-4)
    assert routing.scores_TE.mean(0).tolist() == pytest.approx([0.7153, 0.25, 0.0174, 0.0174], abs=1e-4)


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (32, 4), (128, 8)])
def test_x9_perfect_balance_reads_the_coefficient_for_every_e_and_k(num_experts, top_k):
    # token t prefers experts t, t+1, ..., t+k-1: loads and probabilities are uniform
    logits = torch.zeros(num_experts, num_experts)
    for t in range(num_experts):
        for j in range(top_k):
            logits[t, (t + j) % num_experts] = 3.0
    for score_function in ("softmax", "sigmoid"):
        losses = SwitchAuxLoss(0.01).losses(route(logits, top_k, score_function=score_function))
        assert losses["aux_loss"].item() == pytest.approx(0.01, rel=1e-5)


def test_z_loss_of_zeros():
    assert RouterZLoss(1.0).losses(route(torch.zeros(5, 4), 1))["z_loss"].item() == pytest.approx(1.9218, abs=1e-4)


@pytest.mark.parametrize("balancer", [SwitchAuxLoss(1.0), RouterZLoss(1.0)])
def test_an_all_padding_batch_gives_zero_and_a_finite_gradient(balancer):
    logits = torch.tensor([[1.0, math.nan], [2.0, 0.0]], requires_grad=True)
    routing = TopKRouter(4, 2, 1).route_logits(logits, token_mask=torch.tensor([True, False]))
    (loss,) = balancer.losses(routing).values()
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(("name", "balancer"), [("aux_loss", SwitchAuxLoss), ("z_loss", RouterZLoss)])
def test_the_router_gradient_grows_with_the_coefficient(name, balancer):
    grads = []
    for coefficient in (0.0, 1.0, 2.0):
        torch.manual_seed(0)
        layer = MoELayer(8, 16, 4, 1, balancer=balancer(coefficient))
        layer(torch.randn(32, 8)).losses[name].backward()
        grads.append(layer.router.weight.grad.norm().item())
    assert grads[0] == 0
    assert grads[1] > 0
    assert grads[2] == pytest.approx(2 * grads[1], rel=1e-5)


def test_c10_small_bias_steps_survive_bfloat16_and_close_counts_are_told_apart():
    balancer = SignBiasBalancer(2, rate=1e-3)
    balancer.expert_bias.copy_(torch.tensor([0.5, -0.5]))
    bias = balancer.expert_bias
    balancer.to(torch.bfloat16)
    for _ in range(100):
        balancer.count.copy_(torch.tensor([30000, 30001]))
        balancer.step()
    balancer.to(torch.bfloat16)
    assert balancer.expert_bias.tolist() == pytest.approx([0.6, -0.6], abs=1e-5)
    assert balancer.expert_bias is bias  # changed in place: a rebound buffer leaves stale checkpoints
    assert balancer.expert_bias.dtype == torch.float32
    assert balancer.count.dtype == torch.int64
    assert balancer.count.tolist() == [0, 0]


def test_sign_bias_hand_value_and_mean_zero():
    balancer = SignBiasBalancer(4, rate=0.1)
    balancer.count.copy_(torch.tensor([10, 2, 0, 0]))  # mean 3: signs -1, 1, 1, 1
    balancer.step()
    assert balancer.expert_bias.tolist() == pytest.approx([-0.15, 0.05, 0.05, 0.05])


def quantile_reference(selection, bias, k):
    """The quantile update in plain numpy, token by token."""
    E = selection.shape[1]
    thresholds = [sorted(row + bias, reverse=True)[k] for row in selection]
    r = np.array([[alpha - s for s in row] for alpha, row in zip(thresholds, selection, strict=True)])
    new = np.array([np.quantile(r[:, i], k / E, method="higher") for i in range(E)])
    return new - new.mean()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("T", "E", "k"), [(1, 4, 1), (7, 4, 1), (64, 8, 2), (33, 16, 5)])
def test_quantile_update_equals_the_reference(T, E, k, score_function):
    torch.manual_seed(T)
    balancer = QuantileBalancer(E, k)
    balancer.expert_bias.copy_(torch.randn(E) * 0.1)
    old = balancer.expert_bias.clone()
    mask = torch.rand(T) < 0.8
    mask[0] = True
    routing = TopKRouter(4, E, k, score_function=score_function).route_logits(torch.randn(T, E), old, mask)
    balancer.observe(routing)
    expected = quantile_reference(routing.scores_TE[mask].double().numpy(), old.double().numpy(), k)
    np.testing.assert_allclose(balancer.expert_bias, expected, atol=2e-6)


def test_quantile_with_softmax_after_top_k_moves_in_logits():
    torch.manual_seed(0)
    layer = MoELayer(8, 8, 8, 2, router=TopKRouter(8, 8, 2, softmax_after_top_k=True), balancer=QuantileBalancer(8, 2))
    x = torch.randn(4096, 8) + 1.0
    violations = [metrics.max_violation(layer(x).routing.load().numpy()) for _ in range(8)]
    assert violations[0] > 0.5
    assert violations[-1] < 0.1


def test_c32_quantiles_balance_in_one_update_and_signs_do_not():
    E, k, T = 64, 8, 8192
    generator = torch.Generator().manual_seed(0)
    offset = torch.randn(E, generator=generator)
    quantile, sign = QuantileBalancer(E, k), SignBiasBalancer(E, 1e-3)
    router = TopKRouter(4, E, k, score_function="sigmoid")

    def violation(balancer):
        logits = torch.randn(T, E, generator=generator) + offset
        routing = router.route_logits(logits, balancer.expert_bias)
        balancer.observe(routing)
        balancer.step()
        return metrics.max_violation(routing.load().numpy())

    quantiles = [violation(quantile) for _ in range(6)]
    assert quantiles[0] == pytest.approx(6.6, abs=0.3)
    assert quantiles[1] < 0.3
    assert max(quantiles[3:]) < 0.2
    signs = [violation(sign) for _ in range(200)]
    assert signs[-1] > 3


def test_quantile_refuses_all_experts():
    with pytest.raises(ValueError, match="num_experts=4, top_k=4"):
        QuantileBalancer(4, 4)


@pytest.mark.parametrize("make", [lambda: SignBiasBalancer(8), lambda: QuantileBalancer(8, 2)])
def test_eval_never_touches_the_state(make):
    layer = MoELayer(4, 8, 8, 2, balancer=make()).eval()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer(torch.randn(50, 4))
    layer.balancer.observe(layer(torch.randn(50, 4)).routing)
    for name, value in layer.state_dict().items():
        assert torch.equal(before[name], value), name


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", ["sign-bias", "quantile"])
def test_c11_recomputation_counts_once_and_routes_as_the_first_pass(use_reentrant, kind):
    torch.manual_seed(0)
    layers = [MoELayer(8, 8, 4, 2, balancer=make_balancer(kind, 4, 2)) for _ in range(2)]
    routings: dict[int, list[Routing]] = {0: [], 1: []}
    for i, layer in enumerate(layers):
        layer.router.register_forward_hook(lambda _m, _a, routing, i=i: routings[i].append(routing))
    # two micro-batches before one backward: the second has moved the quantile bias by then
    total = torch.zeros(())
    for _ in range(2):
        x = torch.randn(6, 8, requires_grad=True)
        h = checkpoint(lambda x: layers[0](x).hidden, x, use_reentrant=use_reentrant)
        total = total + layers[1](h).hidden.square().sum()
    if kind == "sign-bias":
        assert [layer.balancer.count.sum().item() for layer in layers] == [24, 24]
    bias_after_forward = [layer.balancer.expert_bias.clone() for layer in layers]
    total.backward()
    assert [len(routings[i]) for i in (0, 1)] == [4, 2]  # the checkpointed layer ran again
    for first in routings[0][:2]:
        again = [r for r in routings[0][2:] if torch.equal(r.logits_TE, first.logits_TE)]
        assert len(again) == 1
        assert torch.equal(again[0].expert_ids_TK, first.expert_ids_TK)
        assert torch.equal(again[0].expert_bias_E, first.expert_bias_E)
    if kind == "sign-bias":
        assert [layer.balancer.count.sum().item() for layer in layers] == [24, 24]
    for layer, bias in zip(layers, bias_after_forward, strict=True):
        assert torch.equal(layer.balancer.expert_bias, bias)


def test_attached_balancers_step_once_after_the_optimizer_combined_ones_too():
    layer = MoELayer(4, 8, 4, 1, balancer=make_balancer("sign-bias+aux", 4, 1, bias_rate=0.1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    handle = attach_balancers(layer, optimizer)
    layer.balancer.parts[0].count.copy_(torch.tensor([4, 0, 0, 0]))
    optimizer.step()
    assert layer.balancer.parts[0].expert_bias.tolist() == pytest.approx([-0.15, 0.05, 0.05, 0.05])
    handle.remove()
    layer.balancer.parts[0].count.copy_(torch.tensor([4, 0, 0, 0]))
    optimizer.step()
    assert layer.balancer.parts[0].count.tolist() == [4, 0, 0, 0]


def test_state_goes_on_from_a_checkpoint():
    def updates(balancer, start, stop):
        for step in range(start, stop):
            balancer.count.copy_(torch.tensor([step % 3, 5, 1, step % 5]))
            balancer.step()

    straight = SignBiasBalancer(4)
    updates(straight, 0, 20)
    first = SignBiasBalancer(4)
    updates(first, 0, 10)
    second = SignBiasBalancer(4)
    second.load_state_dict(first.state_dict())
    updates(second, 10, 20)
    assert torch.equal(straight.expert_bias, second.expert_bias)


def test_make_balancer_names():
    assert isinstance(make_balancer("none", 8, 2), NoBalancer)
    assert make_balancer("aux", 8, 2, aux_coef=0.5).coefficients == {"aux_loss": 0.5}
    combined = make_balancer("aux+z", 8, 2)
    assert isinstance(combined, CombinedBalancer)
    assert combined.name == "aux+z"
    assert combined.coefficients == {"aux_loss": 0.01, "z_loss": 0.001}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("magic", "'magic' is unknown; choose among none, aux, .*z, .*sign-bias, quantile"),
        ("none+aux", "'none' cannot be combined"),
        ("aux+aux", "one kind twice"),
        ("sign-bias+quantile", "both own the selection bias"),
    ],
)
def test_bad_balancers_are_named(names, message):
    with pytest.raises(ValueError, match=message):
        make_balancer(names, 8, 2)


@pytest.mark.parametrize("make", [SwitchAuxLoss, RouterZLoss, lambda c: SignBiasBalancer(4, c)])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bad_coefficients_are_named(make, value):
    with pytest.raises(ValueError, match=str(value)):
        make(value)
