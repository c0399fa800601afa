"""A model's layout: its layers, dense and MoE, and what it holds, costs and keeps for one token. No torch.

Exact whole numbers throughout. D model width, V vocabulary, S keys that a token attends to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from .attention_shapes import Attention, GroupedQueryAttention, LatentAttention
from .counts import MAX_LAYERS, MAX_WIDTH, Count
from .ffn_shapes import FFN, MATRICES, DenseFFN, MoEFFN, ffn_parameters
from .layer_patterns import moe_layer_indices
from .whole import whole

__all__ = [
    "CONVENTIONS",
    "MATRICES",
    "PRECISION_BITS",
    "Count",
    "DenseFFN",
    "GroupedQueryAttention",
    "LatentAttention",
    "Layer",
    "Layout",
    "MoEFFN",
    "ffn_parameters",
    "moe_layer_indices",
]

CONVENTIONS = {
    "all": "all parameters",
    "minus_input_embedding": "minus the input embedding",
    "minus_both_embeddings": "minus both embeddings",
}
"""The three ways in use to count active parameters, by the key that programs see, in words."""

PRECISION_BITS = {
    "float32": Fraction(32),
    "bfloat16": Fraction(16),
    "float16": Fraction(16),
    "float8": Fraction(8),
    "int8": Fraction(8),
    "int4": Fraction(4),
    "mxfp4": Fraction(17, 4),
}
"""Bits of one number. mxfp4: 4 and a scale of 8 bits for each 32 of them (OCP Microscaling Formats, v1.0)."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: attention, a feed-forward part, and norms of the model's width.

    norms: how many there are, two where one stands before each part. norm_bias: they are LayerNorms with a bias.
    """

    attention: Attention
    ffn: FFN
    norms: int = 2
    norm_bias: bool = False

    @property
    def is_moe(self) -> bool:
        return isinstance(self.ffn, MoEFFN)

    def components(self, d_model: int) -> dict[str, Count]:
        """Parameters at width D, by component: attention, norms, and dense or router, routed, shared and latent."""
        return {
            "attention": self.attention.count(d_model),
            "norms": Count.of_all(self.norms * (1 + self.norm_bias) * d_model),
            **self.ffn.components(d_model),
        }

    def count(self, d_model: int) -> Count:
        """Parameters at width D of the whole layer."""
        return sum(self.components(d_model).values(), Count())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A decoder-only language model.

    Attributes:
        name: what it is called.
        vocab_size: V. d_model: D.
        layers: from the input to the output, 1 to 10,000 of them.
        tied_embeddings: input and output share one matrix.
        head_bias: the output has a bias of width V. norm_bias: the last norm has one of width D.

    Raises ValueError for numbers out of range.
    """

    name: str
    vocab_size: int
    d_model: int
    layers: tuple[Layer, ...]
    tied_embeddings: bool = False
    head_bias: bool = False
    norm_bias: bool = False

    def __post_init__(self) -> None:
        whole("vocab_size", self.vocab_size, 1, MAX_WIDTH)
        whole("d_model", self.d_model, 1, MAX_WIDTH)
        whole("num_layers", len(self.layers), 1, MAX_LAYERS)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the MoE layers."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.is_moe)

    @cached_property
    def components(self) -> dict[str, Count]:
        """Parameters of the whole model by component, only those that it has.

        input_embedding is looked up, so it is active but not multiplied; the output embedding (`output_embedding`) is
        multiplied. Where the two are tied there is one matrix: it stands as the input's, and is multiplied there.
        """
        embedding = self.vocab_size * self.d_model
        tied = self.tied_embeddings
        counts = {"input_embedding": Count.of_all(embedding, embedding if tied else 0)}
        sizes = {layer: layer.components(self.d_model) for layer in set(self.layers)}
        for name in ("attention", "norms", "dense", "router", "routed", "shared", "latent"):
            counts[name] = sum((sizes[layer].get(name, Count()) for layer in self.layers), Count())
        counts["norms"] += Count.of_all((1 + self.norm_bias) * self.d_model)
        counts["output_embedding"] = Count() if tied else Count.of_all(embedding, embedding)
        counts["output_embedding"] += Count.of_all(self.vocab_size if self.head_bias else 0)
        return {name: count for name, count in counts.items() if count.total}

    @cached_property
    def count(self) -> Count:
        """Parameters of the whole model."""
        return sum(self.components.values(), Count())

    def total_parameters(self, convention: str = "all") -> int:
        """All parameters under one of `CONVENTIONS`."""
        return self.count.total - self._left_out(convention)

    def active_parameters(self, convention: str = "all") -> int:
        """The parameters that one token uses under one of `CONVENTIONS`.

        A shared embedding leaves with the input's: both conventions without it give the same number then.
        """
        return self.count.active - self._left_out(convention)

    def sparsity(self, convention: str = "all") -> Fraction:
        """Active over total parameters."""
        return Fraction(self.active_parameters(convention), self.total_parameters(convention))

    def flops_per_token(self, context: int) -> int:
        """FLOPs of one token's forward pass: 2 for each weight it is multiplied with, and attention's own.

        context: keys that it attends to, itself counted, where no window is narrower. Look-ups, sums, norms and
        activations are not counted.

        Source: Kaplan et al., arXiv 2001.08361, section 2.1, with the output embedding counted in.
        """
        context = whole("context", context, 0)
        return 2 * self.count.multiplied + sum(layer.attention.score_flops(context) for layer in self.layers)

    def weight_bytes(self, precision: str = "bfloat16") -> int:
        """Bytes of all weights, every one in the same precision of `PRECISION_BITS`."""
        return _bytes(self.count.total, precision)

    def cache_bytes_per_token(self, precision: str = "bfloat16") -> int:
        """Bytes that one token adds to the key-value cache, windows not yet full."""
        return _bytes(sum(layer.attention.cache_values for layer in self.layers), precision)

    def cache_bytes(self, context: int, precision: str = "bfloat16") -> int:
        """Bytes of one sequence's key-value cache at `context` tokens; a layer with a window keeps no more than it."""
        context = whole("context", context, 0)
        values = sum(layer.attention.cache_values * layer.attention.seen(context) for layer in self.layers)
        return _bytes(values, precision)

    def dense_equivalent(self) -> Layout:
        """The dense model of the same active cost: each MoE layer becomes a dense one of the width a token pays for.

        That width is the feed-forward weights that a token is multiplied with, router and latent projections
        included, over those of one unit of width, rounded to the nearest; so costs agree within half a unit a layer.
        """

        def dense(layer: Layer) -> Layer:
            if not isinstance(layer.ffn, MoEFFN):
                return layer
            multiplied = sum(count.multiplied for count in layer.ffn.components(self.d_model).values())
            unit = MATRICES[layer.ffn.activation] * self.d_model
            width = max(1, (2 * multiplied + unit) // (2 * unit))
            return replace(layer, ffn=DenseFFN(d_ff=width, activation=layer.ffn.activation))

        return replace(self, name=f"{self.name}, dense equivalent", layers=_each(self.layers, dense))

    def as_dict(self, context: int = 4096) -> dict[str, Any]:
        """All of it for programs: whole numbers, null for "has none".

        Counts of a layer are of the whole layer, attention and norms in them; what stands outside the layers is in
        `components`. context: tokens that FLOPs and the sequence's cache are told for.
        """
        sizes = {layer: layer.components(self.d_model) for layer in set(self.layers)}
        return {
            "name": self.name,
            "total_parameters": self.count.total,
            "active_parameters": {name: self.active_parameters(name) for name in CONVENTIONS},
            "total_by_convention": {name: self.total_parameters(name) for name in CONVENTIONS},
            "sparsity": float(self.sparsity()),
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "tied_embeddings": self.tied_embeddings,
            "components": {
                name: {"total": count.total, "active": count.active} for name, count in self.components.items()
            },
            "context": context,
            "flops_per_token": self.flops_per_token(context),
            "weight_bytes": {name: self.weight_bytes(name) for name in PRECISION_BITS},
            "cache_bytes_per_token": self.cache_bytes_per_token(),
            "cache_bytes": self.cache_bytes(context),
            "layers": [_layer_dict(index, layer, sizes[layer]) for index, layer in enumerate(self.layers)],
        }

    def _left_out(self, convention: str) -> int:
        if convention not in CONVENTIONS:
            raise ValueError(f"convention={convention!r} must be one of {', '.join(map(repr, CONVENTIONS))}")
        embedding = self.vocab_size * self.d_model
        one_or_both = 1 if self.tied_embeddings or convention == "minus_input_embedding" else 2
        return 0 if convention == "all" else one_or_both * embedding


def _layer_dict(index: int, layer: Layer, components: dict[str, Count]) -> dict[str, Any]:
    count = sum(components.values(), Count())
    ffn = layer.ffn
    moe = ffn if isinstance(ffn, MoEFFN) else None
    return {
        "index": index,
        "kind": "dense" if moe is None else "moe",
        "num_experts": moe and moe.num_experts,
        "top_k": moe and moe.top_k,
        "total": count.total,
        "active": count.active,
        "num_shared_experts": moe and moe.num_shared_experts,
        "latent_size": moe and moe.latent_size,
        "d_ff": ffn.d_ff if isinstance(ffn, DenseFFN) else None,
        "expert_d_ff": moe and moe.expert_d_ff,
        "shared_d_ff": moe and moe.shared_d_ff,
        "window": layer.attention.window,
        "components": {name: {"total": c.total, "active": c.active} for name, c in components.items() if c.total},
    }


def _each(layers: Iterable[Layer], change: Callable[[Layer], Layer]) -> tuple[Layer, ...]:
    """Every layer changed; alike ones once only, since a model has few kinds of them."""
    layers = tuple(layers)
    changed = {layer: change(layer) for layer in set(layers)}
    return tuple(changed[layer] for layer in layers)


def _bytes(numbers: int, precision: str) -> int:
    if precision not in PRECISION_BITS:
        raise ValueError(f"precision={precision!r} must be one of {', '.join(map(repr, PRECISION_BITS))}")
    return math.ceil(numbers * PRECISION_BITS[precision] / 8)
