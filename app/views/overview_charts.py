"""The charts of the overview: load by expert and step, max_violation, idle and dead experts, rerouted, shares.

Shapes: S recorded steps, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, data, layer_keys, navigation
from app.figures.balance_curves import share_area, unused_curves, violation_curves
from app.figures.curves import metric_curves
from app.figures.inputs import Curve, LoadSeries
from app.figures.load_heatmap import has_click_points, load_heatmap
from app.layer_stats import LayerStats
from app.words import count, listed, percent, value
from app.x_axis import XAxis
from moe_core import metrics
from recorder.reader import Run

NO_EXPERT = "no expert"
_CURVE_POINTS = 10_000  # of all curves of a chart
_LARGE_PANELS = 4  # more layers, and their small charts are lower


def load(run: Run, layers: Sequence[int], idle: Mapping[int, str], over: str) -> None:
    """Expert-by-step load of `layers`; a click in a cell opens Replay there.

    idle  for each layer that can be judged, its idle experts in words ("11 of 16 experts", or NO_EXPERT)
    over  the steps that this is about in words
    """
    series = [data.load_series(run, layer) for layer in layers]
    figure = load_heatmap(series, title=_load_title(run, layers, idle, over), theme=charts.theme(), clickable=True)
    clickable = has_click_points(figure)
    said = (
        "Balanced training looks calm and pale. **Purple** gets next to nothing, below 1/16 of the uniform share "
        "(idle in the numbers: below 1/10 over the window)."
    )
    if clickable:
        said += " Click a cell to replay its layer and expert there."
    st.caption(said)
    points = charts.show(
        figure,
        key="load",
        alt=f"Load over the uniform share of every expert by step, {_layers_words(run, layers)} of {run.name}.",
        numbers=lambda: load_numbers(series),
        selectable=clickable,
    )
    for point in points:
        cell = point.get("customdata")
        if isinstance(cell, list) and len(cell) >= 3:
            layer, expert, step = (int(number) for number in cell[:3])
            navigation.go("replay", layer=layer, expert=expert, step=step, phase=data.linked_phase(run))


def _load_title(run: Run, layers: Sequence[int], idle: Mapping[int, str], over: str) -> str:
    some = [layer for layer in layers if idle.get(layer, NO_EXPERT) != NO_EXPERT]
    parts = [f"layer {layer_keys.label(run, layer)}: {idle[layer]} idle" for layer in some]
    if parts:
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}, over {over}"
    if all(layer in idle for layer in layers):
        return f"No expert is idle over {over}"
    return "Load of every expert, step by step"


def _layers_words(run: Run, layers: Sequence[int]) -> str:
    names = [str(layer_keys.label(run, layer)) for layer in layers]
    return f"layer {names[0]}" if len(names) == 1 else f"layers {listed(names)}"


def load_numbers(series: Sequence[LoadSeries]) -> pd.DataFrame:
    """Assignments per expert, a row for each step and layer: step, layer, expert 0, expert 1, ..."""
    frames = []
    for one in series:
        frame = pd.DataFrame(_small(one.load_SE), columns=[f"expert {expert}" for expert in range(one.num_experts)])
        frame.insert(0, "layer", one.label)
        frame.insert(0, "step", one.steps_S)
        frames.append(frame)
    same = len({one.num_experts for one in series}) == 1
    return pd.concat(frames if same else [frame.convert_dtypes() for frame in frames], ignore_index=True)


def _small(load_SE: np.ndarray) -> np.ndarray:
    return load_SE.astype(np.int32) if load_SE.dtype.kind == "i" and load_SE.max(initial=0) < 2**31 else load_SE


def _panels(panels: int, axis: XAxis) -> dict[str, Any]:
    return {
        "max_points": max(100, _CURVE_POINTS // max(2 * panels, 1)),  # two curves a panel
        "panel_height": 220 if panels <= _LARGE_PANELS else 130,
        "x_title": axis.title,
    }


def _placed(series: Sequence[LoadSeries], axis: XAxis) -> list[LoadSeries]:
    return [replace(one, at_S=axis.at(one.steps_S)) for one in series]


def balance(run: Run, layers: Sequence[int], window: int, axis: XAxis) -> None:
    """How far from balance `layers` are over the steps, a small chart each, and what the bias did about it."""
    series = [data.load_series(run, layer) for layer in layers]
    violation(run, series, window, axis)
    unused(run, series, window, axis)
    rerouted(run, layers, window, axis)


def violation(run: Run, series: Sequence[LoadSeries], window: int, axis: XAxis) -> None:
    """max_violation over the steps, a small chart a layer."""
    st.caption(
        "Near 0 is balance; near the dashed bound nearly all tokens go to one expert. The thick line sums the loads of "
        "up to 50 steps: it is free of the noise of single batches, and trails the thin one where the load moves."
    )
    figure = violation_curves(
        _placed(series, axis),
        title="max_violation: how far the busiest expert is above the uniform share",
        theme=charts.theme(),
        window=window,
        low=len(series) > _LARGE_PANELS,
        **_panels(len(series), axis),
    )
    charts.show(
        figure,
        key="violation",
        alt=f"max_violation by step and layer of {run.name}, each step and over {window} steps, with its bound.",
        numbers=lambda: axis.beside(_violation_numbers(series, window)),
    )


def _violation_numbers(series: Sequence[LoadSeries], window: int) -> pd.DataFrame:
    frames = [
        pd.DataFrame(
            {
                "step": one.steps_S,
                "layer": one.label,
                "max_violation": np.atleast_1d(metrics.max_violation(one.load_SE)),
                f"max_violation, window of {window}": np.atleast_1d(
                    metrics.max_violation(metrics.rolling_window_load(one.load_SE, window))
                ),
                "bound": metrics.max_violation_bound(one.num_experts, one.top_k),
            }
        )
        for one in series
    ]
    return pd.concat(frames, ignore_index=True)


def unused(run: Run, series: Sequence[LoadSeries], window: int, axis: XAxis) -> None:
    """Idle and dead experts over the steps, a small chart a layer."""
    st.caption("Zero is good. A line that rises and stays up is a collapse; dead experts no longer learn at all.")
    figure = unused_curves(
        _placed(series, axis),
        title=f"Idle and dead experts, over up to {count(window, 'step')} that end at each",
        theme=charts.theme(),
        window=window,
        **_panels(len(series), axis),
    )
    charts.show(
        figure,
        key="unused",
        alt=f"Idle and dead experts by step and layer of {run.name}, over a window of {window} steps.",
        numbers=lambda: axis.beside(_unused_numbers(series, window)),
    )


def _unused_numbers(series: Sequence[LoadSeries], window: int) -> pd.DataFrame:
    frames = []
    for one in series:
        summed_SE = metrics.rolling_window_load(one.load_SE, window)
        counts = {"idle experts": metrics.idle_experts(summed_SE), "dead experts": metrics.dead_experts(summed_SE)}
        frames.append(
            pd.DataFrame({"step": one.steps_S, "layer": one.label, **counts, "experts": one.num_experts}).astype(
                dict.fromkeys(counts, "Int64")
            )
        )
    return pd.concat(frames, ignore_index=True)


def rerouted(run: Run, layers: Sequence[int], window: int, axis: XAxis) -> None:
    """What share of the assignments the selection bias changed, a small chart a layer; nothing where none was recorded.

    A balancer of biases that changes nothing does nothing; one that changes most assignments overrides the router.
    """
    known = [stats for stats in (data.layer_stats(run, layer) for layer in layers) if _has_rerouted(stats)]
    if not known:
        return
    shares = [(stats, *rerouted_shares(stats, window)) for stats in known]
    st.caption(
        "Rerouted: assignments that went to an expert which is not among the token's top-k without the selection "
        "bias, over all assignments. 0: the bias decides nothing. High: the bias overrides what the router would do."
    )
    figure = metric_curves(
        [
            Curve(
                name=name,
                group=name,
                colour=0,
                steps_S=stats.steps_S,
                values_S=100 * values_S,
                null_S=np.isnan(values_S),
                panel=f"layer {stats.label}",
                style=style,
                restarts=data.restarts(run),
                at_S=axis.at(stats.steps_S),
            )
            for stats, batch_S, window_S in shares
            for name, values_S, style in (("each step", batch_S, "thin"), (f"window of {window}", window_S, "thick"))
        ],
        title=_rerouted_title(shares),
        y_title="rerouted (%)",
        theme=charts.theme(),
        y_floor=0.0,
        note=f"Thin: each step. Thick: assignments of the last {window} recorded steps summed.",
        **_panels(len(shares), axis),
    )
    charts.show(
        figure,
        key="rerouted",
        alt=f"Share of the assignments that the bias changed by step and layer of {run.name}.",
        numbers=lambda: axis.beside(_rerouted_numbers(shares, window)),
    )


def _rerouted_numbers(shares: Sequence[tuple[LayerStats, np.ndarray, np.ndarray]], window: int) -> pd.DataFrame:
    frames = [
        pd.DataFrame(
            {
                "step": stats.steps_S,
                "layer": stats.label,
                "rerouted": stats.rerouted_S,
                "assignments": stats.load_SE.sum(axis=1),
                "rerouted (%)": 100 * batch_S,
                f"rerouted, window of {window} (%)": 100 * window_S,
            }
        )
        for stats, batch_S, window_S in shares
    ]
    return pd.concat(frames, ignore_index=True)


def _has_rerouted(stats: LayerStats) -> bool:
    return bool(np.isfinite(stats.rerouted_S).any())


def rerouted_shares(stats: LayerStats, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(S,) shares of 1 of the assignments that the bias changed: of each step, and of the window that ends at it.

    NaN where not recorded or nothing was assigned; steps without a record count in no window.
    """
    known_S = np.isfinite(stats.rerouted_S)
    parts_S2 = np.stack([stats.rerouted_S, stats.load_SE.sum(axis=1)], axis=1)
    summed_S2 = metrics.rolling_window_load(np.where(known_S[:, None], parts_S2, 0.0), window)
    batch_S = np.atleast_1d(metrics.rerouted_share(parts_S2[:, 0], parts_S2[:, 1]))
    return batch_S, np.atleast_1d(metrics.rerouted_share(summed_S2[:, 0], summed_S2[:, 1]))


