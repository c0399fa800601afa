"""Which routers a model has and how to read each: the registry of adapters, and the search through a model.

An adapter for a router that is not known here takes a few lines:

    class MyGate(RouterAdapter):
        classes = ("MyGate",)                                   # returns (logits_TE, weights_TK, expert_ids_TK)

        def describe(self, module, model):
            return {"num_experts": module.num_experts, "top_k": module.top_k, "score_function": "softmax"}

        def read(self, module, args, kwargs, output):
            logits_TE, weights_TK, ids_TK = output
            return Observation(
                routing=observed_routing(module, logits_TE=logits_TE, weights_TK=weights_TK, expert_ids_TK=ids_TK)
            )

    register_adapter(MyGate())
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .adapter_base import Observation, RouterAdapter, observed_routing
from .adapter_families import FAMILIES
from .adapter_moe_core import MoELayerAdapter
from .layer_places import Place, modules_by_name, places

__all__ = ["Observation", "RouterAdapter", "RouterSite", "find_routers", "observed_routing", "register_adapter"]

_ROUTER_NAME = re.compile(r"^(gate|router|gating)$")
_ROUTER_CLASS = re.compile(r"(?i:router|top_?k)|Gating|Gate(?![a-z])")
_MOE_CLASS = re.compile(r"(MoE|Moe|MixtureOfExperts|SparseM)(?!.*(Decoder|Encoder|Attention|Model|For[A-Z]))")
_HOW_TO_REGISTER = (
    "register an adapter for that class with recorder.adapters.register_adapter (its docstring shows one)"
)

_adapters: dict[str, RouterAdapter] = {}


@dataclass(frozen=True, kw_only=True)
class RouterSite:
    """One router of a model, and how to read it.

    name: of the module in the whole model, without the parts that wrappers put in. module: whose forward is hooked.
    layer: index in the whole model, dense layers counted. router: a number of its own, from 0. stream: "tokens", or
    "encoder" and "decoder" where these see different tokens. place: where it stands, in parts.
    """

    name: str
    module: nn.Module
    adapter: RouterAdapter
    layer: int
    router: int
    stream: str
    place: Place


def register_adapter(adapter: RouterAdapter) -> None:
    """Read modules of the adapter's classes with it from now on, in place of an earlier one.

    Raises ValueError for an adapter that names no classes.
    """
    if not adapter.classes or isinstance(adapter.classes, str):
        raise ValueError(f"{type(adapter).__name__}.classes is {adapter.classes!r}: name the module classes it reads")
    _adapters.update(dict.fromkeys(adapter.classes, adapter))


def find_routers(model: nn.Module, *, may_be_none: bool = False) -> list[RouterSite]:
    """Every router of the model, in the order of its layers.

    Raises ValueError where something that looks like a router has no adapter, or where there is none at all, unless
    that may be (one stage of a pipeline may hold dense layers only).
    """
    modules = modules_by_name(model)
    found: dict[str, tuple[nn.Module, RouterAdapter]] = {}
    for name, module in modules.items():
        if any(above in found for above in _ancestors(name)):
            continue
        block = modules[_parent(name)] if name else None
        adapter = _adapter_of(module)
        if adapter is not None:
            found[name] = (module, adapter.bind(module, block))
        elif block is not None and _looks_like_a_router(name, module, block):
            raise ValueError(
                f"the router {name} is a {type(module).__name__}, inside a {type(block).__name__}, "
                f"which has no adapter: {_HOW_TO_REGISTER}"
            )
    if not found and not may_be_none:
        like = sorted({type(module).__name__ for name, module in modules.items() if _is_called_router(name, module)})
        raise ValueError(
            f"{type(modules['']).__name__} holds no MoELayer and no other router that is known: there is no routing to "
            f"record; if {' or '.join(like) or 'one of its classes'} is a router, {_HOW_TO_REGISTER}"
        )
    return [
        RouterSite(
            name=name,
            module=found[name][0],
            adapter=found[name][1],
            layer=place.index,
            router=router,
            stream=place.stream,
            place=place,
        )
        for router, (name, place) in enumerate(places(modules, found).items())
    ]


def _adapter_of(module: nn.Module) -> RouterAdapter | None:
    return next((_adapters[c.__name__] for c in type(module).__mro__ if c.__name__ in _adapters), None)


def _looks_like_a_router(name: str, module: nn.Module, block: nn.Module) -> bool:
    """Called or classed like a router, and beside experts."""
    if not _is_called_router(name, module):
        return False
    beside = [child for child, _ in block.named_children() if child != name.rpartition(".")[2]]
    return bool(_MOE_CLASS.search(type(block).__name__)) or any("expert" in child for child in beside)


def _is_called_router(name: str, module: nn.Module) -> bool:
    return bool(_ROUTER_NAME.match(name.rpartition(".")[2]) or _ROUTER_CLASS.search(type(module).__name__))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = _parent(name)
        yield name


for known in (MoELayerAdapter(), *FAMILIES):
    register_adapter(known)
