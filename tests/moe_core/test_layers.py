"""MoELayer and MoETransformer: what they add up, leave out and refuse."""

import pytest
import torch

from moe_core import MoELayer, MoETransformer, MoETransformerConfig, TopKRouter
from moe_core.balancers import make_balancer


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


@pytest.mark.parametrize("dispatcher", ["naive", "masked", "sorted", "grouped"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_but_padding_can_be_differentiated(dispatcher, tokens):
    layer = MoELayer(8, 8, 4, 2, dispatcher=dispatcher)
    hidden = layer(torch.randn(tokens, 8), token_mask=torch.zeros(tokens, dtype=torch.bool)).hidden
    hidden.sum().backward()
    assert hidden.eq(0).all()
    assert layer.router.weight.grad is None or not layer.router.weight.grad.any()
