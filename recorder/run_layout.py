"""The layout of a recorded run, from its manifest. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from moe_core.layout import CONVENTIONS, Layout
from moe_core.recipe_catalog import recipe
from moe_core.transformer_config import MoETransformerConfig
from moe_core.transformer_layout import transformer_layout

_SHAPE = {field.name for field in fields(MoETransformerConfig)} - {"balancer", "dispatcher"}


def run_layout(manifest: Mapping[str, Any]) -> Layout | None:
    """The run's whole layout, where its manifest says enough; None where it does not.

    It does for a MoETransformer with its settings in the manifest, as `routescope record` leaves them. The counts that
    follow from the settings must be those that were recorded, else the settings are another model's.
    """
    model, config = manifest.get("model"), manifest.get("config")
    if not isinstance(model, Mapping) or not isinstance(config, Mapping):
        return None
    try:
        options = dict(recipe(config["recipe"]).options) if config.get("recipe") else {}
        options |= {name: value for name, value in config.items() if name in _SHAPE}
        options |= {"vocab_size": model["vocab_size"]}
        layout = transformer_layout(MoETransformerConfig(**options), name=str(manifest.get("name")))
    except (ValueError, TypeError, KeyError):
        return None
    counted = (layout.count.total, layout.count.active, [layer.is_moe for layer in layout.layers])
    recorded = [layer.get("kind") == "moe" for layer in model.get("layers") or []]
    return layout if counted == (model.get("parameters_total"), model.get("parameters_active"), recorded) else None


def embeddings_of(model: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Parameters of the input embedding, and of both embeddings together, of a manifest's `model`.

    None where they cannot be told: without a vocabulary there may be none; without the size of every layer nobody
    knows what stands outside of them. Input and output share one where less than two stand there.
    """
    total, vocab_size, d_model = (model.get(name) for name in ("parameters_total", "vocab_size", "d_model"))
    embedding = vocab_size * d_model if vocab_size and d_model else None
    outside = outside_layers(model)
    if embedding is None or total is None or outside is None or outside < embedding:
        return embedding, None
    return embedding, (2 if outside >= 2 * embedding else 1) * embedding


def outside_layers(model: Mapping[str, Any]) -> int | None:
    """Parameters of a manifest's `model` that stand in none of its layers; None where not all are counted."""
    total = model.get("parameters_total")
    blocks = [layer.get("block_parameters_total") for layer in model.get("layers") or []]
    known = [size for size in blocks if size is not None]
    return total - sum(known) if total is not None and len(known) == len(blocks) else None


def run_report(manifest: Mapping[str, Any], context: int) -> dict[str, Any]:
    """What `Layout.as_dict` tells, of a run; null for what its manifest does not say."""
    layout = run_layout(manifest)
    if layout is not None:
        return layout.as_dict(context)
    model = manifest.get("model") or {}
    total, active = model.get("parameters_total"), model.get("parameters_active")
    embedding, both = embeddings_of(model)
    left_out = dict(zip(CONVENTIONS, (0, embedding, both), strict=True))

    def less(count: int | None) -> dict[str, int | None]:
        return {
            name: None if count is None or embeddings is None else count - embeddings
            for name, embeddings in left_out.items()
        }

    return {
        "name": str(manifest.get("name")),
        "total_parameters": total,
        "active_parameters": less(active),
        "total_by_convention": less(total),
        "sparsity": active / total if total and active is not None else None,
        "vocab_size": model.get("vocab_size"),
        "d_model": model.get("d_model"),
        "tied_embeddings": None if both is None else both == embedding,
        "components": None,
        "context": context,
        "flops_per_token": None,
        "weight_bytes": None,
        "cache_bytes_per_token": None,
        "cache_bytes": None,
        "layers": [_layer(layer) for layer in model.get("layers") or []],
    }


def _layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: layer.get(name) for name in ("index", "kind", "num_experts", "top_k")}
    told |= {"total": layer.get("block_parameters_total"), "active": layer.get("block_parameters_active")}
    told |= {name: layer.get(name) for name in ("num_shared_experts", "latent_size", "d_ff", "expert_d_ff")}
    return told | {"shared_d_ff": None, "window": None, "components": None}
