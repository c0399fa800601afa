"""Shapes of published models, and four sizes to teach and to try with. No torch.

Shapes are those of each model's `config.json` on the Hugging Face Hub; the totals that follow from them were checked
by building the models from their configs on PyTorch's meta device. Published figures are as their authors round them,
in the report named as `source`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from types import MappingProxyType
from typing import Any

from .layer_patterns import moe_layer_indices
from .layout import Attention, DenseFFN, GroupedQueryAttention, LatentAttention, Layer, Layout, MoEFFN
from .transformer_config import MoETransformerConfig
from .transformer_layout import transformer_layout


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """One published model.

    Attributes:
        layout: its shape.
        published_total, published_active: as its authors write them, such as "46.7B"; None where they give none.
        convention: how `published_active` counts, a key of `CONVENTIONS`.
        convention_stated: whether the authors say so; else it is the one that fits their figure best.
        source: where the figures are from.
        note: what a reader should know beside it, or "".
    """

    layout: Layout
    published_total: str | None
    published_active: str | None
    convention: str
    convention_stated: bool
    source: str
    note: str = ""

    @property
    def name(self) -> str:
        return self.layout.name


def _model(
    name: str,
    vocab_size: int,
    d_model: int,
    num_layers: int,
    attention: Attention,
    moe: MoEFFN,
    *,
    dense: tuple[int, int] = (0, 0),
    total: str,
    active: str,
    convention: str,
    stated: bool,
    source: str,
    note: str = "",
    every_other_window: int | None = None,
) -> PublishedModel:
    """dense: how many layers at the start are dense, and their width. Every model here has an output of its own."""
    first, width = dense
    sparse = set(moe_layer_indices(num_layers, first_k_dense=first))
    layers = []
    for index in range(num_layers):
        of_layer = attention
        if every_other_window is not None and index % 2 == 0:
            assert isinstance(attention, GroupedQueryAttention)
            of_layer = replace(attention, window=every_other_window)
        layers.append(Layer(attention=of_layer, ffn=moe if index in sparse else DenseFFN(d_ff=width)))
    return PublishedModel(
        layout=Layout(name=name, vocab_size=vocab_size, d_model=d_model, layers=tuple(layers)),
        published_total=total,
        published_active=active,
        convention=convention,
        convention_stated=stated,
        source=source,
        note=note,
    )


def _gqa(num_heads: int, num_kv_heads: int, head_dim: int = 128, **options: Any) -> GroupedQueryAttention:
    return GroupedQueryAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **options)


def _mla(num_heads: int) -> LatentAttention:
    return LatentAttention(
        num_heads=num_heads,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


def _moe(num_experts: int, top_k: int, expert_d_ff: int, shared_d_ff: int = 0, **options: Any) -> MoEFFN:
    return MoEFFN(num_experts=num_experts, top_k=top_k, expert_d_ff=expert_d_ff, shared_d_ff=shared_d_ff, **options)


_GPT_OSS_ATTENTION = _gqa(64, 8, 64, qkv_bias=True, out_bias=True, sinks=True)
_GPT_OSS_EXPERTS: dict[str, Any] = {"activation": "clamped-glu", "router_bias": True, "expert_bias": True}

# fmt: off
_PUBLISHED = (
    _model(
        "Mixtral-8x7B", 32_000, 4096, 32, _gqa(32, 8), _moe(8, 2, 14_336),
        total="46.7B", active="12.9B", convention="all", stated=True, source="arXiv 2401.04088",
    ),
    _model(
        "Mixtral-8x22B", 32_000, 6144, 56, _gqa(48, 8), _moe(8, 2, 16_384),
        total="141B", active="39B", convention="all", stated=True,
        source="Mistral AI, announcement of Mixtral 8x22B (2024)",
    ),
    _model(
        "DeepSeek-V2", 102_400, 5120, 60, _mla(128), _moe(160, 6, 1536, 3072), dense=(1, 12_288),
        total="236B", active="21B", convention="minus_input_embedding", stated=False, source="arXiv 2405.04434",
    ),
    _model(
        "DeepSeek-V3", 129_280, 7168, 61, _mla(128), _moe(256, 8, 2048, 2048), dense=(3, 18_432),
        total="671B", active="37B", convention="minus_input_embedding", stated=False, source="arXiv 2412.19437",
    ),
    _model(
        "Kimi-K2", 163_840, 7168, 61, _mla(64), _moe(384, 8, 2048, 2048), dense=(1, 18_432),
        total="1T", active="32B", convention="minus_input_embedding", stated=False, source="arXiv 2507.20534",
    ),
    _model(
        "Qwen1.5-MoE-A2.7B", 151_936, 2048, 24, _gqa(16, 16, qkv_bias=True),
        _moe(60, 4, 1408, 5632, shared_gate=True),
        total="14.3B", active="2.7B", convention="all", stated=False, source="Qwen, Qwen1.5-MoE (2024)",
    ),
    _model(
        "Qwen3-30B-A3B", 151_936, 2048, 48, _gqa(32, 4, qk_norm="head"), _moe(128, 8, 768),
        total="30.5B", active="3.3B", convention="all", stated=True, source="arXiv 2505.09388",
    ),
    _model(
        "Qwen3-235B-A22B", 151_936, 4096, 94, _gqa(64, 4, qk_norm="head"), _moe(128, 8, 1536),
        total="235B", active="22B", convention="all", stated=False, source="arXiv 2505.09388",
    ),
    _model(
        "OLMoE-1B-7B", 50_304, 2048, 16, _gqa(16, 16, qk_norm="full"), _moe(64, 8, 1024),
        total="6.9B", active="1.3B", convention="all", stated=True, source="arXiv 2409.02060",
    ),
    _model(
        "gpt-oss-20b", 201_088, 2880, 24, _GPT_OSS_ATTENTION, _moe(32, 4, 2880, **_GPT_OSS_EXPERTS),
        every_other_window=128,
        total="20.9B", active="3.61B", convention="minus_input_embedding", stated=True, source="arXiv 2508.10925",
    ),
    _model(
        "gpt-oss-120b", 201_088, 2880, 36, _GPT_OSS_ATTENTION, _moe(128, 4, 2880, **_GPT_OSS_EXPERTS),
        every_other_window=128,
        total="116.8B", active="5.13B", convention="minus_input_embedding", stated=True, source="arXiv 2508.10925",
    ),
    _model(
        "GLM-4.5", 151_552, 5120, 92, _gqa(96, 8, qkv_bias=True, qk_norm="head"), _moe(160, 8, 1536, 1536),
        dense=(3, 12_288),
        total="355B", active="32B", convention="minus_both_embeddings", stated=True, source="arXiv 2508.06471",
        note="The published total also counts the layer for multi-token prediction, and leaves embeddings out.",
    ),
)
# fmt: on

PUBLISHED: Mapping[str, PublishedModel] = MappingProxyType({model.name: model for model in _PUBLISHED})
"""Published models by name."""


@dataclass(frozen=True, kw_only=True)
class TeachingSize:
    """A shape to learn on: round numbers of parameters, a MoETransformer that can be built.

    name: such as "tiny". about_total, about_active: what it stands for; `layout` says what it holds.
    options: fields of MoETransformerConfig, which `MoETransformer` builds.
    """

    name: str
    about_total: int
    about_active: int
    options: Mapping[str, Any]

    @property
    def config(self) -> MoETransformerConfig:
        return MoETransformerConfig(**self.options)

    @cached_property
    def layout(self) -> Layout:
        return transformer_layout(self.config, self.name)


def _size(name: str, about_total: int, about_active: int, **options: int) -> TeachingSize:
    return TeachingSize(
        name=name, about_total=about_total, about_active=about_active, options=MappingProxyType(options)
    )


TEACHING_SIZES: Mapping[str, TeachingSize] = MappingProxyType(
    {
        size.name: size
        for size in (
            _size(
                "tiny", 10**6, 5 * 10**5,
                vocab_size=1024, d_model=96, num_layers=4, num_heads=4, d_ff=128, moe_frequency=2,
                num_experts=16, top_k=2, expert_d_ff=64,
            ),
            _size(
                "small", 10**8, 4 * 10**7,
                vocab_size=8192, d_model=384, num_layers=6, num_heads=6, d_ff=1472, moe_frequency=1,
                num_experts=8, top_k=2, expert_d_ff=1472, num_shared_experts=1,
            ),
            _size(
                "medium", 7 * 10**9, 2 * 10**9,
                vocab_size=32_768, d_model=2048, num_layers=32, num_heads=16, d_ff=6144, moe_frequency=2,
                num_experts=32, top_k=4, expert_d_ff=1792,
            ),
            _size(
                "large", 9 * 10**11, 45 * 10**9,
                vocab_size=131_072, d_model=8192, num_layers=64, num_heads=64, d_ff=20_480, moe_frequency=2,
                num_experts=256, top_k=2, expert_d_ff=4224, num_shared_experts=1,
            ),
        )
    }
)  # fmt: skip
"""Four sizes to teach with, by name; each lands within 5% of the round numbers it stands for."""


def model_names() -> tuple[str, ...]:
    """Every name that `model_layout` knows."""
    return (*PUBLISHED, *TEACHING_SIZES)


def model_layout(name: str) -> Layout:
    """The layout of a published model or a teaching size, whatever the case of its name.

    Raises ValueError that names near ones, or all.
    """
    by_name = {known.casefold(): known for known in model_names()}
    known = by_name.get(name.casefold())
    if known is None:
        near = [by_name[match] for match in get_close_matches(name.casefold(), by_name, n=3, cutoff=0.5)]
        raise ValueError(
            f"no model {name[:60]!r}; {'near it' if near else 'known'}: {', '.join(near or model_names())}"
        )
    return PUBLISHED[known].layout if known in PUBLISHED else TEACHING_SIZES[known].layout
