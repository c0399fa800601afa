"""What a comparison says in its titles: who leaves experts idle, which run is lowest, and ties as ties."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.comparison import Compared, Window
from app.comparison_metrics import BY_KEY, Measured, best_runs, noise
from app.words import count, listed, value

_PHRASES = {
    "none": "without a balancer",
    "aux": "with the aux loss",
    "sign-bias": "with the sign bias",
    "quantile": "with quantiles",
}
_IDLE, _BUSIEST = "idle_experts", "max_violation_window"
_ALL_NAMED = 3  # more runs than these, and only the lowest and the highest are named


# --------------------------------------------------------------------------------------------------- of the page


def answer(runs: Sequence[Compared], found: Sequence[Measured], window: Window) -> str:
    """Which run leaves most experts idle and which fewest, each in its worst layer; where none does, the busiest."""
    phrase = _phrases(runs)
    worst = [_worst(one, _IDLE, per_expert=True) for one in found]
    known = [(layer[_IDLE] / layer["num_experts"], i, layer) for i, layer in enumerate(worst) if layer]
    if len(known) < 2:
        return "Too little load was recorded to compare these runs"
    most, least = max(known, key=lambda item: item[0]), min(known, key=lambda item: item[0])
    if most[0] > least[0]:
        there = _idle_words(most[2])
        spotless = sum(share == 0 for share, _, _ in known)
        if spotless > 1:
            others = len(known) - 1
            which = f"the other {others}" if spotless == others else f"{spotless} of the other {others}"
            return _sentence(f"{_opening(phrase[most[1]])} {there}; in {which} runs none does")
        some = "none does" if spotless else _idle_words(least[2], short=True)
        tie = _tie(_IDLE, runs, [most[1:], least[1:]], window)
        return _sentence(f"{_opening(phrase[most[1]])} {there}; {_opening(phrase[least[1]])} {some}{tie}")
    if most[0] > 0:
        numbers = listed([f"{value(layer[_IDLE])} of {layer['num_experts']}" for _, _, layer in known])
        return f"As many experts sit idle in each of these runs: {numbers} in the worst layer"
    busiest = [_worst(one, _BUSIEST) for one in found]
    ratios = [(layer[_BUSIEST] + 1, i, layer) for i, layer in enumerate(busiest) if layer]
    low, high = min(ratios, key=lambda item: item[:2]), max(ratios, key=lambda item: item[:2])
    text = f"No expert sits idle; the busiest takes {value(low[0])} times the uniform share"
    if value(low[0]) == value(high[0]):
        return f"{text} in each of these runs"
    tie = _tie(_BUSIEST, runs, [low[1:], high[1:]], window)
    return f"{text} {phrase[low[1]]}, {value(high[0])} times {phrase[high[1]]}{tie}"


def _tie(key: str, runs: Sequence[Compared], ends: Sequence[tuple[int, Mapping[str, Any]]], window: Window) -> str:
    """ ": no more than noise" where the two ends, each (place of a run, its worst layer), are not told apart."""
    (one, its), (other, others) = ends
    most = noise(BY_KEY[key], (runs[one], its["key"]), (runs[other], others["key"]), window)
    return ": no more than noise" if abs(others[key] - its[key]) <= most else ""


def _worst(found: Measured, key: str, *, per_expert: bool = False) -> Any:
    layers = [layer for layer in found.layers if layer[key] is not None and layer["num_experts"]]
    return max(layers, key=lambda layer: layer[key] / (layer["num_experts"] if per_expert else 1), default=None)


def _idle_words(layer: Mapping[str, Any], *, short: bool = False) -> str:
    idle, experts = int(layer[_IDLE]), layer["num_experts"]
    if short:
        return f"{idle} of {experts} in layer {layer['label']}"
    return f"{idle} of {experts} experts {'sits' if idle == 1 else 'sit'} idle in layer {layer['label']}"


def _phrases(runs: Sequence[Compared]) -> list[str]:
    """ "with quantiles" where balancers tell all these runs apart, else "in run a"."""
    balancers = [str(one.run.config.get("balancer")) for one in runs]
    if len(set(balancers)) == len(runs) and all(balancer in _PHRASES for balancer in balancers):
        return [_PHRASES[balancer] for balancer in balancers]
    return [f"in run {one.label}" for one in runs]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _opening(phrase: str) -> str:
    """A comma behind a run's name, which may well end in a number."""
    return f"{phrase}," if phrase.startswith("in run ") else phrase


# -------------------------------------------------------------------------------------------------- of the charts


def standing(
    key: str, runs: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window, digits: int = 3
) -> str:
    """The runs' values of a metric, of many the lowest and the highest: "2.31 (a), 2.4 (b)", and what is a tie."""
    metric = BY_KEY[key]
    values = [(one.label, its.value(metric, layer)) for one, its in zip(runs, found, strict=True)]
    known = [(label, number) for label, number in values if number is not None]
    if len(runs) <= _ALL_NAMED or not known:
        text = ", ".join(f"{value(number, digits)} ({label})" for label, number in values)
    else:
        low, high = min(known, key=lambda item: item[1]), max(known, key=lambda item: item[1])
        text = f"{value(low[1], digits)} ({low[0]}) to {value(high[1], digits)} ({high[0]})"
        if value(low[1], digits) == value(high[1], digits):
            text = f"{value(low[1], digits)} in all runs"
    winners = best_runs(metric, runs, found, layer, window) or []
    if len(winners) < 2 or len({number for _, number in known}) == 1:
        return text
    if len(winners) == len(runs):
        return f"{text}: equal within noise"
    tied = listed(winners) if len(winners) <= _ALL_NAMED else f"the best {len(winners)}"
    return f"{text}; {tied} are equal within noise"


def of_groups(key: str, grouped: Mapping[str, Sequence[Compared]], by_label: Mapping[str, Measured], layer: int) -> str:
    """Each group's mean of a metric with its spread: "aux 2.31 ± 0.02 (3 runs), none 2.5 (1 run)"."""
    parts = []
    for name, members in grouped.items():
        values = [by_label[one.label].value(BY_KEY[key], layer) for one in members]
        known = [number for number in values if number is not None]
        if not known:
            parts.append(f"{name} -")
            continue
        spread = f" ± {value(float(np.std(known, ddof=1)), 2)}" if len(known) > 1 else ""
        parts.append(f"{name} {value(float(np.mean(known)), 4)}{spread} ({count(len(known), 'run')})")
    return ", ".join(parts)
