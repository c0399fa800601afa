"""Several runs put side by side: which to start with, the steps they share, what they come to there, and in words.

Shape suffixes: S recorded steps, E experts.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from app import data, layer_keys
from app.figures.theme import OKABE_ITO
from app.words import listed, value
from moe_core import metrics
from recorder.reader import Run

WINDOW = metrics.WINDOW
_NO_SHAPE = (None, None)
_PHRASES = {
    "none": "without a balancer",
    "aux": "with the aux loss",
    "sign-bias": "with the sign bias",
    "quantile": "with quantiles",
}
# What must agree for cross-entropies to measure the same thing: the text and how it is cut into tokens.
_SAME_TEXT = ("task", "corpus", "vocab_size", "seq_len")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run among those compared.

    `label` names it to a person, `reference` in a URL; `colour` is its place in the order of colours.
    """

    label: str
    reference: str
    colour: int
    run: Run

    @property
    def layers(self) -> list[int]:
        """The keys of its routers, see `app.layer_keys`."""
        return layer_keys.keys(self.run)

    def agrees(self, other: "Compared") -> bool:
        """Whether what both call by one key is called alike: layers of one router each, or the same several."""
        own, others = layer_keys.labels(self.run), layer_keys.labels(other.run)
        return all(own[key] == others[key] for key in own.keys() & others.keys())

    def shape(self, layer: int) -> tuple[int | None, int | None]:
        """Number of experts and top-k of a layer; (None, None) where it is no MoE layer of this run."""
        if layer not in self.layers:
            return _NO_SHAPE
        stats = data.layer_stats(self.run, layer)
        return stats.num_experts, stats.top_k


