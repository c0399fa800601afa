"""The aux loss at sequence and global level and in its soft form, against hand values and a slow reference.

Shapes: B sequences, S tokens in each, E experts, K choices a token.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from moe_core import MoELayer, RouterZLoss, SwitchAuxLoss, TopKRouter
from moe_core.balancers import make_balancer


def route(logits, top_k, mask=None, score_function="softmax"):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    router = TopKRouter(4, logits.shape[-1], top_k, score_function=score_function)
    return router.route_logits(logits, token_mask=None if mask is None else torch.as_tensor(mask))


ONTO_0, ONTO_1 = [2.0, 0.0], [0.0, 2.0]
COLLAPSED = 1.7616  # E f_0 P_0 = 2 * 1 * e^2 / (e^2 + 1)


@pytest.mark.parametrize(
    ("rows", "mask", "num_sequences", "expected"),
    [
        ([ONTO_0, ONTO_0, ONTO_1, ONTO_1], None, 2, COLLAPSED),
        ([ONTO_0, ONTO_0, ONTO_1, ONTO_1], None, 1, 1.0),
        ([ONTO_0, ONTO_1, ONTO_0, ONTO_1], None, 2, 1.0),
        # padding within a sequence, and a sequence of nothing else: in neither numerator nor denominator
        ([ONTO_0, ONTO_1, ONTO_1, ONTO_1, ONTO_0, ONTO_0], [1, 0, 1, 1, 0, 0], 3, COLLAPSED),
        ([ONTO_0, ONTO_1], [0, 0], 2, 0.0),
    ],
    ids=["each-collapsed", "one-sequence", "each-balanced", "C2-padding", "all-padding"],
)
def test_sequence_level_by_hand(rows, mask, num_sequences, expected):
    loss = SwitchAuxLoss(1.0, level="sequence").losses(route(rows, 1, mask), num_sequences)["aux_loss"]
    assert loss.item() == pytest.approx(expected, abs=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    B=st.integers(0, 3),
    S=st.integers(0, 4),
    E=st.integers(1, 5),
    seed=st.integers(0, 99),
    score_function=st.sampled_from(["softmax", "sigmoid"]),
    soft=st.booleans(),
    data=st.data(),
)
def test_sequence_level_equals_a_slow_reference(B, S, E, seed, score_function, soft, data):
    K = data.draw(st.integers(1, E))
    torch.manual_seed(seed)
    logits, mask = torch.randn(B * S, E), torch.rand(B * S) < 0.7
    routing = route(logits, K, mask, score_function)
    loss = SwitchAuxLoss(0.5, level="sequence", soft=soft).losses(routing, B)["aux_loss"].item()
    scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
    probs = scores / scores.sum(-1, keepdim=True)
    per_sequence = []
    for b in range(B):
        tokens = [t for t in range(b * S, (b + 1) * S) if mask[t]]
        if not tokens:
            continue
        chosen = [e for t in tokens for e in sorted(range(E), key=lambda e, t=t: (-scores[t, e].item(), e))[:K]]
        mean_probs = [sum(probs[t, e].item() for t in tokens) / len(tokens) for e in range(E)]
        shares = mean_probs if soft else [chosen.count(e) / len(chosen) for e in range(E)]
        per_sequence.append(E * sum(f * p for f, p in zip(shares, mean_probs, strict=True)))
    expected = 0.5 * sum(per_sequence) / len(per_sequence) if per_sequence else 0.0
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_layer_says_what_its_sequences_are():
    torch.manual_seed(0)
    layer = MoELayer(6, 8, 4, 2, balancer=SwitchAuxLoss(1.0, level="sequence"))
    x = torch.randn(3, 5, 6)
    one_by_one = [layer(x[b]).losses["aux_loss"].item() for b in range(3)]
    assert layer(x).losses["aux_loss"].item() == pytest.approx(sum(one_by_one) / 3, rel=1e-5)
    with pytest.raises(ValueError, match="level='sequence' needs num_sequences"):
        layer.balancer.losses(layer(x).routing)
    with pytest.raises(ValueError, match="num_sequences=4 does not divide the 15 tokens"):
        layer.balancer.losses(layer(x).routing, 4)


def test_the_soft_form_by_hand():
    loss = SwitchAuxLoss(1.0, soft=True).losses(route([[1.0, 0.0]] * 3, 1))["aux_loss"]
    assert loss.item() == pytest.approx(1.2135, abs=1e-4)  # 2 (.7311^2 + .2689^2)
    # loads collapsed, probabilities even: the soft form does not see it, the default does
    tied = route(torch.zeros(6, 4), 1)
    assert SwitchAuxLoss(1.0, soft=True).losses(tied)["aux_loss"].item() == pytest.approx(1.0)
    assert tied.load().tolist() == [6, 0, 0, 0]


def test_the_soft_gradient_is_that_of_the_square():
    torch.manual_seed(0)
    logits = torch.randn(7, 4, dtype=torch.float32, requires_grad=True)
    SwitchAuxLoss(1.0, soft=True).losses(TopKRouter(4, 4, 2).route_logits(logits))["aux_loss"].backward()
    again = logits.detach().clone().requires_grad_()
    (4 * again.softmax(-1).mean(0).square().sum()).backward()
    torch.testing.assert_close(logits.grad, again.grad)


def forward(balancer, rows, mask=None):
    routing = route(rows, 1, mask)
    balancer.observe(routing)
    return balancer.losses(routing)["aux_loss"].item()


def test_global_level_counts_the_micro_batches_of_a_step():
    balancer = SwitchAuxLoss(1.0, level="global")
    assert forward(balancer, [ONTO_0] * 2) == pytest.approx(COLLAPSED, abs=1e-4)
    assert forward(balancer, [ONTO_1] * 2) == pytest.approx(1.0, abs=1e-6)  # f is even by now
    assert balancer.count.tolist() == [2, 2]
    assert forward(balancer, [ONTO_1] * 2, [False, False]) == 0.0  # no tokens: neither loss nor counts
    assert balancer.count.tolist() == [2, 2]
    balancer.step()
    assert forward(balancer, [ONTO_1] * 2) == pytest.approx(COLLAPSED, abs=1e-4)
    balancer.eval()
    assert forward(balancer, [ONTO_0] * 2) == pytest.approx(COLLAPSED, abs=1e-4)  # its own f
    assert balancer.count.tolist() == [0, 2]


@pytest.mark.parametrize("level", ["batch", "sequence", "global"])
def test_accumulation_does_not_grow_the_gradient(level):
    torch.manual_seed(0)
    layer = MoELayer(6, 8, 4, 1, balancer=SwitchAuxLoss(1.0, level=level))
    x = torch.randn(2, 5, 6)
    layer(x).losses["aux_loss"].backward()
    once = layer.router.weight.grad.clone()
    layer.balancer.step()
    layer.zero_grad()
    for _ in range(4):
        (layer(x).losses["aux_loss"] / 4).backward()
    assert once.abs().sum() > 0
    torch.testing.assert_close(layer.router.weight.grad, once)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_global_loss_goes_by_the_counts_of_its_first_pass(use_reentrant):
    torch.manual_seed(0)
    layer = MoELayer(6, 8, 4, 1, balancer=SwitchAuxLoss(1.0, level="global"))
    xs = [torch.randn(5, 6, requires_grad=True) for _ in range(3)]

    def gradient(run):
        layer.zero_grad()
        layer.balancer.step()
        # three micro-batches before one backward: the counts have moved on when the first is computed again
        sum(run(x) for x in xs).backward()
        assert layer.balancer.count.sum() == 15
        return layer.router.weight.grad.clone()

    def loss(x):
        return layer(x).losses["aux_loss"]

    plain = gradient(loss)
    torch.testing.assert_close(gradient(lambda x: checkpoint(loss, x, use_reentrant=use_reentrant)), plain)


def test_names_say_level_and_form():
    names = ["aux", "sequence-aux", "global-aux", "soft-aux", "soft-sequence-aux", "z", "global-z"]
    for name in names:
        balancer = make_balancer(name, 4, 2, aux_coef=0.5, z_coef=0.25)
        assert balancer.name == name
        assert list(balancer.coefficients.values()) == [0.25 if "z" in name else 0.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SwitchAuxLoss(1.0, level="layer"), "'layer'.*'batch', 'sequence', 'global'"),
        (lambda: SwitchAuxLoss(1.0, level="global", soft=True), "soft aux loss has no level='global'"),
        (lambda: RouterZLoss(1.0, level="sequence"), "'sequence'.*'batch', 'global'"),
        (lambda: make_balancer("aux+sequence-aux", 4, 2), "one loss twice.*aux_loss, aux_loss"),
    ],
)
def test_bad_levels_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
