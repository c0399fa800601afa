"""What each run comes to over the shared window, and which run is better where that is defined.

Shape suffixes: S steps of the window, E experts, B stretches of the window, R runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import streamlit as st

from app import data, layer_keys
from app.comparison import WINDOW, Compared, Window
from app.comparison_noise import margin, pseudo_values
from app.comparison_settings import settings
from app.layer_stats import LayerStats
from app.words import listed
from moe_core import metrics
from recorder.reader import Run
from recorder.storage import Place

# What must agree for cross-entropies to measure the same thing: the text and how it is cut into tokens.
_SAME_TEXT = ("task", "corpus", "vocab_size", "seq_len")
CE_LOSS, HELD_OUT = "ce_loss", "held_out_loss"
# What must agree besides for held-out ones: the sequences of the probe are drawn by the seed.
_SAME_PROBE = ("batch_size", "seed")
EQUAL, WITHIN_NOISE = "equal", "equal within noise"


def _mean(values: Any) -> float | None:
    finite = np.atleast_1d(np.asarray(values, dtype=np.float64))
    finite = finite[np.isfinite(finite)]
    return float(finite.mean()) if finite.size else None


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _drop_rate(stats: LayerStats, rows: Any) -> float | None:
    dropped_S = stats.dropped_SE[rows].sum(axis=-1)  # NaN where not recorded
    return _mean(metrics.drop_rate(dropped_S, stats.load_SE[rows].sum(axis=-1)))


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A line of the metric table: what is better ("lower", "higher" or None), and what must agree for that.

    of  its value over some rows of a layer; None for the cross-entropies, which are of the whole model
    """

    key: str
    name: str
    meaning: str
    of: Callable[[LayerStats, Any], float | None] | None = None
    better: str | None = None
    same_shape: bool = True


METRICS = (
    Metric(
        key=CE_LOSS,
        name="cross-entropy (nats per token)",
        meaning="mean of ce_loss, aux losses not in it",
        better="lower",
        same_shape=False,
    ),
    Metric(
        key=HELD_OUT,
        name="held-out cross-entropy (nats per token)",
        meaning="the same of the probes within the window: one batch that is never trained on",
        better="lower",
        same_shape=False,
    ),
    Metric(
        key="max_violation",
        name="max_violation, batch",
        meaning="max(load) / mean(load) - 1 of each step, mean of the steps; 0 is balanced, at most E/k - 1",
        of=lambda stats, rows: _mean(metrics.max_violation(stats.load_SE[rows])),
        better="lower",
    ),
    Metric(
        key="max_violation_window",
        name="max_violation, window",
        meaning="the same of the loads summed over the window, free of the noise of single batches",
        of=lambda stats, rows: _number(metrics.max_violation(stats.load_SE[rows].sum(axis=0))),
        better="lower",
    ),
    Metric(
        key="idle_experts",
        name="idle experts",
        meaning="below a tenth of the uniform share of the summed loads, dead ones included; at most E",
        of=lambda stats, rows: _number(metrics.idle_experts(stats.load_SE[rows].sum(axis=0))),
        better="lower",
    ),
    Metric(
        key="dead_experts",
        name="dead experts",
        meaning="no assignment in the window at all; at most E",
        of=lambda stats, rows: _number(metrics.dead_experts(stats.load_SE[rows].sum(axis=0))),
        better="lower",
    ),
    Metric(
        key="load_entropy",
        name="load entropy",
        meaning="entropy of the shares of the load / ln E, mean of the steps; 1 is balanced, 0 one expert for all",
        of=lambda stats, rows: _mean(metrics.load_entropy(stats.load_SE[rows])),
        better="higher",
    ),
    Metric(
        key="router_entropy",
        name="router entropy",
        meaning="entropy of each token's router probabilities / ln E, mean; 1 is undecided, 0 is certain",
        of=lambda stats, rows: _mean(stats.router_entropy_S[rows]),
    ),
    Metric(
        key="aux_loss",
        name="aux loss, normalised",
        meaning="E * sum of f_i P_i from load and mean_prob, no coefficient, mean of the steps; 1 is uniform",
        of=lambda stats, rows: _mean(metrics.aux_loss(stats.load_SE[rows], stats.mean_prob_SE[rows])),
    ),
    Metric(
        key="drop_rate",
        name="drop rate",
        meaning="assignments that capacity dropped / all of them, mean of the steps; 0 to 1",
        of=_drop_rate,
        better="lower",
        same_shape=False,
    ),
)
BY_KEY = {metric.key: metric for metric in METRICS}
OF_LAYERS = tuple(metric for metric in METRICS if metric.of is not None)


