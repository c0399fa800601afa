"""The first reading of a dump: everything in it checked, and what a run's manifest needs to know gathered.

Shapes: E experts, K choices a token, T tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from recorder.importers.dump import LAYERS, Counts, Decisions, Dump, DumpError, Place
from recorder.importers.megatron import DECODER
from recorder.importers.models import ModelShape

#: More than any model has: beyond these an array has its axes in another order, or is no routing.
_MOST_EXPERTS, _MOST_LAYERS = 1 << 16, 1 << 10


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a dump holds: layer and router number of each place with an assignment, E, k where known, first step."""

    layers: dict[Place, int]
    routers: dict[Place, int]
    num_experts: int
    top_k: int | None
    first_step: int
    has_decisions: bool


def scan(dump: Dump, shape: ModelShape | None) -> Contents:
    """Read `dump` once from end to end, without writing anything.

    Raises:
        DumpError: it cannot be read, contradicts itself or the model's shape, or holds no assignment.
    """
    used, highest, first_step, seen, width = 0, -1, None, dict[Place, bool](), None
    for piece in dump.pieces():
        first_step = piece.step if first_step is None else first_step
        if isinstance(piece, Counts):
            seen[piece.place] = bool(piece.load_E.any()) or seen.get(piece.place, False)
        elif isinstance(piece, Decisions):
            ids_TK = piece.experts_TK
            width = ids_TK.shape[1] if width is None else width
            if ids_TK.shape[1] != width:
                raise DumpError(dump.file, f"step {piece.step} has top_k {ids_TK.shape[1]}, those before have {width}")
            _check_ids(dump, piece)
            columns = np.flatnonzero((ids_TK >= 0).any(axis=0))
            used = max(used, int(columns[-1]) + 1 if len(columns) else 0)
            highest = max(highest, int(ids_TK.max(initial=-1)))
            seen[piece.place] = bool(len(columns)) or seen.get(piece.place, False)
    if len(seen) > _MOST_LAYERS:
        raise DumpError(dump.file, f"has {len(seen)} layers, expected at most {_MOST_LAYERS}")
    active = sorted(place for place, found in seen.items() if found)
    if first_step is None or not active:
        raise DumpError(dump.file, "holds no assignment of a token to an expert")
    if max(highest + 1, dump.num_experts or 0, shape.num_experts if shape else 0) > _MOST_EXPERTS:
        raise DumpError(dump.file, f"has experts beyond number {_MOST_EXPERTS - 1}, expected ids of experts")
    top_k = (dump.top_k or used) if width is not None else None
    return Contents(
        layers=_number(dump, shape, active, list(seen)),
        routers={place: number for number, place in enumerate(active)},
        num_experts=_num_experts(dump, shape, highest, top_k),
        top_k=_top_k(dump, shape, top_k),
        first_step=first_step,
        has_decisions=width is not None,
    )


def model_entry(contents: Contents, dump: Dump, shape: ModelShape | None) -> dict[str, Any]:
    """The manifest's `model`: the routers found and, where the model is known, its other layers too."""
    layers = {}
    if shape is not None:
        for index in range(shape.num_layers):
            moe = index in shape.moe_layers
            layers[index] = {"index": index, "kind": "moe" if moe else "dense", "router": None}
            layers[index] |= {"num_experts": shape.num_experts, "top_k": shape.top_k} if moe else {}
    for place, index in contents.layers.items():
        layers[index] = {
            "index": index,
            "module": None if place.container == LAYERS else f"{place.container}.{place.number}",
            "kind": "moe",
            "router": contents.routers[place],
            "num_experts": contents.num_experts,
            "top_k": contents.top_k,
            "score_function": dump.score_functions.get(place) or (shape.score_function if shape else None),
        }
    return {
        "name": shape.name if shape else None,
        "d_model": shape.d_model if shape else None,
        "vocab_size": shape.vocab_size if shape else None,
        "layers": [layers[index] for index in sorted(layers)],
    }


def _check_ids(dump: Dump, piece: Decisions) -> None:
    if dump.num_experts is not None and piece.experts_TK.max(initial=-1) >= dump.num_experts:
        raise DumpError(
            dump.file,
            f"step {piece.step}, layer {piece.place.number} has expert id {piece.experts_TK.max()}, "
            f"expected 0 to {dump.num_experts - 1}",
        )
    ordered = np.sort(piece.experts_TK, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token = int(np.flatnonzero(twice.any(axis=1))[0])
        raise DumpError(
            dump.file,
            f"step {piece.step}, layer {piece.place.number}, token {piece.first_token + token} takes an expert twice: "
            f"{piece.experts_TK[token].tolist()}",
        )


def _number(dump: Dump, shape: ModelShape | None, active: list[Place], places: list[Place]) -> dict[Place, int]:
    """Layer indices in the whole model; containers beside the main one (multi-token prediction) follow after it."""
    main = [place for place in places if place.container in (LAYERS, DECODER)]
    index = {place: place.number for place in main}
    if shape is not None and dump.width is not None:
        if dump.width == len(shape.moe_layers) != shape.num_layers:
            index = {place: shape.moe_layers[place.number] for place in main}
        elif dump.width != shape.num_layers:
            raise DumpError(
                dump.file,
                f"has {dump.width} layers, {shape.name} has {shape.num_layers}, {len(shape.moe_layers)} of them MoE",
            )
    wrong = [index[place] for place in main if place in active and shape and index[place] not in shape.moe_layers]
    if wrong and shape is not None:
        raise DumpError(dump.file, f"has assignments in layer {wrong[0]}, which is no MoE layer of {shape.name}")
    following = shape.num_layers if shape else max(index.values(), default=-1) + 1
    others = [place for place in active if place not in index]
    index |= {place: following + number for number, place in enumerate(others)}
    silent = sorted(index[place] for place in main if place not in active)
    if silent:
        dump.note(f"no assignment in layers {', '.join(map(str, silent))}: dense or not recorded, left out")
    return {place: index[place] for place in active}


def _num_experts(dump: Dump, shape: ModelShape | None, highest: int, top_k: int | None) -> int:
    if shape is not None:
        if dump.num_experts not in (None, shape.num_experts):
            raise DumpError(dump.file, f"has {dump.num_experts} experts, {shape.name} has {shape.num_experts}")
        if highest >= shape.num_experts:
            raise DumpError(dump.file, f"has expert id {highest}, {shape.name} has {shape.num_experts} experts")
        return shape.num_experts
    if dump.num_experts is not None:
        return dump.num_experts
    number = max(highest + 1, top_k or 1)
    dump.note(f"the dump does not tell how many experts there are: {number} by the highest id, --model tells")
    return number


def _top_k(dump: Dump, shape: ModelShape | None, top_k: int | None) -> int | None:
    if shape is None:
        return top_k
    if top_k not in (None, shape.top_k):
        raise DumpError(dump.file, f"has top_k {top_k}, {shape.name} has {shape.top_k}")
    return shape.top_k
