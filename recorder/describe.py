"""What a model looks like, for the manifest: its layers, where the MoE ones stand, and their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from moe_core.experts import FeedForward

from .adapters import RouterSite, find_routers
from .layer_places import join, modules_by_name, numbered_children

_TOLD_BY_ADAPTERS = (
    *("num_experts", "top_k", "num_shared_experts", "latent_size"),
    *("score_function", "balancer", "expert_d_ff", "activation"),
)


def describe_model(model: nn.Module, sites: Sequence[RouterSite] | None = None) -> dict[str, Any]:
    """The manifest's `model` entry: name, parameter counts and `layers`, in the order of the whole model.

    sites: its routers, where the caller has found them already. An MoE layer is named after the module that is
    hooked; dense layers are the others of the same containers. Of a layer with several routers, the first entry's
    block counts leave out what the others hold, so that they add up. Counts are of the parameters that this process
    holds. Raises ValueError as `find_routers` does.
    """
    modules = modules_by_name(model)
    sites = find_routers(model) if sites is None else sites
    layers = []
    for index, layer_name, of_layer, beside in _layers_in_order(modules, sites):
        block = modules[layer_name]
        if of_layer:
            layers += _describe_moe_layer(model, modules, index, block, of_layer)
        else:
            name = join(layer_name, beside)
            layers.append(_describe_dense(index, name if name in modules else layer_name, modules.get(name), block))
    total = _count(model)
    idle = sum(layer["parameters_total"] - layer["parameters_active"] for layer in layers)
    return {
        "name": type(modules[""]).__name__,
        "parameters_total": total,
        "parameters_active": total - idle,
        "d_model": _d_model(modules[""], sites),
        "vocab_size": _of_config(modules[""], "vocab_size"),
        "layers": layers,
    }


def _layers_in_order(
    modules: Mapping[str, nn.Module], sites: Sequence[RouterSite]
) -> list[tuple[int, str, list[RouterSite], str]]:
    """(index, name of the whole layer, its routers, where its neighbours have their MoE part), dense layers too."""
    containers: dict[tuple[str, str], list[RouterSite]] = {}
    for site in sites:
        containers.setdefault((site.stream, site.place.container), []).append(site)
    layers = []
    for order, ((_, container), of_container) in enumerate(containers.items()):
        one = of_container[0].place
        offset = one.index - (one.number or 0)
        beside = _moe_part(of_container[-1])[len(of_container[-1].place.layer_name) :].lstrip(".")
        numbers = [None] if one.number is None else numbered_children(modules, container)
        for number in numbers:
            here = [site for site in of_container if site.place.number == number]
            name = container if number is None else join(container, str(number))
            layers.append((_stream_rank(sites, one.stream), offset + (number or 0), order, name, here, beside))
    layers.sort(key=lambda layer: layer[:3])
    return [(index, name, here, beside) for _, index, _, name, here, beside in layers]


def _stream_rank(sites: Sequence[RouterSite], stream: str) -> int:
    return next(i for i, site in enumerate(sites) if site.stream == stream)


def _moe_part(site: RouterSite) -> str:
    """Name of the module that holds router and experts."""
    return site.name if site.adapter.reads_block else site.name.rpartition(".")[0]


def _held(modules: Mapping[str, nn.Module], site: RouterSite) -> list[nn.Module]:
    """The modules of router and experts: the one that holds them, or they alone where that is the whole layer."""
    part = modules[_moe_part(site)]
    if site.adapter.reads_block or _moe_part(site) != site.place.layer_name:
        return [part]
    return [site.module, *(child for name, child in part.named_children() if name == "experts")]


def _describe_moe_layer(
    model: nn.Module, modules: Mapping[str, nn.Module], index: int, block: nn.Module, sites: Sequence[RouterSite]
) -> list[dict[str, Any]]:
    totals = [sum(map(_count, _held(modules, site))) for site in sites]
    layers = []
    for number, (site, total) in enumerate(zip(sites, totals, strict=True)):
        told = dict.fromkeys(_TOLD_BY_ADAPTERS) | site.adapter.describe(site.module, model)
        block_total = total if number else _count(block) - sum(totals[1:])
        idle = _idle_parameters(modules[_moe_part(site)], told["num_experts"], told["top_k"])
        layers.append(
            {
                "index": index,
                "module": site.name,
                "kind": "moe",
                "router": site.router,
                **{name: told[name] for name in _TOLD_BY_ADAPTERS[:6]},
                "d_ff": None,
                **{name: told[name] for name in _TOLD_BY_ADAPTERS[6:]},
                "parameters_total": total,
                "parameters_active": total - idle,
                "block_parameters_total": block_total,
                "block_parameters_active": block_total - idle,
            }
        )
    return layers


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


def _count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _idle_parameters(part: nn.Module, num_experts: int | None, top_k: int | None) -> int:
    """Parameters of the experts that a token does not use: (E - k) / E of those that belong to one expert each."""
    if not num_experts or top_k is None:
        return 0
    return sum(p.numel() for p in _routed(part, num_experts)) * (num_experts - top_k) // num_experts


def _routed(part: nn.Module, num_experts: int) -> list[nn.Parameter]:
    """Parameters of the routed experts: those of a child called `experts`, or else stacked ones (E, out, in)."""
    inside = [p for name, child in part.named_children() if name == "experts" for p in child.parameters()]
    return inside or [p for p in part.parameters() if p.dim() == 3 and p.shape[0] == num_experts]


def _d_model(model: nn.Module, sites: Sequence[RouterSite]) -> int | None:
    """Width of the residual stream, which our own layers tell and other models' configs."""
    own = getattr(sites[0].module, "d_model", None) if sites else None
    return (
        own
        if isinstance(own, int)
        else next(
            (width for name in ("hidden_size", "d_model") if (width := _of_config(model, name)) is not None), None
        )
    )


def _of_config(model: nn.Module, name: str) -> int | None:
    """A whole number from the model's config, or from the text part of one that has several."""
    config = getattr(model, "config", None)
    value = getattr(config, name, None)
    if value is None:
        value = getattr(getattr(config, "text_config", None), name, None)
    return value if isinstance(value, int) else None
