"""Our MoE layer with copied weights against the blocks of transformers: output, router gradient, input gradient.

Shapes: E experts, D width, F expert width.
"""

import pytest
import torch

from moe_core import MoELayer, SignBiasBalancer, SwitchAuxLoss, TopKRouter
from moe_core.experts import ExpertBank

transformers = pytest.importorskip("transformers", minversion="5.0")

D, F, E, K = 16, 12, 8, 3
SHAPE = {"hidden_size": D, "num_experts_per_tok": K, "hidden_act": "silu"}


def mixtral():
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = transformers.MixtralConfig(**SHAPE, intermediate_size=F, num_local_experts=E)
    return MixtralSparseMoeBlock(config), MoELayer(D, F, E, K)


def qwen3(normalise):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(**SHAPE, moe_intermediate_size=F, num_experts=E, norm_topk_prob=normalise)
    return Qwen3MoeSparseMoeBlock(config), MoELayer(D, F, E, K, router=TopKRouter(D, E, K, renormalize=normalise))


def olmoe():
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    config = transformers.OlmoeConfig(**SHAPE, intermediate_size=F, num_experts=E, norm_topk_prob=False)
    return OlmoeSparseMoeBlock(config), MoELayer(D, F, E, K, router=TopKRouter(D, E, K, renormalize=False))


def deepseek_v3():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = transformers.DeepseekV3Config(
        **SHAPE,
        moe_intermediate_size=F,
        n_routed_experts=E,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    router = TopKRouter(
        D, E, K, score_function="sigmoid", num_groups=4, top_groups=2, routed_scaling_factor=2.5, renormalize=True
    )
    layer = MoELayer(D, F, E, K, num_shared_experts=2, router=router, balancer=SignBiasBalancer(E))
    return DeepseekV3MoE(config), layer


def gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = transformers.GptOssConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K, swiglu_limit=7.0
    )
    layer = MoELayer(
        D,
        F,
        E,
        K,
        router=TopKRouter(D, E, K, softmax_after_top_k=True, bias=True),
        experts=ExpertBank(E, D, F, "clamped-glu", bias=True),
        activation="clamped-glu",
    )
    return GptOssMLP(config), layer


@torch.no_grad()
def copy_weights(block, layer, scale):
    """Random weights into the block of transformers, and the same into our layer."""
    for parameter in block.parameters():
        parameter.normal_(std=scale)
    gate = block.router if hasattr(block, "router") else block.gate
    layer.router.weight.copy_(gate.weight)
    if getattr(gate, "bias", None) is not None:
        layer.router.bias.copy_(gate.bias)
    if hasattr(gate, "e_score_correction_bias"):
        gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, E))
        layer.balancer.expert_bias.copy_(gate.e_score_correction_bias)
    theirs = block.experts
    for e, ours in enumerate(layer.experts):
        gate_up, down = theirs.gate_up_proj[e], theirs.down_proj[e]
        if theirs.is_transposed:  # GPT-OSS: (in, out), gate and up rows interleaved
            gate_up = torch.cat([gate_up.T[::2], gate_up.T[1::2]])
            bias = theirs.gate_up_proj_bias[e]
            ours.gate_up_bias.copy_(torch.cat([bias[::2], bias[1::2]]))
            ours.down_bias.copy_(theirs.down_proj_bias[e])
            down = down.T
        ours.gate_up.copy_(gate_up)
        ours.down.copy_(down)
    if hasattr(block, "shared_experts"):
        shared = block.shared_experts
        layer.shared.gate_up.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
        layer.shared.down.copy_(shared.down_proj.weight)
    return gate


@pytest.mark.parametrize("dispatcher", ["naive", "masked", "sorted", "grouped"])
@pytest.mark.parametrize(
    "pair",
    [mixtral, lambda: qwen3(True), lambda: qwen3(False), olmoe, deepseek_v3, gpt_oss],
    ids=["mixtral", "qwen3-moe", "qwen3-moe-not-renormalised", "olmoe", "deepseek-v3", "gpt-oss"],
)
def test_the_block_of_transformers_gives_the_same(pair, dispatcher):
    from moe_core.dispatchers import make_dispatcher

    torch.manual_seed(0)
    block, layer = pair()
    block.experts.config._experts_implementation = "eager"
    layer.dispatcher = make_dispatcher(dispatcher)
    # wide enough for clamped-glu to reach its clamps
    gate = copy_weights(block, layer, scale=1.5 if pair is gpt_oss else 0.5)
    x = torch.randn(2, 20, D)
    ours_x, theirs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours = layer(ours_x)
    theirs = block(theirs_x)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    assert ours.routing.load().gt(0).all()
    torch.testing.assert_close(ours.hidden, theirs, rtol=1e-4, atol=1e-4)
    direction = torch.randn_like(x)
    (ours.hidden * direction).sum().backward()
    (theirs * direction).sum().backward()
    torch.testing.assert_close(layer.router.weight.grad, gate.weight.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, rtol=1e-3, atol=1e-3)
    assert gate.weight.grad.abs().max() > 0.1
    if pair is gpt_oss:
        torch.testing.assert_close(layer.router.bias.grad, gate.bias.grad, rtol=1e-3, atol=1e-3)
        b = block.experts.gate_up_proj_bias.grad
        ours_b = torch.stack([expert.gate_up_bias.grad for expert in layer.experts])
        torch.testing.assert_close(ours_b, torch.cat([b[:, ::2], b[:, 1::2]], dim=1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("masked", [False, True])
def test_our_aux_loss_is_theirs_divided_by_k(masked):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    layer = MoELayer(D, F, E, K, balancer=SwitchAuxLoss(1.0))
    mask = torch.rand(2, 30) < 0.7 if masked else None
    out = layer(torch.randn(2, 30, D), token_mask=mask)
    attention_mask = None if mask is None else mask.long()
    theirs = load_balancing_loss_func((out.routing.logits_TE,), E, K, attention_mask)
    assert out.losses["aux_loss"].item() == pytest.approx(theirs.item() / K, rel=1e-5)
