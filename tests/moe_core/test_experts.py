"""Experts against values by hand, numerical derivatives and autograd.

Shapes: N rows, D width, F expert width, H width of the first product.
"""

import copy
import math

import pytest
import torch
from torch.nn import functional as F_

from moe_core.experts import ExpertBank, FeedForward, make_expert

ACTIVATIONS = ("swiglu", "gelu", "situ-glu", "clamped-glu")


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def clamped(gate, up):
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return (up + 1) * gate * sigmoid(1.702 * gate)


BY_HAND = {
    "swiglu": lambda g, u: g * sigmoid(g) * u,
    "situ-glu": lambda g, u: 4 * math.tanh(g / 4) * sigmoid(g) * 25 * math.tanh(u / 25),
    "clamped-glu": clamped,
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", sorted(BY_HAND))
@pytest.mark.parametrize("x", [(1.0, -2.0), (-0.5, 3.0), (9.0, -9.0), (-30.0, 40.0)])
def test_gated_experts_by_hand(activation, bias, x):
    expert = make_expert(2, 1, activation, bias=bias)
    with torch.no_grad():
        expert.gate_up.copy_(torch.eye(2))  # gate = first entry, up = second
        expert.down.copy_(torch.tensor([[1.0], [2.0]]))
        if bias:
            expert.gate_up_bias.copy_(torch.tensor([0.5, -0.25]))
            expert.down_bias.copy_(torch.tensor([10.0, 20.0]))
    gate, up = (x[0] + 0.5, x[1] - 0.25) if bias else x
    a = BY_HAND[activation](gate, up)
    expected = [a + 10, 2 * a + 20] if bias else [a, 2 * a]
    assert expert(torch.tensor([x])).detach()[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_gelu_by_hand():
    expert = make_expert(2, 1, "gelu", bias=True)
    with torch.no_grad():
        expert.up.copy_(torch.tensor([[1.0, 0.0]]))
        expert.up_bias.fill_(-1.0)
        expert.down.copy_(torch.tensor([[1.0], [2.0]]))
        expert.down_bias.fill_(0.5)
    gelu_1 = 0.5 * (1 + math.erf(1 / math.sqrt(2)))
    assert expert(torch.tensor([[2.0, 7.0]])).detach()[0].tolist() == pytest.approx([gelu_1 + 0.5, 2 * gelu_1 + 0.5])


def test_situ_glu_is_bounded_and_close_to_swiglu_near_zero():
    situ, swiglu = make_expert(4, 4, "situ-glu"), make_expert(4, 4, "swiglu")
    near, far = torch.randn(50, 8) * 0.05, torch.randn(50, 8) * 1e4
    torch.testing.assert_close(situ.activate(near), swiglu.activate(near), rtol=1e-3, atol=1e-5)
    assert situ.activate(far).abs().max() <= 100  # 4 * 25


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_and_its_derivative(activation):
    torch.manual_seed(0)
    expert = make_expert(3, 5, activation).double()
    h = torch.randn(7, expert.weights()[0].shape[0], dtype=torch.float64).mul_(3).requires_grad_()
    assert torch.autograd.gradcheck(expert.activate, (h,))
    da = torch.randn(7, 5, dtype=torch.float64)
    a = expert.activate(h)
    (expected,) = torch.autograd.grad(a, h, da)
    with torch.no_grad():
        again, dh = expert.activate_backward(h.detach(), da.clone())
    torch.testing.assert_close(again, a.detach())
    torch.testing.assert_close(dh, expected)


@pytest.mark.parametrize(
    ("activation", "bias", "names"),
    [
        ("swiglu", False, ["gate_up", "down"]),
        ("gelu", False, ["up", "down"]),
        ("clamped-glu", True, ["gate_up", "down", "gate_up_bias", "down_bias"]),
        ("gelu", True, ["up", "down", "up_bias", "down_bias"]),
    ],
)
def test_parameters(activation, bias, names):
    expert = make_expert(6, 10, activation, bias=bias)
    assert [name for name, _ in expert.named_parameters()] == names
    matrices = 2 if activation == "gelu" else 3
    assert sum(p.numel() for p in expert.parameters()) == matrices * 60 + (bias * ((matrices - 1) * 10 + 6))


def test_dropout_draws_in_training_only_and_keeps_the_mean():
    torch.manual_seed(0)
    expert = make_expert(8, 8, "gelu", dropout=0.25)
    x = torch.randn(1, 8).expand(4000, 8)
    exact = expert.eval()(x)
    dropped = expert.train()(x)
    assert dropped.eq(0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    torch.testing.assert_close(dropped.mean(0), exact[0], rtol=0.1, atol=0.02)
    torch.testing.assert_close(dropped[dropped != 0], (exact / 0.75)[dropped != 0])


def test_the_bank_says_what_its_experts_have_in_common():
    bank = ExpertBank(3, 4, 6, "situ-glu")
    assert bank.kind is type(bank[0])
    assert ExpertBank(0, 4, 6).kind is None
    dropping = ExpertBank(3, 4, 6, dropout=0.1)
    assert (dropping.kind, dropping.eval().kind) == (None, type(dropping[0]))
    for change in (
        lambda b: b[1].register_forward_hook(lambda *_: None),
        lambda b: b[1].register_full_backward_hook(lambda *_: None),
        lambda b: b.__setitem__(1, make_expert(4, 6, "swiglu")),
        lambda b: b.__setitem__(1, make_expert(4, 8, "situ-glu")),
        lambda b: b.__setitem__(1, make_expert(4, 6, "situ-glu", bias=True)),
        lambda b: torch.nn.utils.parametrize.register_parametrization(b[1], "down", torch.nn.Identity()),
    ):
        changed = copy.deepcopy(bank)
        change(changed)
        assert changed.kind is None


def test_an_expert_with_a_forward_of_its_own_is_called():
    class Doubled(FeedForward):
        activation = "swiglu"

        @classmethod
        def activate(cls, h):
            return F_.silu(h[..., : h.shape[-1] // 2])

        def forward(self, x):
            return 2 * super().forward(x)

    bank = ExpertBank(2, 4, 6)
    for e in range(2):
        bank[e] = Doubled(4, 6)
    assert bank.kind is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "relu"}, "'relu'.*'swiglu', 'gelu', 'situ-glu', 'clamped-glu'"),
        ({"d_model": 0}, "d_model=0"),
        ({"d_ff": -1}, "d_ff=-1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": math.nan}, "dropout=nan"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_expert(**{"d_model": 4, "d_ff": 6, **arguments})
