"""The quantile balancer's update modes and its histogram, against a slow reference.

Shapes: T tokens, E experts, K choices a token.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core import MoELayer, QuantileBalancer, TopKRouter, metrics
from moe_core.balancers import make_balancer


def r_values(routing):
    """alpha_t - s of every token, in plain numpy."""
    scores = routing.scores_TE.double().numpy()
    bias = routing.expert_bias_E.double().numpy()
    alpha = np.array([sorted(row + bias, reverse=True)[routing.top_k] for row in scores])
    return alpha[:, None] - scores


def quantile(r, k):
    E = r.shape[1]
    return np.array([np.sort(r[:, i])[math.ceil(k * (len(r) - 1) / E)] for i in range(E)])


def centred(bias):
    return bias - bias.mean()


def route(balancer, T, seed, offset=0.0, score_function="softmax"):
    torch.manual_seed(seed)
    E = len(balancer.expert_bias)
    router = TopKRouter(4, E, balancer.top_k, score_function=score_function)
    return router.route_logits(torch.randn(T, E) + offset, balancer.expert_bias)


def test_step_mode_waits_for_the_optimizer_and_takes_the_mean_of_the_micro_batches():
    balancer = QuantileBalancer(8, 2, update="step")
    balancer.expert_bias.copy_(torch.linspace(-0.1, 0.1, 8))
    before = balancer.expert_bias.clone()
    expected = []
    for seed, T in ((0, 20), (1, 33)):  # of unequal size: each counts once
        routing = route(balancer, T, seed)
        balancer.observe(routing)
        expected.append(centred(quantile(r_values(routing), 2)))
    assert torch.equal(balancer.expert_bias, before)
    balancer.step()
    np.testing.assert_allclose(balancer.expert_bias, np.mean(expected, axis=0), atol=1e-6)
    after = balancer.expert_bias.clone()
    balancer.step()  # without a forward in between nothing moves
    assert torch.equal(balancer.expert_bias, after)


def test_step_mode_ignores_micro_batches_without_tokens():
    balancer = QuantileBalancer(8, 2, update="step")
    routing = route(balancer, 20, 0)
    balancer.observe(routing)
    balancer.observe(route(balancer, 0, 0))
    balancer.step()
    np.testing.assert_allclose(balancer.expert_bias, centred(quantile(r_values(routing), 2)), atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    T=st.integers(1, 60),
    E=st.integers(2, 9),
    seed=st.integers(0, 99),
    num_bins=st.sampled_from([1, 7, 256]),
    score_function=st.sampled_from(["softmax", "sigmoid"]),
    data=st.data(),
)
def test_the_histogram_is_within_one_bin_of_the_exact_quantile(T, E, seed, num_bins, score_function, data):
    K = data.draw(st.integers(1, E - 1))
    balancer = QuantileBalancer(E, K, method="histogram", num_bins=num_bins)
    torch.manual_seed(seed)
    balancer.expert_bias.copy_(torch.randn(E) * 0.1)
    routing = route(balancer, T, seed, score_function=score_function)
    balancer.observe(routing)
    r = r_values(routing)
    bin_width = (r.max() - r.min()) / num_bins
    exact = centred(quantile(r, K))
    np.testing.assert_allclose(balancer.expert_bias, exact, atol=bin_width + 1e-6)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_the_histogram_balances_scores_of_any_span(score_function):
    torch.manual_seed(0)
    E, K, T = 64, 8, 2048
    offset = torch.randn(E)
    balancer = QuantileBalancer(E, K, method="histogram")
    violations = []
    for seed in range(4):
        routing = route(balancer, T, seed, offset, score_function)  # softmax scores span about a hundredth
        violations.append(metrics.max_violation(routing.load().numpy()))
        balancer.observe(routing)
    assert violations[0] > 3
    assert violations[-1] < 0.4  # sampling noise of 256 expected assignments included


@pytest.mark.parametrize("method", ["exact", "histogram"])
def test_impossible_experts_leave_every_bias_finite(method):
    torch.manual_seed(0)
    balancer = QuantileBalancer(6, 2, method=method)
    logits = torch.randn(40, 6)
    logits[:, 3] = -math.inf  # never possible
    logits[:20, 4] = -math.inf
    logits[0, 1:] = -math.inf  # too few left for a choice: an invalid row
    routing = TopKRouter(4, 6, 2).route_logits(logits, balancer.expert_bias)
    balancer.observe(routing)
    assert balancer.expert_bias.isfinite().all()
    assert balancer.expert_bias.abs().sum() > 0


@pytest.mark.parametrize("kind", ["quantile", "quantile-step"])
def test_a_forward_without_gradients_updates_too(kind):
    layer = MoELayer(4, 8, 8, 2, balancer=make_balancer(kind, 8, 2))
    with torch.no_grad():
        layer(torch.randn(50, 4))
    layer.balancer.step()
    assert layer.balancer.expert_bias.abs().sum() > 0


def test_the_order_is_select_then_update():
    layer = MoELayer(4, 8, 8, 2, balancer=QuantileBalancer(8, 2))
    layer.balancer.expert_bias.copy_(torch.linspace(-0.1, 0.1, 8))
    old = layer.balancer.expert_bias.clone()
    out = layer(torch.randn(50, 4))
    assert torch.equal(out.routing.expert_bias_E, old)
    assert not torch.equal(layer.balancer.expert_bias, old)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": "batch"}, "update='batch'.*'forward', 'step'"),
        ({"method": "mean"}, "method='mean'.*'exact', 'histogram'"),
        ({"num_bins": 0}, "num_bins=0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        QuantileBalancer(8, 2, **options)