# ------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run comes to over the window.

    losses   mean cross-entropy by the key of its metric; None where none was recorded or one is not finite
    layers   a dict for each layer: key, label, num_experts, top_k and the key of every metric of a layer
    """

    losses: Mapping[str, float | None]
    layers: list[dict[str, Any]]

    def of_layer(self, layer: int) -> Mapping[str, Any]:
        """The entry of one layer, by its key; {} where the run has no such layer."""
        return next((entry for entry in self.layers if entry["key"] == layer), {})

    def value(self, metric: Metric, layer: int) -> float | None:
        """A metric, of `layer` where it is one of a layer; None where there is no value."""
        return self.losses[metric.key] if metric.of is None else self.of_layer(layer).get(metric.key)


def measure(one: Compared, window: Window) -> Measured:
    """The run over the window, every layer. Cached."""
    steps = window.steps if window.shared else None
    return _measure(one.run.path, hash(one.run.fingerprint), steps, one.run)


@st.cache_data(max_entries=64, show_spinner=False)
def _measure(path: Place, fingerprint: int, steps: tuple[int, ...] | None, _run: Run) -> Measured:
    found = []
    for key in layer_keys.keys(_run):
        stats = data.layer_stats(_run, key)
        entry = {"key": key, "label": stats.label, "num_experts": stats.num_experts, "top_k": stats.top_k}
        found.append(entry | _values(stats, steps))
    return Measured(losses={CE_LOSS: mean_loss(_run, steps), HELD_OUT: _held_out_loss(_run, steps)}, layers=found)


def noise(metric: Metric, first: tuple[Compared, int], second: tuple[Compared, int], window: Window) -> float:
    """Up to where a difference of two runs in a metric over the window is noise of the steps, each run with its layer.

    Half the 95% interval of the difference, from what each stretch of the window adds to it. NaN where a run has no
    value or the window is too short.
    """
    parts = [_by_stretch(one, metric, layer, window) for one, layer in (first, second)]
    return float("nan") if parts[0] is None or parts[1] is None else margin(parts[1] - parts[0])


def _by_stretch(one: Compared, metric: Metric, layer: int, window: Window) -> np.ndarray | None:
    """What each stretch adds to a metric, (B,); None where there is no value. Cached."""
    if not window.stretches or (metric.of is not None and layer not in one.layers):
        return None
    return _of_stretches(one.run.path, hash(one.run.fingerprint), metric.key, layer, window, one.run)


# A page asks for the same of each run many times: for the table, for titles, and against every other run.
@st.cache_data(max_entries=512, show_spinner=False, hash_funcs={Window: lambda window: window.steps})
def _of_stretches(path: Place, fingerprint: int, key: str, layer: int, window: Window, _run: Run) -> np.ndarray | None:
    metric = BY_KEY[key]
    sets = [window.steps, *(tuple(step for step in window.steps if step not in some) for some in window.stretches)]
    if metric.of is None:
        # a window holds two or three probes: nothing tells how far they waver
        values = [None] if key == HELD_OUT else _losses(_run, sets)
    else:
        stats = data.layer_stats(_run, layer)
        values = [metric.of(stats, np.isin(stats.steps_S, steps)) for steps in sets]
    known = [number for number in values if number is not None]
    return pseudo_values(known[0], known[1:]) if len(known) == len(sets) else None


def _held_out_loss(run: Run, steps: tuple[int, ...] | None) -> float | None:
    """Mean cross-entropy of the probes between the first and last of these steps, or of the run's own last ones."""
    if "probe" not in data.phases(run) or data.main_phase(run) == "probe" or data.steps(run).empty:
        return None
    probes = _probes(run, steps or tuple(data.steps(run)["step"].tail(WINDOW)))
    return _losses(run, [probes], phase="probe")[0] if probes else None


def _probes(run: Run, steps: tuple[int, ...]) -> tuple[int, ...]:
    """The probes between the first and the last of these steps."""
    return tuple(step for step in data.steps(run, "probe")["step"].tolist() if steps[0] <= step <= steps[-1])


