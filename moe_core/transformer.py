"""A small causal transformer with dense and MoE layers, to train and to study.

Shapes: B batch, S sequence, D model width, V vocabulary, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F_
from torch.utils.checkpoint import checkpoint

from .balancers import make_balancer
from .experts import make_expert
from .layers import LatentMoELayer, MoELayer
from .routers import TopKRouter
from .routing import Routing
from .transformer_config import MoETransformerConfig

IGNORED_LABEL = -100


@dataclass(frozen=True)
class TransformerOutput:
    """What a MoETransformer returns.

    logits (B, S, V). loss: the sum of `losses`, None without labels. losses: "ce_loss" (with labels), "aux_loss"
    and "z_loss" where a balancer has them, each summed over layers, coefficient included.
    routings, layer_losses: one entry per layer, None for dense layers.
    """

    logits: Tensor
    loss: Tensor | None
    losses: dict[str, Tensor]
    routings: tuple[Routing | None, ...]
    layer_losses: tuple[dict[str, Tensor] | None, ...]


class CausalAttention(nn.Module):
    """Multi-head causal self-attention with rotary positions (RoFormer, arXiv 2104.09864), no biases."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x_BSD: Tensor, token_mask: Tensor | None) -> Tensor:
        B, S, D = x_BSD.shape
        qkv = self.qkv(x_BSD).view(B, S, 3, self.num_heads, D // self.num_heads)  # (B, S, D) -> (B, S, 3, H, D/H)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, S, D/H)
        q, k = _rotate(q), _rotate(k)
        if token_mask is None:
            y = F_.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            allowed_SS = torch.ones(S, S, dtype=torch.bool, device=x_BSD.device).tril()
            itself_SS = torch.eye(S, dtype=torch.bool, device=x_BSD.device)  # no row without a key: that gives NaN
            allowed = (allowed_SS & token_mask.bool()[:, None, :]) | itself_SS
            y = F_.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])
        return self.out(y.transpose(1, 2).reshape(B, S, D))


