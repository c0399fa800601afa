"""The number that names one router on a page and in the URL (`layer=`), and how the pages call that router.

A layer usually has one router, and its key is the layer's index in the whole model. A run in which some layers have
several (experts in attention and in the feed-forward part; an encoder and a decoder that count their layers alike)
numbers its routers instead, in model order: no key ever stands for two routers.
"""

from collections.abc import Mapping
from typing import Any

from recorder.reader import Run

Label = int | str  # the layer's index where that tells all, else as "0 (attention)"; reads well behind "layer"
_SIDES = ("encoder", "decoder")
_PARTS = {"attention": ("attention", "attn"), "mlp": ("mlp", "ffn", "feed_forward", "feedforward")}


def routers(run: Run) -> dict[int, dict[str, Any]]:
    """The manifest's entry of each router by its key, in model order."""
    places = {(int(layer["index"]), layer.get("router")): layer for layer in reversed(run.moe_layers)}
    found = list(reversed(places.values()))
    if len({int(layer["index"]) for layer in found}) == len(found):
        return {int(layer["index"]): layer for layer in found}
    return dict(enumerate(found))


def keys(run: Run) -> list[int]:
    """The keys of a run's routers, in model order."""
    return list(routers(run))


def place_of(run: Run, key: int) -> tuple[int, int | None]:
    """(layer, router) as the reader takes them. Raises ValueError for a key that no router of this run has."""
    layer = router(run, key)
    return int(layer["index"]), layer.get("router")


def router(run: Run, key: int) -> dict[str, Any]:
    """The manifest's entry of one router. Raises ValueError for a key that none of this run has."""
    known = routers(run)
    if key not in known:
        these = ", ".join(map(str, known))
        raise ValueError(f"layer {key} is no MoE layer of run {run.run_id}; these are: {these or 'none'}")
    return known[key]


def key_of(run: Run, layer: int, number: int | None) -> int:
    """The key of a router by the layer's index and the router's number (None: the layer's first).

    The index where the manifest names no such router.
    """
    return next(
        (
            key
            for key, entry in routers(run).items()
            if int(entry["index"]) == layer and (number is None or entry.get("router") in (None, number))
        ),
        layer,
    )


def label(run: Run, key: int) -> Label:
    """What a router is called: 3, or "3 (decoder)" where the layer's index alone would not tell it."""
    entry = router(run, key)
    return _label(entry, _sharing(run, entry))


def labels(run: Run) -> dict[int, Label]:
    """`label` of every key."""
    return {key: label(run, key) for key in keys(run)}


def layers(run: Run) -> list[dict[str, Any]]:
    """All layers of the manifest, dense ones included, each with `key` (-1 where it is no router) and `label`.

    A dense layer keeps its index as its key where no router has that key.
    """
    known = routers(run)
    moe = run.moe_layers
    found = []
    for entry in _all_layers(run):
        index = int(entry["index"])
        if entry in moe:
            key = key_of(run, index, entry.get("router"))
        else:
            key = -1 if index in known else index
        found.append({**entry, "key": key, "label": _label(entry, _sharing(run, entry))})
    return found


def blocks(layers: list[Mapping[str, Any]]) -> int:
    """How many layers of the model these entries are of: those of one index and one stack of layers are one layer."""
    return len({(layer["index"], _stack(layer)) for layer in layers})


def _all_layers(run: Run) -> list[dict[str, Any]]:
    return list((run.manifest.get("model") or {}).get("layers") or [])


def _sharing(run: Run, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [other for other in _all_layers(run) if other.get("index") == entry["index"]]


def _label(entry: Mapping[str, Any], sharing: list[dict[str, Any]]) -> Label:
    index = int(entry["index"])
    if len(sharing) < 2:
        return index
    for words in (_side, _part, _side_and_part):
        if len({words(one) for one in sharing}) == len(sharing) and all(words(one) for one in sharing):
            return f"{index} ({words(entry)})"
    number = entry.get("router")
    return f"{index} ({'dense' if number is None else f'router {number}'})"


def _side(entry: Mapping[str, Any]) -> str:
    return next((part for part in str(entry.get("module") or "").split(".") if part in _SIDES), "")


def _part(entry: Mapping[str, Any]) -> str:
    module = str(entry.get("module") or "").lower()
    return next((name for name, words in _PARTS.items() if any(word in module for word in words)), "")


def _side_and_part(entry: Mapping[str, Any]) -> str:
    return f"{_side(entry)} {_part(entry)}".strip()


def _stack(entry: Mapping[str, Any]) -> str:
    """The module's name up to its first number: "decoder.block" of "decoder.block.3.layer.2.mlp"."""
    parts = str(entry.get("module") or "").split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[:number])
