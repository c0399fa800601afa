"""The layout of a MoETransformer, from its config alone. No torch."""

from __future__ import annotations

from .layout import DenseFFN, GroupedQueryAttention, Layer, Layout, MoEFFN
from .transformer_config import MoETransformerConfig


def transformer_layout(config: MoETransformerConfig, name: str = "MoETransformer") -> Layout:
    """What `MoETransformer(config)` holds, to the last parameter.

    Raises ValueError for numbers that no layer can have, such as a top_k above num_experts.
    """
    c = config
    heads = c.num_heads
    attention = GroupedQueryAttention(num_heads=heads, num_kv_heads=heads, head_dim=c.d_model // heads)
    dense = Layer(attention=attention, ffn=DenseFFN(d_ff=c.d_ff, activation=c.activation, bias=c.ffn_bias))
    layers = [dense] * c.num_layers
    if c.moe_layers:
        expert_d_ff = c.expert_d_ff or c.d_ff
        ffn = MoEFFN(
            num_experts=c.num_experts,
            top_k=c.top_k,
            expert_d_ff=expert_d_ff,
            shared_d_ff=c.num_shared_experts * expert_d_ff,
            activation=c.activation,
            expert_bias=c.ffn_bias,
            shared_bias=c.ffn_bias,
            router_bias=c.router_bias,
            latent_size=c.latent_size,
            latent_norm=c.latent_norm,
        )
        for index in c.moe_layers:
            layers[index] = Layer(attention=attention, ffn=ffn)
    return Layout(name=name, vocab_size=c.vocab_size, d_model=c.d_model, layers=tuple(layers))