def _rotate(x_BHSd: Tensor) -> Tensor:
    S, d = x_BHSd.shape[-2:]
    inverse_frequency = 10000.0 ** (-torch.arange(0, d, 2, device=x_BHSd.device, dtype=torch.float32) / d)
    angle_Sd2 = torch.arange(S, device=x_BHSd.device, dtype=torch.float32)[:, None] * inverse_frequency
    cos, sin = angle_Sd2.cos().to(x_BHSd.dtype), angle_Sd2.sin().to(x_BHSd.dtype)
    first, second = x_BHSd.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def make_moe_layer(config: MoETransformerConfig) -> MoELayer:
    """One MoE layer as the config describes it; a LatentMoELayer where it has a latent_size."""
    c = config
    d_ff = c.expert_d_ff or c.d_ff
    router = TopKRouter(
        c.d_model,
        c.num_experts,
        c.top_k,
        score_function=c.score_function,
        softmax_after_top_k=c.softmax_after_top_k,
        renormalize=c.renormalize,
        routed_scaling_factor=c.routed_scaling_factor,
        noise_std=c.noise_std,
        num_groups=c.num_groups,
        top_groups=c.top_groups,
        bias=c.router_bias,
        bias_in_weights=c.bias_in_weights,
        init_std=c.router_init_std,
    )
    balancer = make_balancer(
        c.balancer, c.num_experts, c.top_k, aux_coef=c.aux_coef, z_coef=c.z_coef, bias_rate=c.bias_rate
    )
    shape = (c.d_model, d_ff, c.num_experts, c.top_k, c.num_shared_experts)
    options: dict[str, Any] = {
        "router": router,
        "balancer": balancer,
        "dispatcher": c.dispatcher,
        "capacity_factor": c.capacity_factor,
        "drop_policy": c.drop_policy,
        "activation": c.activation,
        "bias": c.ffn_bias,
        "dropout": c.dropout,
        "zero_idle_gradients": c.zero_idle_gradients,
    }
    if c.latent_size is None:
        return MoELayer(*shape, **options)
    return LatentMoELayer(*shape, latent_size=c.latent_size, latent_norm=c.latent_norm, **options)


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm feed-forward network or MoE layer, each with its residual."""

    def __init__(self, config: MoETransformerConfig, is_moe: bool) -> None:
        super().__init__()
        c = config
        self.attention_norm = nn.RMSNorm(c.d_model)
        self.attention = CausalAttention(c.d_model, c.num_heads)
        self.mlp_norm = nn.RMSNorm(c.d_model)
        self.mlp: nn.Module
        if is_moe:
            self.mlp = make_moe_layer(c)
        else:
            self.mlp = make_expert(c.d_model, c.d_ff, c.activation, bias=c.ffn_bias, dropout=c.dropout)

    def forward(
        self, x_BSD: Tensor, token_mask: Tensor | None
    ) -> tuple[Tensor, Routing | None, dict[str, Tensor] | None]:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), token_mask)
        normed_BSD = self.mlp_norm(x_BSD)
        if not isinstance(self.mlp, MoELayer):
            return x_BSD + self.mlp(normed_BSD), None, None
        out = self.mlp(normed_BSD, token_mask)
        return x_BSD + out.hidden, out.routing, out.losses


class MoETransformer(nn.Module):
    """A decoder-only language model whose layers are dense or MoE by `config.moe_layers`.

    `model(input_ids, labels=None, token_mask=None)`: input_ids int64 (B, S); labels of the same shape (usually
    input_ids themselves) are shifted inside, -100 and padding are left out of the cross-entropy; token_mask bool
    (B, S), True = a real token. Returns a TransformerOutput. Raises
    ValueError for input_ids that are not (B, S).
    """

    def __init__(self, config: MoETransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        moe_layers = set(config.moe_layers)
        self.layers = nn.ModuleList(Block(config, i in moe_layers) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, token_mask: Tensor | None = None
    ) -> TransformerOutput:
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, but (batch, sequence) is wanted")
        x_BSD = self.embedding(input_ids)
        routings: list[Routing | None] = []
        layer_losses: list[dict[str, Tensor] | None] = []
        for layer in self.layers:
            if self.config.activation_checkpointing:
                # the non-reentrant kind: the other cuts losses that stand in a dict off from autograd
                outputs = checkpoint(layer, x_BSD, token_mask, use_reentrant=False)
            else:
                outputs = layer(x_BSD, token_mask)
            x_BSD, routing, losses_of_layer = outputs
            routings.append(routing)
            layer_losses.append(losses_of_layer)
        logits_BSV = self.head(self.norm(x_BSD))

        losses: dict[str, Tensor] = {}
        if labels is not None:
            losses["ce_loss"] = next_token_loss(logits_BSV, labels, token_mask)
        for losses_of_layer in layer_losses:
            for name, value in (losses_of_layer or {}).items():
                losses[name] = losses[name] + value if name in losses else value
        loss = torch.stack(list(losses.values())).sum() if labels is not None else None
        return TransformerOutput(logits_BSV, loss, losses, tuple(routings), tuple(layer_losses))


def next_token_loss(logits_BSV: Tensor, labels_BS: Tensor, token_mask_BS: Tensor | None = None) -> Tensor:
    """Mean cross-entropy (nats) of position s predicting the label at s + 1; 0 where nothing is predicted."""
    targets_BS = labels_BS[:, 1:]
    if token_mask_BS is not None:
        targets_BS = targets_BS.masked_fill(~token_mask_BS.bool()[:, 1:], IGNORED_LABEL)
    logits_NV = logits_BSV[:, :-1].reshape(-1, logits_BSV.shape[-1]).float()
    summed = F_.cross_entropy(logits_NV, targets_BS.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum")
    return summed / (targets_BS != IGNORED_LABEL).sum().clamp_min(1)
