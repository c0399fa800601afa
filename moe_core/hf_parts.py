"""The parts that families of Hugging Face configs have in common, read from their fields. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .attention_shapes import Attention, GroupedQueryAttention, LatentAttention
from .config_values import ConfigValues
from .layout import DenseFFN, Layer, Layout, MoEFFN

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"


def grouped_query(v: ConfigValues, *, head_dim: int | None = None, **options: Any) -> GroupedQueryAttention:
    """Attention as most families have it. head_dim: the family's default, else the model's width over its heads."""
    heads = v.number("num_attention_heads")
    width = v.number("head_dim", default=head_dim)
    if width is None:
        width, rest = divmod(v.number("hidden_size"), heads)
        if rest:
            raise ValueError(f"hidden_size={v.number('hidden_size')} is no multiple of num_attention_heads={heads}")
    kv_heads = v.number("num_key_value_heads", default=heads)
    return GroupedQueryAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=width, **options)


def with_biases(v: ConfigValues, name: str = "attention_bias", *, default: bool = False) -> dict[str, bool]:
    """Options of `grouped_query`: biases on all four projections where the field says so."""
    bias = v.flag(name, default=default)
    return {"qkv_bias": bias, "out_bias": bias}


def latent(v: ConfigValues) -> LatentAttention:
    """Latent attention; a q_lora_rank of null says that queries are not compressed, so it must be there."""
    compressed = "q_lora_rank" not in v.fields or v.fields["q_lora_rank"] is not None
    v.number("num_key_value_heads", default=None)  # of no use here, but wrong in a config that has it wrong
    return LatentAttention(
        num_heads=v.number("num_attention_heads"),
        q_lora_rank=v.number("q_lora_rank") if compressed else None,
        kv_lora_rank=v.number("kv_lora_rank"),
        qk_nope_head_dim=v.number("qk_nope_head_dim"),
        qk_rope_head_dim=v.number("qk_rope_head_dim"),
        v_head_dim=v.number("v_head_dim"),
        bias=v.flag("attention_bias"),
    )


def experts(v: ConfigValues, *, width: str = "moe_intermediate_size", **options: Any) -> MoEFFN:
    """Routed experts, their width from that field; the rest as `MoEFFN` takes it."""
    return MoEFFN(
        num_experts=v.experts("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
        top_k=v.experts("num_experts_per_tok", "moe_k", "moe_topk"),
        expert_d_ff=v.number(width),
        **options,
    )


def with_shared(v: ConfigValues, number: str, *, least: int = 0, **options: Any) -> MoEFFN:
    """Routed experts, and beside them one network as wide as that number of them, which must be at least `least`."""
    return experts(v, shared_d_ff=v.number(number, least=least) * v.number("moe_intermediate_size"), **options)


def windows(v: ConfigValues, default: Sequence[str] | None = None) -> list[int | None]:
    """The window of each layer, None = sees everything: by `layer_types`, else by the family's default."""
    count = v.layers("num_hidden_layers")
    kinds = v.words("layer_types", count, (FULL, SLIDING, CHUNKED)) or default or [FULL] * count
    width = {FULL: None}
    if SLIDING in kinds:
        width[SLIDING] = v.number("sliding_window")
    if CHUNKED in kinds:
        width[CHUNKED] = v.number("attention_chunk_size")
    return [width[kind] for kind in kinds]


def same_window(v: ConfigValues) -> list[str]:
    """The default of families whose layers all have the sliding window, where there is one."""
    kind = FULL if v.number("sliding_window", default=0, least=0) == 0 else SLIDING
    return [kind] * v.layers("num_hidden_layers")


def sparse_layers(v: ConfigValues, first_k_dense: int) -> list[int]:
    """Indices of the MoE layers: by `mlp_layer_types`, else all but so many at the start."""
    count = v.layers("num_hidden_layers")
    kinds = v.words("mlp_layer_types", count, ("dense", "sparse"))
    if kinds is None:
        return list(range(min(first_k_dense, count), count))
    return [index for index, kind in enumerate(kinds) if kind == "sparse"]


def stack(
    v: ConfigValues,
    name: str,
    attention: Attention,
    moe: MoEFFN,
    moe_layers: Sequence[int] | None = None,
    *,
    dense_width: str = "intermediate_size",
    dense_bias: bool = False,
    windows: Sequence[int | None] | None = None,
    norms: int = 2,
    norm_bias: bool = False,
    head_bias: bool = False,
    tied: bool = False,
) -> Layout:
    """The whole model. moe_layers: indices, None = all; tied: whether embeddings are where the config does not say.

    Dense layers take their width from `dense_width`, which is asked for only where there are any.
    """
    count = v.layers("num_hidden_layers")
    sparse = set(range(count) if moe_layers is None else moe_layers)
    parts: dict[bool, Any] = {True: moe}
    if len(sparse) < count:
        parts[False] = DenseFFN(d_ff=v.number(dense_width), bias=dense_bias)
    attentions: dict[int | None, Attention] = {None: attention}
    for window in set(windows or ()) - {None}:
        assert isinstance(attention, GroupedQueryAttention)
        attentions[window] = replace(attention, window=window)
    of_layer = windows or [None] * count
    return Layout(
        name=name,
        vocab_size=v.number("vocab_size"),
        d_model=v.number("hidden_size"),
        layers=tuple(
            Layer(attention=attentions[of_layer[i]], ffn=parts[i in sparse], norms=norms, norm_bias=norm_bias)
            for i in range(count)
        ),
        tied_embeddings=v.flag("tie_word_embeddings", default=tied),
        head_bias=head_bias,
        norm_bias=norm_bias,
    )