def final_rerouted_share(stats: LayerStats, window: int) -> float | None:
    """That of the window at the end of the run; None where it has no value."""
    share = float(rerouted_shares(stats, window)[1][-1]) if stats.steps_S.size else np.nan
    return share if np.isfinite(share) else None


def _rerouted_title(shares: Sequence[tuple[LayerStats, np.ndarray, np.ndarray]]) -> str:
    ends = [(float(window_S[-1]), stats.label) for stats, _, window_S in shares if np.isfinite(window_S[-1])]
    if not ends:
        return "Share of the assignments that the bias changed"
    most, label = max(ends, key=lambda end: end[0])
    if most == 0:
        return "The bias changes no assignment at the end of the run"
    said = f"At the end the bias changes {percent(most, 1)} of the assignments of layer {label}"
    return said + (", the most of all layers" if len(ends) > 1 else "")


def shares(run: Run, layer: int, axis: XAxis) -> None:
    """Each expert's share of the assignments of one layer over the steps."""
    (series,) = _placed([data.load_series(run, layer)], axis)
    if series.steps_S.size < 2:
        st.caption("Shares over time take two recorded steps. Those of the only one:")
        charts.table(share_numbers(series), key="shares_numbers")
        return
    st.caption(
        "Bands of one height are balance. A band that swallows the others is collapse: the experts under it starve."
    )
    figure = share_area(series, title=_share_title(series), theme=charts.theme(), x_title=axis.title)
    charts.show(
        figure,
        key="shares",
        alt=f"Share of the assignments of every expert of layer {series.label} of {run.name} by step, in per cent.",
        numbers=lambda: axis.beside(share_numbers(series)),
    )


def _share_title(series: LoadSeries) -> str:
    total_E = np.nansum(series.load_SE, axis=0)
    if not total_E.sum() > 0:
        return f"Layer {series.label}: each expert's share of the assignments"
    busiest = int(total_E.argmax())
    return (
        f"Layer {series.label}: expert {busiest} took {value(100 * total_E[busiest] / total_E.sum())}% of all "
        f"assignments of the run, {value(total_E[busiest] * series.num_experts / total_E.sum())} x the uniform share"
    )


def share_numbers(series: LoadSeries) -> pd.DataFrame:
    """Each expert's share in per cent, a row a step; null where there were no tokens."""
    load_SE = np.nan_to_num(np.asarray(series.load_SE, dtype=np.float64))
    total_S1 = load_SE.sum(axis=1, keepdims=True)
    share_SE = 100 * load_SE / np.where(total_S1 > 0, total_S1, np.nan)
    frame = pd.DataFrame(
        share_SE.astype(np.float32), columns=[f"expert {expert} (%)" for expert in range(series.num_experts)]
    )
    frame.insert(0, "step", series.steps_S)
    return frame