@dataclass(frozen=True, kw_only=True)
class Window:
    """The steps that metrics are taken over. `shared` is False where the runs share none: each has its own last ones.

    words  "the last 50 steps that all these runs recorded (350 to 399)"
    """

    steps: tuple[int, ...]
    shared: bool
    words: str

    @property
    def short(self) -> str:
        """ "last 50 shared steps", for titles."""
        if not self.shared:
            return f"last {WINDOW} steps of each"
        return f"last {len(self.steps)} shared steps" if len(self.steps) > 1 else "shared step"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A line of the metric table: what is better ("lower", "higher" or None), and what must agree for that."""

    key: str
    name: str
    meaning: str
    better: str | None = None
    same_shape: bool = True


METRICS = (
    Metric(
        key="ce_loss",
        name="cross-entropy (nats per token)",
        meaning="mean of ce_loss, aux losses not in it",
        better="lower",
        same_shape=False,
    ),
    Metric(
        key="max_violation",
        name="max_violation, batch",
        meaning="max(load) / mean(load) - 1 of each step, mean of the steps; 0 is balanced, at most E/k - 1",
        better="lower",
    ),
    Metric(
        key="max_violation_window",
        name="max_violation, window",
        meaning="the same of the loads summed over the window, free of the noise of single batches",
        better="lower",
    ),
    Metric(
        key="idle_experts",
        name="idle experts",
        meaning="below a tenth of the uniform share of the summed loads, dead ones included; at most E",
        better="lower",
    ),
    Metric(
        key="dead_experts", name="dead experts", meaning="no assignment in the window at all; at most E", better="lower"
    ),
    Metric(
        key="load_entropy",
        name="load entropy",
        meaning="entropy of the shares of the load / ln E, mean of the steps; 1 is balanced, 0 one expert for all",
        better="higher",
    ),
    Metric(
        key="router_entropy",
        name="router entropy",
        meaning="entropy of each token's router probabilities / ln E, mean; 1 is undecided, 0 is certain",
    ),
    Metric(
        key="aux_loss",
        name="aux loss, normalised",
        meaning="E * sum of f_i P_i from load and mean_prob, no coefficient, mean of the steps; 1 is uniform",
    ),
    Metric(
        key="drop_rate",
        name="drop rate",
        meaning="assignments that capacity dropped / all of them, mean of the steps; 0 to 1",
        better="lower",
        same_shape=False,
    ),
)


# ------------------------------------------------------------------------------------------------------ choosing


def default_pair(runs: Sequence[data.Listed], shown: str | None = None) -> list[str]:
    """References of the two runs to start with. Runs that cannot be read do not count.

    With `shown`, the reference of a run: that one and the other whose model and settings differ least from its, with
    another balancer if possible. Else aux loss and quantile where there are both, of several such pairs the one that
    differs least; else the first run and the one most like it.
    """
    readable = [run for run in runs if run.info.status != "unreadable"]
    first = [run for run in readable if run.reference == shown]
    pairs = [] if first else list(itertools.product(*(_with_balancer(readable, name) for name in ("aux", "quantile"))))
    first = first or readable[:1]
    pairs = pairs or [(one, other) for one in first for other in readable if other is not one]
    best = min(
        pairs,
        key=lambda pair: (_differences(*pair), _balancer(pair[0]) == _balancer(pair[1])),
        default=tuple(first),
    )
    return [run.reference for run in best]


def colours(chosen: Sequence[str], known: Iterable[str]) -> dict[str, int]:
    """A place in the order of colours for each chosen run: its place among all runs, so that it keeps its colour.

    Where two would meet on one colour, the later one takes the next that is free.
    """
    place = {reference: number for number, reference in enumerate(known)}
    taken: dict[str, int] = {}
    for reference in chosen:
        first = place.get(reference, 0) % len(OKABE_ITO)
        candidates = [(first + more) % len(OKABE_ITO) for more in range(len(OKABE_ITO))]
        taken[reference] = next((c for c in candidates if c not in taken.values()), first)
    return taken


def _with_balancer(runs: Sequence[data.Listed], balancer: str) -> list[data.Listed]:
    return [run for run in runs if _balancer(run) == balancer]


def _balancer(run: data.Listed) -> Any:
    return _settings(run).get("balancer")


def _settings(run: data.Listed) -> Mapping[str, Any]:
    """What the manifest says of model and configuration, in one."""
    manifest = run.info.manifest or {}
    return (manifest.get("model") or {}) | (manifest.get("config") or {})


def _differences(one: data.Listed, other: data.Listed) -> int:
    a, b = _settings(one), _settings(other)
    return sum(a.get(key) != b.get(key) for key in {*a, *b} - {"name", "balancer"})


# ----------------------------------------------------------------------------------------------------- the window


def recorded_steps(run: Run, layer: int) -> np.ndarray:
    """Steps with a recorded load in the phase a run is judged by, ascending: of `layer`, else of its first one."""
    layers = layer_keys.keys(run)
    return data.layer_stats(run, layer if layer in layers else layers[0]).steps_S


def shared_steps(runs: Sequence[Compared], layer: int) -> np.ndarray:
    """The steps that all these runs recorded, ascending, int64."""
    steps_S = recorded_steps(runs[0].run, layer)
    for one in runs[1:]:
        steps_S = np.intersect1d(steps_S, recorded_steps(one.run, layer))
    return steps_S


def window_of(steps_S: np.ndarray, window: int = WINDOW) -> Window:
    """The last shared steps, at most `window` of them."""
    last = tuple(steps_S[-window:].tolist())
    if not last:
        return Window(steps=(), shared=False, words=f"each run's own last {window} recorded steps")
    if len(last) == 1:
        return Window(steps=last, shared=True, words=f"the one step that all these runs recorded ({last[0]:,})")
    number = f"the last {len(last)}" if len(last) < len(steps_S) else f"the {len(last)}"
    words = f"{number} steps that all these runs recorded ({last[0]:,} to {last[-1]:,})"
    return Window(steps=last, shared=True, words=words)


class _AtSteps:
    """A run as if it had recorded these steps alone, for `recorder.summary`."""

    def __init__(self, run: Run, steps: tuple[int, ...]) -> None:
        self._run, self._at = run, steps
        self.path, self.fingerprint = run.path, (run.fingerprint, steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def steps(self, phase: str | None = None) -> pd.DataFrame:
        return self._only(self._run.steps(phase))

    def layer_stats(self, *args: Any, **settings: Any) -> pd.DataFrame:
        return self._only(self._run.layer_stats(*args, **settings))

    def _only(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["step"].isin(self._at).to_numpy(bool)]


def summary(one: Compared, window: Window) -> dict[str, Any]:
    """`recorder.summary.summarise` over the window, each layer's `aux_loss` computed from load and mean_prob."""
    run = cast(Run, _AtSteps(one.run, window.steps)) if window.shared else one.run
    found = data.summary(run, max(len(window.steps), 1) if window.shared else WINDOW)
    layers = [{**layer, "aux_loss": _aux_loss(one.run, layer["key"], window)} for layer in found["layers"]]
    return {**found, "layers": layers}


