"""State of balancers: saved and loaded, cast, copied, evaluated, recomputed."""

import copy
import io
import math
import shutil

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_core import MoELayer, MoETransformer, MoETransformerConfig, SignBiasBalancer
from moe_core.balancers import attach_balancers, make_balancer

STATEFUL = [
    "sign-bias",
    "quantile",
    "quantile-step",
    "global-aux",
    "sign-bias+global-aux",
    "quantile-step+sequence-aux",
]
D, E, K = 6, 8, 2


class Training:
    """A layer under AdamW with two micro-batches to a step; batch n is the same in every life."""

    def __init__(self, kind):
        torch.manual_seed(0)
        self.layer = MoELayer(D, 8, E, K, balancer=make_balancer(kind, E, K, bias_rate=0.01))
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-2)
        attach_balancers(self.layer, self.optimizer)

    def micro_batch(self, n):
        x = torch.randn(2, 20, D, generator=torch.Generator().manual_seed(n))
        out = self.layer(x)
        (out.hidden.square().mean() + sum(out.losses.values())).backward()
        if n % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self):
        file = io.BytesIO()
        gradients = [p.grad for p in self.layer.parameters()]
        torch.save([self.layer.state_dict(), self.optimizer.state_dict(), gradients], file)
        file.seek(0)
        return file

    def load(self, file):
        layer, optimizer, gradients = torch.load(file)
        self.layer.load_state_dict(layer)
        self.optimizer.load_state_dict(optimizer)
        for parameter, gradient in zip(self.layer.parameters(), gradients, strict=True):
            parameter.grad = gradient


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("at", [4, 5], ids=["between-steps", "within-a-step"])
def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(kind, at):
    straight = Training(kind)
    for n in range(8):
        straight.micro_batch(n)
        if n == at - 1:
            saved = straight.save()
    resumed = Training(kind)
    resumed.micro_batch(100)  # state of its own, which loading replaces
    resumed.load(saved)
    for n in range(at, 8):
        resumed.micro_batch(n)
    for name, value in straight.layer.state_dict().items():
        assert torch.equal(value, resumed.layer.state_dict()[name]), name
    assert any("balancer" in name for name in straight.layer.state_dict())


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_leave_biases_float32_and_counters_int64_and_in_place(kind, dtype):
    training = Training(kind)
    training.micro_batch(0)
    state = dict(training.layer.balancer.named_buffers())
    assert state
    before = {name: value.clone() for name, value in state.items()}
    training.layer.to(dtype)
    for name, value in training.layer.balancer.named_buffers():
        assert value is state[name]
        assert torch.equal(value, before[name])
        assert value.dtype == (torch.float32 if "bias" in name else torch.int64), name
    assert training.layer.router.weight.dtype == dtype


@pytest.mark.parametrize("kind", STATEFUL)
def test_updates_are_in_place(kind):
    training = Training(kind)
    held = training.layer.state_dict()  # shares storage with the buffers
    for n in range(4):
        training.micro_batch(n)
    for name, value in training.layer.balancer.named_buffers(prefix="balancer"):
        assert held[name].data_ptr() == value.data_ptr()


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_copy_goes_its_own_way(kind):
    training = Training(kind)
    training.micro_batch(0)
    twin = copy.deepcopy(training.layer)
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    training.micro_batch(1)
    training.micro_batch(2)
    for name, value in twin.state_dict().items():
        assert torch.equal(value, before[name]), name
    twin(torch.randn(2, 20, D))
    assert any(not torch.equal(value, before[name]) for name, value in twin.state_dict().items())


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_and_generation_leave_the_state_alone(kind, grad):
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 16, "num_experts": E, "top_k": K}
    model = MoETransformer(MoETransformerConfig(**shape, balancer=kind))
    ids = torch.randint(50, (2, 9))
    model(ids, labels=ids)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    with torch.set_grad_enabled(grad):
        model(ids, labels=ids)
        for _ in range(3):  # generate token by token
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", STATEFUL)
def test_c11_checkpointing_changes_neither_state_nor_gradients(kind, use_reentrant):
    def run(wrap):
        torch.manual_seed(0)
        layer = MoELayer(D, 8, E, K, balancer=make_balancer(kind, E, K))
        total = torch.zeros(())
        # with an invalid row in each: a NaN must not make all micro-batches look alike
        for _ in range(3):
            x = torch.randn(2, 20, D)
            x[1, 3] = math.nan

            def forward(x):
                out = layer(x)
                return out.hidden[x.isfinite()].square().sum() + 10 * sum(out.losses.values())

            total = total + wrap(forward, x.requires_grad_())
        state = {name: value.clone() for name, value in layer.state_dict().items()}
        total.backward()
        for name, value in layer.state_dict().items():
            assert torch.equal(value, state[name]), name  # the backward pass moved nothing
        return state, [p.grad for p in layer.parameters()]

    plain_state, plain_gradients = run(lambda forward, x: forward(x))
    state, gradients = run(lambda forward, x: checkpoint(forward, x, use_reentrant=use_reentrant))
    for name, value in plain_state.items():
        assert torch.equal(value, state[name]), name
    for ours, plain in zip(gradients, plain_gradients, strict=True):
        assert (ours is None) == (plain is None)
        if plain is not None:
            torch.testing.assert_close(ours, plain)


def test_a_skipped_optimizer_step_leaves_the_sign_bias_and_keeps_counting():
    layer = MoELayer(D, 8, E, K, balancer=SignBiasBalancer(E))
    attach_balancers(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for _ in range(2):  # no optimizer.step() between them
        layer(torch.randn(10, D))
    assert layer.balancer.count.sum() == 40
    assert layer.balancer.expert_bias.eq(0).all()


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("sign-bias+sequence-aux", "eager"),
        ("quantile", "eager"),
        ("global-aux+z", "eager"),
        pytest.param("quantile+global-aux", "inductor", marks=[needs_compiler, pytest.mark.slow]),
    ],
)
def test_torch_compile_leaves_state_and_gradients_as_they_are(kind, backend):
    """The decisions are compiled; where a balancer's memory is asked, the graph breaks and runs as it is."""
    torch.manual_seed(0)
    plain = MoELayer(D, 8, E, K, balancer=make_balancer(kind, E, K))
    twin = copy.deepcopy(plain)
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend=backend)
    for n in range(5):
        x = torch.randn(2, 10, D)
        for run in (plain, compiled):
            out = run(x)
            (out.hidden.square().sum() + sum(out.losses.values())).backward()
        if n % 2:
            plain.balancer.step()
            twin.balancer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], value, msg=name)
    torch.testing.assert_close(twin.router.weight.grad, plain.router.weight.grad)
