"""The tables of a comparison: runs by metrics, every layer, and groups of runs with their spread."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from app.comparison import Compared, Window
from app.comparison_metrics import (
    EQUAL,
    METRICS,
    OF_LAYERS,
    Measured,
    better_words,
    no_better,
    noise,
    not_comparable,
)
from app.comparison_noise import group_as_good

NOT_TOLD_APART = "not told apart"


def table(runs: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window) -> pd.DataFrame:
    """A line for each of METRICS: the runs' values for one layer, the better run where that is defined, the meaning.

    Of two runs also the difference, second minus first, and up to where such a difference is noise.
    """
    two = len(runs) == 2
    lines = []
    for metric in METRICS:
        values: list[Any] = [one.value(metric, layer) for one in found]
        line: dict[str, Any] = {"metric": metric.name}
        line |= {_column(one.label): number for one, number in zip(runs, values, strict=True)}
        if two:
            comparable = None not in values and not_comparable(metric, runs, layer, window) is None
            line["difference"] = values[1] - values[0] if comparable else None
            most = noise(metric, (runs[0], layer), (runs[1], layer), window) if comparable else np.nan
            line["noise up to"] = None if np.isnan(most) else most
        line["better"] = better_words(metric, runs, found, layer, window)
        line["what it is"] = metric.meaning
        lines.append(line)
    frame = pd.DataFrame(lines)
    numeric = [*(_column(one.label) for one in runs), *(["difference", "noise up to"] if two else [])]
    return frame.astype(dict.fromkeys(numeric, "Float64"))


def every_layer(runs: Sequence[Compared], found: Sequence[Measured]) -> pd.DataFrame:
    """A line for each run and layer with all metrics of a layer, and its experts and top-k."""
    keys = [metric.key for metric in OF_LAYERS]
    lines = [
        {"run": one.label, "layer": entry["label"], "experts": entry["num_experts"], "top_k": entry["top_k"]}
        | {key: entry[key] for key in keys}
        for one, its in zip(runs, found, strict=True)
        for entry in its.layers
    ]
    frame = pd.DataFrame(lines, columns=["run", "layer", "experts", "top_k", *keys])
    whole = ("experts", "top_k", "idle_experts", "dead_experts")
    types = {name: "Int64" if name in whole else "Float64" for name in frame if name not in ("run", "layer")}
    named = any(isinstance(entry, str) for entry in frame["layer"])
    return frame.astype(types | {"layer": "str" if named else "Int64"})


def group_table(
    grouped: Mapping[str, Sequence[Compared]],
    runs: Sequence[Compared],
    found: Sequence[Measured],
    layer: int,
    window: Window,
) -> pd.DataFrame:
    """A line for each metric and group of runs: how many runs have a value, their mean, spread and verdict.

    spread   standard deviation of the runs, n - 1 in it; none for one run
    verdict  best, worse, not told apart from the best, or all equal; none where a group has one run or no side is
             better
    """
    by_label = {one.label: its for one, its in zip(runs, found, strict=True)}
    lines = []
    for metric in METRICS:
        values = {
            name: [number for one in members if (number := by_label[one.label].value(metric, layer)) is not None]
            for name, members in grouped.items()
        }
        verdicts = {} if no_better(metric, runs, layer, window) else _verdicts(values, str(metric.better))
        for name, known in values.items():
            lines.append(
                {
                    "metric": metric.name,
                    "group": name,
                    "runs": len(known),
                    "mean": float(np.mean(known)) if known else None,
                    "spread": float(np.std(known, ddof=1)) if len(known) > 1 else None,
                    "lowest": min(known, default=None),
                    "highest": max(known, default=None),
                    "verdict": verdicts.get(name),
                }
            )
    numeric = ("mean", "spread", "lowest", "highest")
    return pd.DataFrame(lines).astype(dict.fromkeys(numeric, "Float64"))


def _verdicts(values: Mapping[str, Sequence[float]], better: str) -> dict[str, str | None]:
    means = {name: float(np.mean(known)) for name, known in values.items() if known}
    if len(means) < 2:
        return {}
    if len({number for known in values.values() for number in known}) == 1:
        return dict.fromkeys(means, EQUAL)
    best = (min if better == "lower" else max)(means, key=means.__getitem__)
    said: dict[str, str | None] = {}
    for name in means:
        near = group_as_good(values[best], values[name], better)
        said[name] = None if near is None else NOT_TOLD_APART if near else "worse"
    others = {said[name] for name in means if name != best}
    said[best] = "best" if others == {"worse"} else None if None in others else NOT_TOLD_APART
    return said


def _column(label: str) -> str:
    return f"run {label}" if label in ("metric", "difference", "noise up to", "better", "what it is") else label
