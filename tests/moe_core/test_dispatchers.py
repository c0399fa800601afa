"""Dispatchers against `naive`, and against sums by hand: outputs and every gradient.

Shapes: T tokens, K choices a token, E experts, D width, F expert width.
"""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_core import MoELayer, TopKRouter, fused
from moe_core.balancers import attach_balancers, make_balancer
from moe_core.dispatchers import (
    DISPATCHERS,
    make_dispatcher,
    masked_dispatch,
    naive_dispatch,
    sort_assignments,
    sorted_dispatch,
)
from moe_core.experts import ExpertBank, SwiGLUExpert
from moe_core.routing import Routing

NAMES = tuple(DISPATCHERS)
FAST = ("masked", "sorted", "grouped")
ACTIVATIONS = ("swiglu", "gelu", "situ-glu", "clamped-glu")


def routing_of(ids, num_experts, weights=None, kept=None):
    """A Routing of these ids (T, K) and weights (T, K), random by default; nothing else in it is looked at."""
    ids = torch.as_tensor(ids, dtype=torch.int64)
    ids = ids[:, None] if ids.ndim == 1 else ids
    weights = torch.rand(ids.shape) if weights is None else torch.as_tensor(weights).view(ids.shape)
    zeros = torch.zeros(len(ids), num_experts)
    return Routing(zeros, zeros, ids, weights, kept_TK=kept)


def random_routing(T, K, E, dtype=torch.float32):
    """Distinct experts in each row, some -1, some dropped; the last expert stays idle."""
    ids = torch.stack([torch.randperm(max(K, E - 1))[:K] for _ in range(T)]) if T else torch.zeros(0, K)
    ids = torch.where(torch.rand(T, K) < 0.1, -1, ids)
    return replace(routing_of(ids, E, kept=torch.rand(T, K) < 0.9), weights_TK=torch.rand(T, K, dtype=dtype))


def run(dispatch, x, routing, experts, loss=None):
    """Output and every gradient (input, weights, expert parameters; None stays None)."""
    x = x.clone().requires_grad_()
    weights = routing.weights_TK.clone().requires_grad_()
    experts.zero_grad()
    y = dispatch(x, replace(routing, weights_TK=weights), experts)
    if y.requires_grad:  # without a single assignment there may be no graph at all
        loss = loss or (lambda y: (y * torch.arange(1, y.numel() + 1).view_as(y).cos()).sum())
        loss(y).backward()
    return y.detach(), [x.grad, weights.grad, *(p.grad for p in experts.parameters())]


def assert_same(actual, expected, rtol=1e-5, atol=1e-5):
    """Equal outputs and gradients, where no gradient is as good as zeros."""
    torch.testing.assert_close(actual[0], expected[0], rtol=rtol, atol=atol)
    for ours, reference in zip(actual[1], expected[1], strict=True):
        if ours is None or reference is None:
            assert all(g is None or not g.any() for g in (ours, reference))
        else:
            torch.testing.assert_close(ours, reference, rtol=rtol, atol=atol)


@settings(deadline=None, max_examples=60)
@given(
    T=st.integers(0, 17),
    E=st.integers(1, 6),
    data=st.data(),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    with_drops=st.booleans(),
    width=st.sampled_from([8, 5]),  # 5: strides that grouped_mm refuses
    chunk_bytes=st.sampled_from([0, 200, fused.CHUNK_BYTES]),  # one expert a chunk, some, all
)
def test_all_equal_naive_with_all_gradients(T, E, data, activation, bias, with_drops, width, chunk_bytes):
    K = data.draw(st.integers(1, E))
    # a few favourites, so that experts with 0, 1 and many tokens all occur; -1 = no route
    row = st.lists(st.integers(-1, E - 1), min_size=K, max_size=K)
    ids = data.draw(st.lists(row, min_size=T, max_size=T))
    torch.manual_seed(T * 31 + E)
    kept = torch.rand(T, K) < 0.7 if with_drops else None
    routing = routing_of(torch.tensor(ids, dtype=torch.int64).view(T, K), E, kept=kept)
    experts = ExpertBank(E, width, 4, activation, bias=bias)
    x = torch.randn(T, width)
    expected = run(naive_dispatch, x, routing, experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "CHUNK_BYTES", chunk_bytes)
        for name in FAST:
            assert_same(run(DISPATCHERS[name], x, routing, experts), expected)
        assert_same(run(sorted_dispatch, x, routing, Called(experts)), expected)


