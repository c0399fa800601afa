"""What a model looks like, for the manifest: its layers, where the MoE ones stand, and their parameters."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from moe_core.experts import FeedForward
from moe_core.layers import MoELayer

_INDEXED = re.compile(r"^(?P<container>.*?)(?:^|\.)?(?P<index>\d+)(?:\.(?P<inside>.*))?$")


def describe_model(model: nn.Module) -> dict[str, Any]:
    """The manifest's `model` entry: name, parameter counts and `layers`, in the order of the whole model.

    Dense layers are the siblings of MoE layers in the same numbered container, found at the same place inside.
    Raises ValueError where the model holds no MoELayer.
    """
    found = find_moe_layers(model)
    if not found:
        raise ValueError(f"{type(model).__name__} holds no MoELayer: there is no routing to record")
    by_index = {index: (module_name, layer) for index, module_name, layer in found}
    layers = []
    router = 0
    for index, name, module, block in _layers_in_order(model, found):
        if index in by_index:
            layers.append(_describe_moe(index, name, by_index[index][1], block, router))
            router += 1
        else:
            layers.append(_describe_dense(index, name, module, block))
    total = sum(p.numel() for p in model.parameters())
    config = getattr(model, "config", None)
    return {
        "name": type(model).__name__,
        "parameters_total": total,
        "parameters_active": total - sum(_idle_parameters(layer) for _, _, layer in found),
        "d_model": found[0][2].d_model,
        "vocab_size": getattr(config, "vocab_size", None),
        "layers": layers,
    }


def find_moe_layers(model: nn.Module) -> list[tuple[int, str, MoELayer]]:
    """(layer index in the whole model, module name, layer), by index.

    The index is the number in the module's name (`layers.3.mlp` is layer 3, dense layers counted); layers without
    one are numbered in the order they are found.
    """
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, MoELayer)]
    indices = [_split(name) for name, _ in named]
    numbered = all(parts is not None for parts in indices) and len({p and p[1] for p in indices}) == len(named)
    found = [
        (parts[1] if numbered and parts is not None else i, name, module)
        for i, ((name, module), parts) in enumerate(zip(named, indices, strict=True))
    ]
    return sorted(found, key=lambda entry: entry[0])


def _split(name: str) -> tuple[str, int, str] | None:
    """Container, index and place inside of a module name: layers.3.mlp -> ("layers", 3, "mlp")."""
    match = _INDEXED.match(name)
    if match is None:
        return None
    return match["container"].rstrip("."), int(match["index"]), match["inside"] or ""


def _layers_in_order(
    model: nn.Module, found: list[tuple[int, str, MoELayer]]
) -> list[tuple[int, str, nn.Module | None, nn.Module]]:
    """(index, name, feed-forward module or None, whole block) of every layer, dense ones between MoE ones too."""
    places = {_split(name) and (_split(name)[0], _split(name)[2]) for _, name, _ in found}  # type: ignore[index]
    if len(places) != 1 or None in places:
        return [(index, name, layer, layer) for index, name, layer in found]
    ((container, inside),) = places  # type: ignore[misc]
    blocks = model.get_submodule(container)
    layers: list[tuple[int, str, nn.Module | None, nn.Module]] = []
    for index_text, block in blocks.named_children():
        if not index_text.isdecimal():
            continue
        name = ".".join(part for part in (container, index_text, inside) if part)
        try:
            module: nn.Module | None = block.get_submodule(inside)
        except AttributeError:
            module = None
        layers.append((int(index_text), name, module, block))
    return sorted(layers, key=lambda entry: entry[0])


def _count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _idle_parameters(layer: MoELayer) -> int:
    """Parameters of the experts that a token does not use."""
    return (layer.num_experts - layer.top_k) * _count(layer.experts[0])


def _describe_moe(index: int, name: str, layer: MoELayer, block: nn.Module, router: int) -> dict[str, Any]:
    total, block_total = _count(layer), _count(block)
    return {
        "index": index,
        "module": name,
        "kind": "moe",
        "router": router,
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        "num_shared_experts": layer.num_shared_experts,
        "latent_size": layer.latent_size,
        "score_function": layer.router.score_function,
        "balancer": layer.balancer.name,
        "d_ff": None,
        "expert_d_ff": layer.d_ff,
        "activation": layer.activation,
        "parameters_total": total,
        "parameters_active": total - _idle_parameters(layer),
        "block_parameters_total": block_total,
        "block_parameters_active": block_total - _idle_parameters(layer),
    }


def _describe_dense(index: int, name: str, module: nn.Module | None, block: nn.Module) -> dict[str, Any]:
    d_ff = activation = None
    if isinstance(module, FeedForward):
        d_ff, activation = module.d_ff, module.activation
    return {
        "index": index,
        "module": name,
        "kind": "dense",
        "router": None,
        "num_experts": None,
        "top_k": None,
        "num_shared_experts": None,
        "latent_size": None,
        "score_function": None,
        "balancer": None,
        "d_ff": d_ff,
        "expert_d_ff": None,
        "activation": activation,
        "parameters_total": _count(module),
        "parameters_active": _count(module),
        "block_parameters_total": _count(block),
        "block_parameters_active": _count(block),
    }
