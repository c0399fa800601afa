"""The accounting against MoETransformers that are built: parameters, gradients after one token, FLOPs that run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_core import MoETransformer, MoETransformerConfig
from moe_core.layout import MATRICES
from moe_core.models import TEACHING_SIZES
from moe_core.transformer_layout import transformer_layout


@st.composite
def configs(draw: st.DrawFn) -> MoETransformerConfig:
    heads = draw(st.integers(1, 3))
    experts = draw(st.integers(2, 6))
    layers = draw(st.integers(1, 5))
    return MoETransformerConfig(
        vocab_size=draw(st.integers(2, 30)),
        d_model=heads * 2 * draw(st.integers(1, 4)),
        num_layers=layers,
        num_heads=heads,
        d_ff=draw(st.integers(1, 20)),
        activation=draw(st.sampled_from(tuple(MATRICES))),
        ffn_bias=draw(st.booleans()),
        moe_frequency=draw(st.integers(1, 3)),
        first_k_dense=draw(st.integers(0, layers)),
        num_experts=experts,
        top_k=draw(st.integers(1, experts)),
        expert_d_ff=draw(st.none() | st.integers(1, 20)),
        num_shared_experts=draw(st.integers(0, 2)),
        latent_size=draw(st.none() | st.integers(1, 9)),
        latent_norm=draw(st.booleans()),
        router_bias=draw(st.booleans()),
        renormalize=False,
        dispatcher="sorted",
        balancer=draw(st.sampled_from(["none", "sign-bias"])),
    )


@settings(max_examples=40, deadline=None)
@given(configs())
def test_parameters_are_those_of_the_built_model(config: MoETransformerConfig) -> None:
    with torch.device("meta"):
        model = MoETransformer(config)
    layout = transformer_layout(config)
    assert layout.total_parameters() == sum(p.numel() for p in model.parameters())
    assert layout.moe_layers == config.moe_layers
    embedding, head = model.embedding.weight.numel(), model.head.weight.numel()
    assert layout.total_parameters() - layout.total_parameters("minus_input_embedding") == embedding
    assert layout.total_parameters() - layout.total_parameters("minus_both_embeddings") == embedding + head
    for index, (layer, block) in enumerate(zip(layout.layers, model.layers, strict=True)):
        assert layer.count(config.d_model).total == sum(p.numel() for p in block.parameters()), index


@settings(max_examples=15, deadline=None)
@given(configs())
def test_active_parameters_are_those_that_one_token_gives_a_gradient(config: MoETransformerConfig) -> None:
    model = MoETransformer(config)
    output = model(torch.tensor([[1]]))
    output.logits.sum().backward()
    reached = sum(p.numel() for p in model.parameters() if p.grad is not None)
    assert transformer_layout(config).active_parameters() == reached


@settings(max_examples=15, deadline=None)
@given(configs(), st.integers(1, 9))
def test_flops_are_those_that_run(config: MoETransformerConfig, tokens: int) -> None:
    model = MoETransformer(config)
    # torch counts attention only where it runs as plain products
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long))
    # every token's scores are computed over the whole sequence, the masked half too
    assert transformer_layout(config).flops_per_token(tokens) * tokens == counter.get_total_flops()


@pytest.mark.parametrize("size", TEACHING_SIZES.values(), ids=TEACHING_SIZES)
@pytest.mark.slow
def test_teaching_sizes_are_what_they_stand_for(size) -> None:
    with torch.device("meta"):
        model = MoETransformer(size.config)
    assert size.layout.total_parameters() == sum(p.numel() for p in model.parameters())
    assert size.layout.total_parameters() == pytest.approx(size.about_total, rel=0.05)
    assert size.layout.active_parameters() == pytest.approx(size.about_active, rel=0.05)
    assert float(size.layout.sparsity()) == pytest.approx(size.about_active / size.about_total, rel=0.05)


def test_the_large_size_is_the_one_described() -> None:
    config = TEACHING_SIZES["large"].config
    assert (config.num_experts, config.top_k, config.num_shared_experts) == (256, 2, 1)
    assert config.moe_layers == tuple(range(1, config.num_layers, 2))