def _values(stats: LayerStats, steps: tuple[int, ...] | None) -> dict[str, float | None]:
    rows = slice(-WINDOW, None) if steps is None else np.isin(stats.steps_S, steps)
    if not stats.steps_S[rows].size:
        return dict.fromkeys((metric.key for metric in OF_LAYERS), None)
    return {metric.key: metric.of(stats, rows) for metric in OF_LAYERS if metric.of is not None}


def mean_loss(run: Run, steps: tuple[int, ...] | None, column: str = CE_LOSS) -> float | None:
    """Mean of a loss over these steps, or over the run's own last ones; None where none was recorded or not finite."""
    frame = data.steps(run)
    return _losses(run, [tuple(frame["step"].tail(WINDOW)) if steps is None else steps], column)[0]


def _losses(
    run: Run, each: Sequence[tuple[int, ...]], column: str = CE_LOSS, phase: str = data.MAIN
) -> list[float | None]:
    """Mean of a loss over each of these sets of steps; None where none was recorded or one is not finite."""
    frame = data.steps(run, phase)
    recorded_S = frame[column].notna().to_numpy(bool)
    steps_S = frame["step"].to_numpy(np.int64)[recorded_S]
    values_S = frame[column].to_numpy(np.float64, na_value=np.nan)[recorded_S]
    known = [values_S[np.isin(steps_S, steps)] for steps in each]
    return [_number(some.mean()) if some.size else None for some in known]


# --------------------------------------------------------------------------------------------- which one is better


def not_comparable(metric: Metric, runs: Sequence[Compared], layer: int, window: Window) -> str | None:
    """Why a difference of these runs in this metric says nothing; None where it does."""
    if not window.shared:
        return "no step is shared"
    if metric.of is None:
        each = [settings(one.run.manifest) for one in runs]
        needed = _SAME_TEXT + (_SAME_PROBE if metric.key == HELD_OUT else ())
        unlike = [key for key in needed if len({str(one.get(key)) for one in each}) > 1]
        unknown = [key for key in needed if any(key not in one for one in each)]
        if unlike or unknown:
            return f"{listed(unlike or unknown)} {'differ' if unlike else 'not known'}"
        if metric.key == HELD_OUT and len({_probes(one.run, window.steps) for one in runs}) > 1:
            return "they were probed at other steps"
        return None
    shapes = {one.shape(layer) for one in runs}
    if (None, None) in shapes:
        return "some have no such layer"
    return "experts or top-k differ" if len(shapes) > 1 and metric.same_shape else None


def no_better(metric: Metric, runs: Sequence[Compared], layer: int, window: Window) -> str | None:
    """Why no run may be called better in this metric; None where one may."""
    if metric.better is None:
        return "no side of it is better"
    reason = not_comparable(metric, runs, layer, window)
    if reason is None and metric.key == HELD_OUT:
        return "a window holds too few probes to tell a difference from noise"
    if reason is None and metric.of is None:
        active = {(one.run.manifest.get("model") or {}).get("parameters_active") for one in runs}
        return "active parameters differ" if len(active) > 1 else None
    return reason


def best_runs(
    metric: Metric, runs: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window
) -> list[str] | None:
    """The labels of the best run and of those as good as it within noise; None where that is not defined.

    Another run is as good where its distance from the best one is within `noise`. Where the window is too short for
    that, only equal values are said to be equal, and nothing else.
    """
    values = [one.value(metric, layer) for one in found]
    known = [number for number in values if number is not None]
    if no_better(metric, runs, layer, window) is not None or len(known) < len(values):
        return None
    if len(set(known)) == 1:
        return [one.label for one in runs]
    best = known.index(min(known) if metric.better == "lower" else max(known))
    winners = []
    for number, one in enumerate(runs):
        most = 0.0 if number == best else noise(metric, (runs[best], layer), (one, layer), window)
        if np.isnan(most):
            return None
        if abs(known[number] - known[best]) <= most:
            winners.append(one.label)
    return winners


def better_words(
    metric: Metric, runs: Sequence[Compared], found: Sequence[Measured], layer: int, window: Window
) -> Any:
    """ "aux", "aux and quantile", "equal within noise" or "equal"; None where no run may be called better."""
    winners = best_runs(metric, runs, found, layer, window)
    if winners is None:
        return None
    if len(winners) < len(runs):
        return listed(winners)
    return EQUAL if len({one.value(metric, layer) for one in found}) == 1 else WITHIN_NOISE