def _aux_loss(run: Run, layer: int, window: Window) -> float | None:
    stats = data.layer_stats(run, layer)
    rows = np.isin(stats.steps_S, window.steps) if window.shared else slice(-WINDOW, None)
    if not len(stats.steps_S[rows]):
        return None
    values_S = np.asarray(metrics.aux_loss(stats.load_SE[rows], stats.mean_prob_SE[rows]))
    values_S = values_S[np.isfinite(values_S)]
    return float(values_S.mean()) if values_S.size else None


def of_layer(found: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """A summary's entry for one layer, by its key; {} where the run has no such layer."""
    return next((entry for entry in found["layers"] if entry["key"] == layer), {})


# ------------------------------------------------------------------------------------------------------ the table


def table(runs: Sequence[Compared], summaries: Sequence[Mapping[str, Any]], layer: int, window: Window) -> pd.DataFrame:
    """A line for each of METRICS: the runs' values for one layer, the better run where that is defined, the meaning.

    Of two runs also the difference, second minus first.
    """
    two = len(runs) == 2
    lines = []
    for metric in METRICS:
        values: list[Any] = [
            found["losses"]["ce_loss"] if metric.key == "ce_loss" else of_layer(found, layer).get(metric.key)
            for found in summaries
        ]
        comparable = window.shared and _comparable(metric, runs, layer) and None not in values
        line: dict[str, Any] = {"metric": metric.name}
        line |= {_column(one.label): number for one, number in zip(runs, values, strict=True)}
        if two:
            line["difference"] = values[1] - values[0] if comparable else None
        if metric.key == "ce_loss":
            line["better"] = _lower_loss(runs, window) if comparable else None
        else:
            line["better"] = _better(metric, runs, values) if comparable else None
        line["what it is"] = metric.meaning
        lines.append(line)
    frame = pd.DataFrame(lines)
    numeric = [*(_column(one.label) for one in runs), *(["difference"] if two else [])]
    return frame.astype(dict.fromkeys(numeric, "Float64"))


def every_layer(runs: Sequence[Compared], summaries: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A line for each run and layer with all metrics of a layer, and its experts and top-k."""
    keys = [metric.key for metric in METRICS if metric.key != "ce_loss"]
    lines = [
        {"run": one.label, "layer": entry["label"], "experts": entry["num_experts"], "top_k": entry["top_k"]}
        | {key: entry[key] for key in keys}
        for one, found in zip(runs, summaries, strict=True)
        for entry in found["layers"]
    ]
    frame = pd.DataFrame(lines, columns=["run", "layer", "experts", "top_k", *keys])
    whole = ("experts", "top_k", "idle_experts", "dead_experts")
    types = {name: "Int64" if name in whole else "Float64" for name in frame if name not in ("run", "layer")}
    named = any(isinstance(entry, str) for entry in frame["layer"])
    return frame.astype(types | {"layer": "str" if named else "Int64"})


def _comparable(metric: Metric, runs: Sequence[Compared], layer: int) -> bool:
    if metric.key == "ce_loss":
        configs = [one.run.config for one in runs]
        return all(key in config and config[key] == configs[0].get(key) for config in configs for key in _SAME_TEXT)
    shapes = {one.shape(layer) for one in runs}
    return _NO_SHAPE not in shapes and (len(shapes) == 1 or not metric.same_shape)


def _better(metric: Metric, runs: Sequence[Compared], values: Sequence[float]) -> str | None:
    if metric.better is None:
        return None
    best = min(values) if metric.better == "lower" else max(values)
    winners = [one.label for one, number in zip(runs, values, strict=True) if number == best]
    return "equal" if len(winners) == len(runs) else listed(winners)


def _lower_loss(runs: Sequence[Compared], window: Window) -> str | None:
    """The runs with the lowest cross-entropy, those within noise of it included; None where that says nothing.

    Noise is twice the standard error of the differences at the same steps. Runs of other active parameters are not
    set against each other.
    """
    active = {(one.run.manifest.get("model") or {}).get("parameters_active") for one in runs}
    if len(active) > 1 or len(window.steps) < 2:
        return None
    losses = [data.steps(one.run).set_index("step")["ce_loss"].reindex(window.steps) for one in runs]
    losses_RS = np.array([loss.to_numpy(np.float64, na_value=np.nan) for loss in losses])
    if not np.isfinite(losses_RS).all():
        return None
    behind_RS = losses_RS - losses_RS[losses_RS.mean(axis=1).argmin()]
    error_R = behind_RS.std(axis=1, ddof=1) / np.sqrt(behind_RS.shape[1])
    winners = [one.label for one, near in zip(runs, behind_RS.mean(axis=1) <= 2 * error_R, strict=True) if near]
    return "equal within noise" if len(winners) == len(runs) else listed(winners)


def _column(label: str) -> str:
    return f"run {label}" if label in ("metric", "difference", "better", "what it is") else label


# ------------------------------------------------------------------------------------------------------- in words


def answer(runs: Sequence[Compared], summaries: Sequence[Mapping[str, Any]]) -> str:
    """Which run leaves most experts idle and which fewest, each in its worst layer; where none does, the busiest."""
    phrase = _phrases(runs)
    worst = [_worst(found, "idle_experts", per_expert=True) for found in summaries]
    known = [(layer["idle_experts"] / layer["num_experts"], i, layer) for i, layer in enumerate(worst) if layer]
    if len(known) < 2:
        return "Too little load was recorded to compare these runs"
    most, least = max(known, key=lambda item: item[0]), min(known, key=lambda item: item[0])
    if most[0] > least[0]:
        there = _idle_words(most[2])
        spotless = sum(share == 0 for share, _, _ in known)
        if spotless > 1:
            others = len(known) - 1
            which = f"the other {others}" if spotless == others else f"{spotless} of the other {others}"
            return _sentence(f"{phrase[most[1]]} {there}; in {which} runs none does")
        some = "none does" if spotless else _idle_words(least[2], short=True)
        return _sentence(f"{phrase[most[1]]} {there}; {phrase[least[1]]} {some}")
    if most[0] > 0:
        numbers = listed([f"{layer['idle_experts']} of {layer['num_experts']}" for _, _, layer in known])
        return f"As many experts sit idle in each of these runs: {numbers} in the worst layer"
    busiest = [_worst(found, "max_violation_window") for found in summaries]
    ratios = [(layer["max_violation_window"] + 1, i) for i, layer in enumerate(busiest) if layer]
    low, high = min(ratios), max(ratios)
    text = f"No expert sits idle; the busiest takes {value(low[0])} times the uniform share"
    if value(low[0]) == value(high[0]):
        return f"{text} in each of these runs"
    return f"{text} {phrase[low[1]]}, {value(high[0])} times {phrase[high[1]]}"


def _worst(found: Mapping[str, Any], key: str, *, per_expert: bool = False) -> Any:
    layers = [layer for layer in found["layers"] if layer[key] is not None and layer["num_experts"]]
    return max(layers, key=lambda layer: layer[key] / (layer["num_experts"] if per_expert else 1), default=None)


def _idle_words(layer: Mapping[str, Any], *, short: bool = False) -> str:
    idle, experts = layer["idle_experts"], layer["num_experts"]
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