class Called(nn.ModuleList):
    """The same experts as a plain list of networks: no fused pass for them."""


@pytest.mark.parametrize("name", NAMES)
def test_output_equals_a_sum_by_hand(name):
    routing = routing_of([[2, 0], [0, -1]], 3, [[0.75, 0.25], [1.0, 0.0]])
    experts = [lambda x: x + 1, lambda x: x * math.nan, lambda x: x * 10]
    y = DISPATCHERS[name](torch.tensor([[1.0, 2.0], [3.0, 4.0]]), routing, experts)
    assert y.tolist() == [[0.75 * 10 + 0.25 * 2, 0.75 * 20 + 0.25 * 3], [4.0, 5.0]]


def test_the_sort_of_the_worked_example():
    assignments = sort_assignments(torch.tensor([[2, 0], [0, 2], [2, 1]]), 3)
    assert assignments.order_N.tolist() == [1, 2, 5, 0, 3, 4]
    assert (assignments.order_N // 2).tolist() == [0, 1, 2, 0, 1, 2]
    assert assignments.load_E.tolist() == [2, 1, 3]
    assert assignments.load_E.cumsum(0).tolist() == [2, 3, 6]
    with_gaps = sort_assignments(torch.tensor([[-1, 1], [0, -1]]), 3)
    assert with_gaps.order_N.tolist() == [2, 1, 0, 3]  # those without an expert come last
    assert with_gaps.load_E.tolist() == [1, 1, 0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)  # grouped_mm knows no float64: falls back to sorted
def test_gradients_are_derivatives(name, activation, bias):
    torch.manual_seed(0)
    experts = ExpertBank(4, 3, 2, activation, bias=bias).double()
    for p in experts.parameters():
        nn.init.normal_(p)
    routing = random_routing(6, 2, 4, torch.float64)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weights = routing.weights_TK.requires_grad_()
    used = list(experts[0].parameters())

    def output(x, weights, *_):
        return DISPATCHERS[name](x, replace(routing, weights_TK=weights), experts)

    assert torch.autograd.gradcheck(output, (x, weights, *used))


@pytest.mark.parametrize("name", ["naive", "masked"])
def test_second_derivatives(name):
    torch.manual_seed(0)
    experts = ExpertBank(3, 3, 2).double()
    routing = random_routing(4, 2, 3, torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: DISPATCHERS[name](x, routing, experts), (x,))


def test_the_fused_pass_refuses_second_derivatives_instead_of_getting_them_wrong():
    x = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(
        sorted_dispatch(x, routing_of([0, 1, 0, 1], 2), ExpertBank(2, 8, 8)).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_within_its_precision(name, activation):
    torch.manual_seed(0)
    experts = ExpertBank(4, 16, 8, activation, bias=True)
    routing, x = random_routing(40, 2, 4), torch.randn(40, 16)
    experts.to(torch.bfloat16).float()  # the same rounded weights in both
    x = x.bfloat16().float()
    expected = run(naive_dispatch, x, routing, experts)
    actual = run(DISPATCHERS[name], x.bfloat16(), routing, experts.to(torch.bfloat16))
    assert actual[0].dtype == torch.bfloat16
    assert actual[1][1].dtype == torch.float32  # the router's weights keep theirs
    for ours, reference in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
        if reference is not None:
            error = (ours.float() - reference).abs().max() / reference.abs().max()
            assert error < 0.02  # 8 bits of mantissa, a few roundings in a row


@pytest.mark.parametrize("name", NAMES)
def test_autocast_gives_what_naive_gives_there(name):
    torch.manual_seed(0)
    experts, routing, x = ExpertBank(4, 16, 8), random_routing(40, 2, 4), torch.randn(40, 16)
    exact = run(naive_dispatch, x, routing, experts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = run(naive_dispatch, x, routing, experts)
        actual = run(DISPATCHERS[name], x, routing, experts)
    assert actual[0].dtype == torch.float32
    assert not torch.equal(actual[0], exact[0])  # it really ran in bfloat16
    assert_same(actual, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_activation_checkpointing_changes_nothing(name, use_reentrant):
    torch.manual_seed(0)
    experts, routing, x = ExpertBank(4, 8, 8, "situ-glu", bias=True), random_routing(30, 2, 4), torch.randn(30, 8)
    dispatch = make_dispatcher(name)

    def recomputed(x, routing, experts):
        def again(x, weights):
            return dispatch(x, replace(routing, weights_TK=weights), experts)

        return checkpoint(again, x, routing.weights_TK, use_reentrant=use_reentrant)

    plain, again = run(dispatch, x, routing, experts), run(recomputed, x, routing, experts)
    assert torch.equal(plain[0], again[0])
    for a, b in zip(plain[1], again[1], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_under_torch_compile_the_dispatch_runs_eagerly_and_is_not_compiled_for_every_load(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = MoELayer(8, 8, 4, 2, dispatcher=name)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True)
    graphs = []
    for _ in range(5):
        x = torch.randn(24, 8)
        expected = layer(x).hidden
        torch.testing.assert_close(compiled(x).hidden, expected)
        layer.zero_grad()
        expected.square().sum().backward()
        grads = [p.grad for p in layer.parameters()]
        layer.zero_grad()
        compiled(x).hidden.square().sum().backward()
        for p, grad in zip(layer.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, grad)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1]  # other loads, same graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time(name):
    torch.manual_seed(0)
    experts, routing, x = ExpertBank(16, 32, 16), random_routing(200, 4, 16), torch.randn(200, 32)
    first, second = (run(DISPATCHERS[name], x, routing, experts) for _ in range(2))
    assert torch.equal(first[0], second[0])
    for a, b in zip(first[1], second[1], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.mean(), lambda y: y.t().sum(0).sum()])
@pytest.mark.parametrize("name", NAMES)
def test_expanded_gradients(name, loss):
    torch.manual_seed(0)
    experts, routing, x = ExpertBank(4, 8, 8), random_routing(30, 2, 4), torch.randn(30, 8)
    assert_same(run(DISPATCHERS[name], x, routing, experts, loss), run(naive_dispatch, x, routing, experts, loss))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ids", [torch.zeros(0, 2, dtype=torch.int64), torch.full((3, 2), -1)], ids=["T0", "none"])
def test_no_tokens_and_no_routes_give_zeros(name, ids):
    x = torch.randn(len(ids), 8, requires_grad=True)
    experts = ExpertBank(3, 8, 8, zero_idle_gradients=True)
    y = DISPATCHERS[name](x, routing_of(ids, 3), experts)
    assert y.shape == x.shape
    assert not y.any()
    y.sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in experts.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_without_gradients_and_with_some_frozen(name):
    torch.manual_seed(0)
    experts, routing, x = ExpertBank(4, 8, 8, bias=True), random_routing(30, 2, 4), torch.randn(30, 8)
    expected = run(naive_dispatch, x, routing, experts)
    with torch.no_grad():
        y = DISPATCHERS[name](x, routing, experts)
    assert not y.requires_grad
    torch.testing.assert_close(y, expected[0])
    for expert in experts:
        expert.gate_up.requires_grad_(False)
    actual = run(DISPATCHERS[name], x, routing, experts)
    for (parameter, _), ours, reference in zip(
        [("x", 0), ("weights", 0), *experts.named_parameters()], actual[1], expected[1], strict=True
    ):
        if parameter.endswith("gate_up"):
            assert ours is None
        elif reference is not None:
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


@pytest.fixture
def grouped_calls(monkeypatch):
    """How often the real grouped_mm ran."""
    calls = []
    real = nn.functional.grouped_mm
    monkeypatch.setattr(nn.functional, "grouped_mm", lambda *a, **k: calls.append(1) or real(*a, **k))
    return calls


@pytest.mark.parametrize(
    ("case", "runs"),
    [
        ("float32", True),
        ("bfloat16", True),
        ("autocast", True),
        ("idle-tail", True),
        ("float64", False),
        ("width 6", False),
        ("no tokens", False),
        ("a list", False),
        ("mixed experts", False),
        ("a hooked expert", False),
        ("dropout", False),
    ],
)
def test_grouped_runs_where_it_can_and_falls_back_silently(case, runs, grouped_calls, recwarn):
    torch.manual_seed(0)
    width, T = (6 if case == "width 6" else 8), (0 if case == "no tokens" else 20)
    experts = ExpertBank(4, width, 8, dropout=0.5 if case == "dropout" else 0.0)
    routing, x = random_routing(T, 2, 4), torch.randn(T, width)
    if case == "idle-tail":  # most rows past the last offset, which grouped_mm leaves uninitialised
        routing = replace(routing, expert_ids_TK=torch.where(torch.arange(T)[:, None] < 3, routing.expert_ids_TK, -1))
    if case in ("float64", "bfloat16"):
        dtype = getattr(torch, case)
        experts, x = experts.to(dtype), x.to(dtype)
    if case == "a list":
        experts = Called(experts)
    if case == "mixed experts":
        experts[2] = nn.Linear(8, 8)
    called = []
    if case == "a hooked expert":
        experts[1].register_forward_hook(lambda *_: called.append(1))
    with torch.autocast("cpu", dtype=torch.bfloat16) if case == "autocast" else nullcontext():
        torch.manual_seed(1)
        actual = run(DISPATCHERS["grouped"], x, routing, experts)
        assert bool(grouped_calls) == runs
        if case == "a hooked expert":
            assert called
        torch.manual_seed(1)
        expected = run(masked_dispatch if case == "dropout" else naive_dispatch, x, routing, experts)
    loose = {"rtol": 0.05, "atol": 0.05} if case in ("bfloat16", "autocast") else {}
    assert_same(actual, expected, **loose)
    assert not recwarn.list


@pytest.mark.parametrize("name", NAMES)
def test_hooks_on_single_experts_are_called(name):
    experts = ExpertBank(3, 8, 8)
    rows = []
    experts[1].register_forward_hook(lambda _m, args, _out: rows.append(len(args[0])))
    DISPATCHERS[name](torch.randn(5, 8), routing_of([0, 1, 1, 0, 1], 3), experts)
    assert sum(rows) == 3


@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_idle_experts_have_no_gradient_and_the_optimizer_leaves_them_alone(name):
    torch.manual_seed(0)
    experts = ExpertBank(3, 4, 8, bias=True)
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, weight_decay=0.1)
    before = [p.clone() for p in experts[1].parameters()]
    make_dispatcher(name)(torch.randn(5, 4), routing_of([0, 2, 0, 0, 2], 3), experts).sum().backward()
    optimizer.step()
    assert all(p.grad is None for p in experts[1].parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, experts[1].parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_zero_gradients_on_request(name):
    torch.manual_seed(0)
    experts, routing, x = ExpertBank(4, 8, 8, bias=True), random_routing(30, 2, 4), torch.randn(30, 8)
    expected = run(naive_dispatch, x, routing, experts)
    experts.zero_idle_gradients = True
    actual = run(DISPATCHERS[name], x, routing, experts)
    assert all(p.grad is not None and not p.grad.any() for p in experts[3].parameters())
    assert_same(actual, expected)


def adamw_by_hand(weight, grads, lr, decay):
    """AdamW (arXiv 1711.05101) over these gradients; None leaves everything as it is, the step count too."""
    weight, m, v, t = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight), 0
    for grad in grads:
        if grad is None:
            continue
        t += 1
        weight *= 1 - lr * decay
        m = 0.9 * m + 0.1 * grad
        v = 0.999 * v + 0.001 * grad**2
        weight -= lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize("zeros", [False, True], ids=["none", "zeros"])
@pytest.mark.parametrize("name", NAMES)
def test_adamw_with_an_idle_then_reactivated_expert(name, zeros):
    torch.manual_seed(0)
    experts = ExpertBank(2, 4, 8, zero_idle_gradients=zeros)
    start = experts[1].down.detach().clone()
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.05, weight_decay=0.1)
    grads = []
    for step in range(6):
        idle = step in (2, 3)
        routing = routing_of([0, 0, 0] if idle else [0, 1, 1], 2)
        optimizer.zero_grad()
        DISPATCHERS[name](torch.randn(3, 4), routing, experts).square().sum().backward()
        grads.append(None if experts[1].down.grad is None else experts[1].down.grad.clone())
        optimizer.step()
        if idle:
            assert grads[-1] is None if not zeros else not grads[-1].any()
    assert optimizer.state[experts[1].down]["step"] == (6 if zeros else 4)
    torch.testing.assert_close(experts[1].down.detach(), adamw_by_hand(start, grads, 0.05, 0.1))


@pytest.fixture
def one_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_ddp_waits_for_every_gradient(name, one_process_group):
    def two_steps(zeros):
        experts = ExpertBank(3, 4, 8, zero_idle_gradients=zeros)
        layer = MoELayer(4, 8, 3, 1, experts=experts, dispatcher=name)
        nn.init.zeros_(layer.router.weight)  # all to expert 0
        model = nn.parallel.DistributedDataParallel(layer)
        for _ in range(2):
            model(torch.randn(5, 4)).hidden.sum().backward()
        return [p.grad for p in experts[1].parameters()]

    assert all(grad is not None and not grad.any() for grad in two_steps(zeros=True))
    if name in ("naive", "masked"):  # in the others every parameter takes part, used or not
        with pytest.raises(RuntimeError, match="finished reduction"):
            two_steps(zeros=False)


ROUTERS = {
    "softmax": {},
    "sigmoid": {"score_function": "sigmoid", "routed_scaling_factor": 2.5},
    "softmax after": {"softmax_after_top_k": True, "bias": True},
    "not renormalised": {"renormalize": False},
}


@settings(deadline=None, max_examples=30)
@given(
    router=st.sampled_from(sorted(ROUTERS)),
    balancer=st.sampled_from(["none", "aux", "aux+z", "sign-bias", "quantile", "sign-bias+aux"]),
    activation=st.sampled_from(ACTIVATIONS),
    name=st.sampled_from([*FAST, "auto"]),
    capacity_factor=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 9),
)
def test_a_layer_trains_as_with_naive(router, balancer, activation, name, capacity_factor, seed):
    def trained(dispatcher):
        torch.manual_seed(seed)
        layer = MoELayer(
            8,
            8,
            6,
            2,
            router=TopKRouter(8, 6, 2, **ROUTERS[router]),
            balancer=make_balancer(balancer, 6, 2, bias_rate=0.01),
            activation=activation,
            num_shared_experts=1,
            capacity_factor=capacity_factor,
            dispatcher=dispatcher,
        )
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        attach_balancers(layer, optimizer)
        outputs = []
        for _ in range(3):
            out = layer(torch.randn(3, 7, 8), token_mask=torch.rand(3, 7) < 0.8)
            (out.hidden.square().mean() + sum(out.losses.values())).backward()
            grads = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in layer.parameters()]
            outputs.append((out.hidden.detach(), *grads, out.routing.load(), *layer.balancer.state_dict().values()))
            outputs[-1] = tuple(t.clone() for t in outputs[-1])
            optimizer.step()
            optimizer.zero_grad()
        return outputs, layer.state_dict()

    torch.testing.assert_close(trained(name), trained("naive"), rtol=1e-3, atol=1e-5)


def test_unknown_dispatcher_is_named():
    with pytest.raises(ValueError, match="'magic'.*'auto', 'naive', 'masked', 'sorted', 'grouped'"):
        make_dispatcher("magic")


def test_swapped_experts_of_another_width_are_called_one_by_one():
    torch.manual_seed(0)
    experts = ExpertBank(3, 8, 8)
    experts[1] = SwiGLUExpert(8, 12)
    x, routing = torch.randn(10, 8), random_routing(10, 2, 3)
    expected = run(naive_dispatch, x, routing, experts)
    for name in FAST:
        assert_same(run(DISPATCHERS[name], x, routing, experts), expected)
