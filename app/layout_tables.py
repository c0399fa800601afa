"""Layouts as the figures and tables of the Layouts page want them. No Streamlit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from moe_core.layout import CONVENTIONS, Count, Layout
from moe_core.models import PUBLISHED

CONTEXT = 4096  # tokens attended to, where costs depend on it


def map_layers(layout: Layout) -> list[dict[str, Any]]:
    """The layers as `model_map` draws them; parameters are those of the feed-forward part, as a run's manifest has."""
    layers = layout.as_dict()["layers"]
    parts = {layer: sum(layer.ffn.components(layout.d_model).values(), Count()) for layer in set(layout.layers)}
    for told, layer in zip(layers, layout.layers, strict=True):
        told |= {"parameters_total": parts[layer].total, "parameters_active": parts[layer].active}
    return layers


def model_table(layouts: Sequence[Layout]) -> pd.DataFrame:
    """A row a model: shape, parameters under the three conventions, published figures, and what a token costs."""
    rows = []
    for layout in layouts:
        published = PUBLISHED.get(layout.name)
        moe = next((layer.ffn for layer in layout.layers if layer.is_moe), None)
        row: dict[str, Any] = {
            "model": layout.name,
            "total": layout.total_parameters(),
        }
        row |= {f"active, {words}": layout.active_parameters(key) for key, words in CONVENTIONS.items()}
        row |= {
            "active (%)": 100 * float(layout.sparsity()),
            "published total": published and published.published_total,
            "published active": published and published.published_active,
            "published counts": published and CONVENTIONS[published.convention],
            "layers": len(layout.layers),
            "MoE layers": len(layout.moe_layers),
            "experts": getattr(moe, "num_experts", None),
            "top k": getattr(moe, "top_k", None),
            "shared experts": getattr(moe, "num_shared_experts", None),
            "FLOPs per token": layout.flops_per_token(CONTEXT),
            "weights, bytes": layout.weight_bytes("bfloat16"),
            "cache per token, bytes": layout.cache_bytes_per_token("bfloat16"),
            "dense equivalent, total": layout.dense_equivalent().total_parameters(),
        }
        rows.append(row)
    frame = pd.DataFrame(rows)
    whole = ["experts", "top k", "shared experts"]
    return frame.astype(dict.fromkeys(whole, "Int64"))


def component_table(layouts: Sequence[Layout]) -> pd.DataFrame:
    """A row a component, total and active parameters of each model side by side; null where it has none."""
    names = dict.fromkeys(name for layout in layouts for name in layout.components)
    frame = pd.DataFrame({"component": [name.replace("_", " ") for name in names]})
    for layout in layouts:
        for kind in ("total", "active"):
            counts = [getattr(layout.components.get(name), kind, None) for name in names]
            frame[f"{layout.name}, {kind}"] = pd.array(counts, dtype="Int64")
    return frame


def layer_table(layouts: Sequence[Layout]) -> pd.DataFrame:
    """A row a layer of each model, whole layers: attention and norms are in the counts."""
    columns = ["index", "kind", "num_experts", "top_k", "num_shared_experts", "latent_size", "d_ff", "expert_d_ff"]
    columns += ["shared_d_ff", "window", "total", "active"]
    rows = [
        {"model": layout.name} | {name: layer[name] for name in columns}
        for layout in layouts
        for layer in layout.as_dict()["layers"]
    ]
    whole = [name for name in columns if name != "kind"]
    return pd.DataFrame(rows, columns=["model", *columns]).astype(dict.fromkeys(whole, "Int64"))


def as_json(layouts: Sequence[Layout]) -> bytes:
    """What `routescope layout --json` tells, of each model."""
    return json.dumps([layout.as_dict(CONTEXT) for layout in layouts], indent=2, allow_nan=False).encode()
