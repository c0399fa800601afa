"""MoETransformer: where its MoE layers stand, what its config passes on, and activation checkpointing."""

import pytest
import torch

from moe_core import LatentMoELayer, MoELayer, MoETransformer, MoETransformerConfig
from moe_core.balancers import attach_balancers
from moe_core.transformer import make_moe_layer


def config(**changes):
    options = {"vocab_size": 50, "d_model": 16, "num_heads": 2, "d_ff": 24, "num_experts": 4, "top_k": 2, **changes}
    return MoETransformerConfig(**options)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, "dmdm"),
        ({"moe_frequency": 1}, "mmmm"),
        ({"num_layers": 6, "moe_frequency": 3}, "ddmddm"),
        ({"num_layers": 6, "moe_frequency": 3, "moe_offset": 0}, "mddmdd"),
        ({"num_layers": 5, "moe_frequency": 1, "first_k_dense": 2}, "ddmmm"),
        ({"num_layers": 5, "moe_frequency": 2, "moe_offset": 0, "first_k_dense": 1}, "ddmdm"),
        ({"explicit_moe_layers": (0, 3)}, "mddm"),
        ({"explicit_moe_layers": ()}, "dddd"),
        ({"moe_frequency": 1, "explicit_moe_layers": (2,)}, "ddmd"),
    ],
)
def test_layouts(layout, expected):
    model = MoETransformer(config(**layout))
    built = "".join("m" if isinstance(block.mlp, MoELayer) else "d" for block in model.layers)
    assert built == expected
    out = model(torch.randint(50, (1, 4)))
    assert "".join("d" if routing is None else "m" for routing in out.routings) == expected


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"explicit_moe_layers": (4,)}, "explicit layer=4 must be from 0 to 3"),
        ({"explicit_moe_layers": (1, 1)}, "names a layer twice"),
        ({"explicit_moe_layers": (1,), "moe_frequency": 3}, "moe_frequency=3"),
        ({"explicit_moe_layers": (1,), "first_k_dense": 1}, "first_k_dense=1"),
        ({"first_k_dense": 5}, "first_k_dense=5 must be from 0 to 4"),
        ({"moe_frequency": 2, "moe_offset": 2}, "moe_offset=2 must be from 0 to 1"),
    ],
)
def test_layouts_that_contradict_themselves_are_named(layout, message):
    with pytest.raises(ValueError, match=message):
        config(**layout)


def test_the_config_reaches_the_layer():
    layer = make_moe_layer(
        config(
            num_experts=8,
            expert_d_ff=10,
            num_shared_experts=3,
            latent_size=6,
            latent_norm=False,
            activation="gelu",
            ffn_bias=True,
            dropout=0.25,
            zero_idle_gradients=True,
            score_function="sigmoid",
            renormalize=False,
            routed_scaling_factor=1.5,
            noise_std=0.25,
            num_groups=4,
            top_groups=2,
            router_bias=True,
            router_init_std=0.5,
            balancer="sign-bias+aux",
            bias_rate=0.125,
            aux_coef=0.5,
            capacity_factor=2.0,
            drop_policy="probs",
            dispatcher="naive",
        )
    )
    router = layer.router
    assert isinstance(layer, LatentMoELayer)
    assert (layer.latent_size, layer.latent_norm, layer.d_ff, layer.activation) == (6, None, 10, "gelu")
    for expert, width in ((layer.experts[3], 10), (layer.shared, 30)):
        assert (expert.d_ff, expert.activation, expert.dropout) == (width, "gelu", 0.25)
        assert len(expert.weights()) == 4  # two of them biases
    assert layer.experts.zero_idle_gradients
    assert (router.score_function, router.renormalize, router.routed_scaling_factor) == ("sigmoid", False, 1.5)
    assert (router.noise_std, router.num_groups, router.top_groups, router.init_std) == (0.25, 4, 2, 0.5)
    assert router.bias is not None
    assert layer.balancer.name == "sign-bias+aux"
    assert layer.balancer.coefficients == {"aux_loss": 0.5}
    assert layer.balancer.parts[0].rate == 0.125
    assert (layer.capacity_factor, layer.drop_policy) == (2.0, "probs")
    assert make_moe_layer(config(softmax_after_top_k=True, bias_in_weights=True)).router.bias_in_weights


@pytest.mark.parametrize("balancer", ["aux+z", "sign-bias+aux", "quantile"])
@pytest.mark.parametrize("more", [{}, {"latent_size": 8}, {"noise_std": 0.5, "capacity_factor": 1.0}])
def test_checkpointing_changes_nothing_but_memory(balancer, more):
    def train(checkpointed):
        torch.manual_seed(0)
        model = MoETransformer(config(balancer=balancer, aux_coef=1.0, activation_checkpointing=checkpointed, **more))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach_balancers(model, optimizer)
        seen = []
        for step in range(3):
            torch.manual_seed(step)  # the router's noise
            ids = torch.randint(50, (2, 9))
            out = model(ids, labels=ids)
            optimizer.zero_grad()
            out.loss.backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            loads = [routing.load().tolist() for routing in out.routings if routing is not None]
            # the clone is the point: buffers change in place
            state = {name: buffer.clone() for name, buffer in model.named_buffers()}
            seen.append((out.losses, grads, loads, state))
        return seen

    for (losses, grads, loads, state), (losses_c, grads_c, loads_c, state_c) in zip(
        train(False), train(True), strict=True
    ):
        assert loads_c == loads
        for ours, theirs in ((losses_c, losses), (grads_c, grads), (state_c, state)):
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert torch.equal(ours[name], theirs[name]), name


def test_checkpointing_recomputes_each_layer_once():
    model = MoETransformer(config(activation_checkpointing=True))
    calls = []
    for block in model.layers:
        block.register_forward_pre_hook(lambda *_: calls.append(torch._C._current_graph_task_id() != -1))
    ids = torch.randint(50, (1, 5))
    model(ids, labels=ids).loss.backward()
    assert calls == [False] * 4 + [True] * 4
    calls.clear()
    with torch.no_grad():
        model(ids, labels=ids)
    assert calls == [False] * 4
