"""Runs side by side: what each came to, and how they differ at the last step that all recorded. Loads no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_core import metrics
from recorder.reader import Run
from recorder.summary import summarise

_SHAPE = ("num_experts", "top_k")
_UNMEASURED = ("layer", "router", *_SHAPE, "dead_ids", "idle_ids")


def compare(runs: Sequence[Run], window: int = metrics.WINDOW) -> dict[str, Any]:
    """Final losses and per-layer metrics of several runs, and their differences at the last shared step.

    A step is shared where every run recorded its losses and its loads in the phase it is judged by (a run that
    recorded only one of the two counts with that one). Differences are a run minus the first run; None where either has
    no value. Layers are held against each other by index (the routers of one layer by their order); the differences of
    a layer are None where the first run lacks it, or has another number of experts or top-k there: that moves the
    bounds.

    Args:
        runs: two or more, in the order in which they are shown; the first is the one that others are held against.
        window: recorded steps of the final metrics, at least 1, as in `recorder.summary.summarise`.

    Returns:
        {window, runs: [`summarise` of each, and path], shared_steps: {count, first, last}, last_shared_step: {step,
        runs: [{run_id, losses, layers}], differences: [{run_id, minus, losses, layers}]}}; last_shared_step is None
        where no step is shared. losses and layers have the keys of `summarise`, layers of differences without
        num_experts, top_k, dead_ids and idle_ids.

    Raises:
        ValueError: fewer than two runs, or a window below 1.
    """
    if len(runs) < 2:
        raise ValueError(f"two runs or more can be compared, got {len(runs)}")
    shared = _recorded_steps(runs[0])
    for run in runs[1:]:
        shared = np.intersect1d(shared, _recorded_steps(run))
    return {
        "window": window,
        "runs": [summarise(run, window) | {"path": str(run.path)} for run in runs],
        "shared_steps": {
            "count": int(shared.size),
            "first": int(shared[0]) if shared.size else None,
            "last": int(shared[-1]) if shared.size else None,
        },
        "last_shared_step": _at_step(runs, int(shared[-1])) if shared.size else None,
    }


def _recorded_steps(run: Run) -> np.ndarray:
    """Steps with losses and loads in the phase a run is judged by, ascending; those of one where it has no other."""
    losses = np.unique(run.steps(phase=run.main_phase)["step"].to_numpy(dtype=np.int64))
    loads = np.unique(run.layer_stats(phase=run.main_phase)["step"].to_numpy(dtype=np.int64))
    if not losses.size or not loads.size:
        return losses if losses.size else loads
    return np.intersect1d(losses, loads)


def _at_step(runs: Sequence[Run], step: int) -> dict[str, Any]:
    found = [summarise(run, 1, step=step) for run in runs]
    first = found[0]
    return {
        "step": step,
        "runs": [{key: one[key] for key in ("run_id", "losses", "layers")} for one in found],
        "differences": [
            {
                "run_id": other["run_id"],
                "minus": first["run_id"],
                "losses": _minus(other["losses"], first["losses"]),
                "layers": _layer_differences(other["layers"], first["layers"]),
            }
            for other in found[1:]
        ],
    }


def _layer_differences(
    layers: Sequence[Mapping[str, Any]], firsts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    by_place = dict(zip(_places(firsts), firsts, strict=True))
    found = []
    for place, layer in zip(_places(layers), layers, strict=True):
        measured = {key: value for key, value in layer.items() if key not in _UNMEASURED}
        first = by_place.get(place)
        alike = first is not None and all(first[name] == layer[name] for name in _SHAPE)
        difference = _minus(measured, first) if first is not None and alike else dict.fromkeys(measured)
        found.append({"layer": layer["layer"], "router": layer["router"]} | difference)
    return found


def _places(layers: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """(index, how many routers of that layer came before) of each: router numbers differ where other layers do."""
    seen: Counter[int] = Counter()
    found = []
    for layer in layers:
        found.append((layer["layer"], seen[layer["layer"]]))
        seen[layer["layer"]] += 1
    return found


def _minus(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`one` minus `other`, key by key; None where either has no value."""
    return {key: None if None in (value, other[key]) else value - other[key] for key, value in one.items()}
