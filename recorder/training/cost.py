"""What a toy run costs, from its settings alone: parameters and FLOPs. No torch, so that forms can ask it."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.layout import Count
from moe_core.transformer_config import MoETransformerConfig
from moe_core.transformer_layout import transformer_layout

from .config import ToyConfig

#: A training step is a forward pass and a backward pass of twice its FLOPs (Kaplan et al., arXiv 2001.08361).
_PASSES = 3
_OF_A_LAYER_ALONE = ("router", "routed", "shared", "latent")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of one toy run: parameters in all, those that one token uses, FLOPs of a training step, experts in all layers."""

    parameters: int
    active: int
    flops_per_step: int
    experts: int


def size(config: ToyConfig) -> Size:
    """How large the run is. Raises ValueError for settings that no layer can have.

    The vocabulary counts as asked for; text with too few different pieces fills less of it.
    """
    layout = transformer_layout(MoETransformerConfig(**config.model_options(), vocab_size=config.vocab_size))
    if config.task == "regression":
        layer = layout.layers[layout.moe_layers[0]].components(config.d_model)
        count = sum((layer[name] for name in _OF_A_LAYER_ALONE if name in layer), Count())
        forward = 2 * count.multiplied * config.batch_size
        layers = 1
    else:
        count = layout.count
        mean_context = (config.seq_len + 1) // 2
        forward = layout.flops_per_token(mean_context) * config.batch_size * config.seq_len
        layers = len(layout.moe_layers)
    return Size(
        parameters=count.total,
        active=count.active,
        flops_per_step=_PASSES * forward,
        experts=layers * config.num_experts,
    )
