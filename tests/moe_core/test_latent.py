"""LatentMoELayer against the layer written out by hand, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core import LatentMoELayer, MoELayer, SwitchAuxLoss, TopKRouter
from moe_core.balancers import make_balancer
from moe_core.layout import MATRICES, MoEFFN


def by_hand(layer, x_TD):
    """shared(x) + expand(norm(sum of weight * expert(compress(x)))), one token and one expert at a time."""
    out = layer.router(x_TD, layer.balancer.selection_bias(x_TD))
    rows = []
    for t, x_D in enumerate(x_TD):
        h_L = layer.compress.weight @ x_D
        total_L = torch.zeros_like(h_L)
        for e, weight in zip(out.expert_ids_TK[t].tolist(), out.weights_TK[t], strict=True):
            total_L = total_L + weight * layer.experts[e](h_L[None])[0]
        if layer.latent_norm is not None:
            eps = torch.finfo(torch.float32).eps
            total_L = total_L / (total_L.square().mean() + eps).sqrt() * layer.latent_norm.weight
        y_D = layer.expand.weight @ total_L
        rows.append(y_D + layer.shared(x_D[None])[0] if layer.shared is not None else y_D)
    return torch.stack(rows)


@settings(deadline=None, max_examples=30)
@given(
    T=st.integers(1, 7),
    E=st.integers(2, 5),
    L=st.sampled_from([1, 4, 12]),
    shared=st.integers(0, 2),
    norm=st.booleans(),
    scaling=st.sampled_from([1.0, 2.5]),
    dispatcher=st.sampled_from(["naive", "sorted"]),
    activation=st.sampled_from(["swiglu", "gelu"]),
)
def test_equals_the_layer_by_hand_with_gradients(T, E, L, shared, norm, scaling, dispatcher, activation):
    torch.manual_seed(T * 10 + E)
    layer = LatentMoELayer(
        8,
        6,
        E,
        2,
        shared,
        latent_size=L,
        latent_norm=norm,
        router=TopKRouter(8, E, 2, score_function="sigmoid", routed_scaling_factor=scaling, init_std=1.0),
        dispatcher=dispatcher,
        activation=activation,
    )
    if norm:
        torch.nn.init.uniform_(layer.latent_norm.weight, 0.5, 2.0)
    x = torch.randn(T, 8)
    grads = []
    outputs = []
    for forward in (lambda: layer(x).hidden, lambda: by_hand(layer, x)):
        layer.zero_grad()
        y = forward()
        (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
        outputs.append(y)
        grads.append({name: p.grad for name, p in layer.named_parameters()})
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    for name, ours in grads[0].items():
        theirs = grads[1][name]
        if ours is None or theirs is None:
            assert ours is theirs, name
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_who_sees_which_width():
    layer = LatentMoELayer(16, 6, 4, 2, 3, latent_size=4)
    assert layer.router.weight.shape == (4, 16)
    assert {tuple(p.shape) for p in layer.experts[0].parameters()} == {(12, 4), (4, 6)}
    assert layer.shared.down.shape == (16, 18)  # one network of the summed width
    assert layer.compress.weight.shape == (4, 16)
    assert layer.expand.weight.shape == (16, 4)
    assert (layer.latent_size, MoELayer(16, 6, 4, 2).latent_size) == (4, None)


def test_tokens_are_compressed_once_whatever_k():
    layer = LatentMoELayer(16, 6, 4, 3, latent_size=4)
    calls = []
    layer.compress.register_forward_hook(lambda _m, args, _o: calls.append(tuple(args[0].shape)))
    layer(torch.randn(2, 5, 16))
    assert calls == [(10, 16)]


def test_the_scaling_factor_reaches_every_contribution_and_the_norm_takes_its_size_out():
    outputs = {}
    for norm in (False, True):
        for scaling in (1.0, 4.0):
            torch.manual_seed(0)
            layer = LatentMoELayer(
                16,
                6,
                4,
                2,
                latent_size=4,
                latent_norm=norm,
                router=TopKRouter(16, 4, 2, routed_scaling_factor=scaling),
            )
            torch.manual_seed(1)
            outputs[norm, scaling] = layer(torch.randn(8, 16)).hidden
    torch.testing.assert_close(outputs[False, 4.0], 4 * outputs[False, 1.0])
    torch.testing.assert_close(outputs[True, 4.0], outputs[True, 1.0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("norm", [False, True])
def test_padding_and_dropped_tokens_get_nothing(norm):
    torch.manual_seed(0)
    layer = LatentMoELayer(16, 6, 4, 1, latent_size=4, latent_norm=norm, capacity_factor=0.25)
    mask = torch.ones(4, 16, dtype=torch.bool)
    mask[:, 12:] = False
    out = layer(torch.randn(4, 16, 16), token_mask=mask)
    assert out.routing.load().sum() == 48
    assert out.hidden[~mask].eq(0).all()
    dropped = ~out.routing.kept_TK[:, 0].view(4, 16)
    assert (dropped & mask).any()
    assert out.hidden[dropped].eq(0).all()
    out.hidden.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_balancers_act_on_it_as_on_any_layer():
    layer = LatentMoELayer(16, 6, 4, 2, latent_size=4, balancer=SwitchAuxLoss(0.5))
    out = layer(torch.randn(32, 16))
    out.losses["aux_loss"].backward()
    assert layer.router.weight.grad.any()
    moved = LatentMoELayer(16, 6, 4, 2, latent_size=4, balancer=make_balancer("quantile", 4, 2))
    moved(torch.randn(32, 16))
    assert moved.balancer.expert_bias.any()


def test_bad_numbers_are_named():
    with pytest.raises(ValueError, match="latent_size=0"):
        LatentMoELayer(16, 6, 4, 2, latent_size=0)
    with pytest.raises(ValueError, match="3 experts.*num_experts=4"):
        MoELayer(16, 6, 4, 2, experts=torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3)))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("activation", MATRICES)
def test_parameters_are_counted_as_they_are(norm, activation):
    layer = LatentMoELayer(16, 6, 4, 3, 2, latent_size=4, latent_norm=norm, activation=activation)
    shape = {"num_experts": 4, "top_k": 3, "expert_d_ff": 6, "shared_d_ff": 12, "activation": activation}
    counted = MoEFFN(**shape, latent_size=4, latent_norm=norm).components(16)
    parts = {name: sum(p.numel() for p in module.parameters()) for name, module in layer.named_children()}
    assert [counted[name].total for name in ("router", "routed", "shared")] == [
        parts[name] for name in ("router", "experts", "shared")
    ]
    assert counted["latent"].total == parts["compress"] + parts["expand"] + parts.get("latent_norm", 0)
    assert counted["routed"].total - counted["routed"].active == parts["experts"] // 4  # one of four stays idle


def test_state_dict_round_trip():
    layer, twin = (LatentMoELayer(16, 6, 4, 2, 1, latent_size=4) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(5, 16)
    assert torch.equal(layer(x).hidden, twin(x).hidden)
