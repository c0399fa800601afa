"""The charts of the overview: load by expert and step, losses, max_violation, idle and dead experts, shares.

Shapes: S recorded steps, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, data, layer_keys, navigation
from app.figures.balance_curves import share_area, unused_curves, violation_curves
from app.figures.curves import metric_curves
from app.figures.inputs import Curve, LoadSeries
from app.figures.load_heatmap import has_click_points, load_heatmap
from app.words import count, listed, value
from moe_core import metrics
from recorder.reader import Run

NO_EXPERT = "no expert"
_CURVE_POINTS = 10_000  # of all curves of a chart
_LARGE_PANELS = 4  # more layers, and their small charts are lower
LOSS_WINDOW = metrics.WINDOW
_LOSSES = (  # (name, phase, column)
    ("training loss", "train", "loss"),
    ("cross-entropy", "train", "ce_loss"),
    ("held-out cross-entropy (probe)", "probe", "ce_loss"),
)


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
        numbers=load_numbers(series),
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


def losses(run: Run) -> None:
    """Training loss, cross-entropy and that of the probe over the steps."""
    curves, columns = [], {}
    main = data.main_phase(run)
    for colour, (name, phase, column) in enumerate(_LOSSES):
        phase = main if phase == "train" else phase
        frame = data.steps(run, phase)
        known = frame[column].notna()
        if not known.any():
            continue
        values_S = frame[column].to_numpy(dtype=np.float64, na_value=np.nan)
        columns[name] = pd.Series(values_S, index=frame["step"].astype("int64"))
        curves.append(
            Curve(
                name=name,
                group=name,
                colour=colour,
                steps_S=frame["step"].to_numpy(dtype=np.int64),
                values_S=values_S,
                null_S=~known.to_numpy(dtype=bool),
                restarts=data.restarts(run) if phase == main else (),
            )
        )
    if not curves:
        st.caption("No loss was recorded in this run.")
        return
    said = "Falling means it learns. "
    if "cross-entropy" in columns:
        said += "Between runs compare the cross-entropy: the training loss holds auxiliary losses too."
    else:
        said += "The training loss holds auxiliary losses too; no cross-entropy was recorded."
    both = [columns.get("training loss"), columns.get("cross-entropy")]
    if both[0] is not None and both[1] is not None and both[0].equals(both[1]):
        # Two lines in one place would look like one that lacks the other.
        curves = [curve for curve in curves if curve.name != "training loss"]
        said = "Falling means it learns. The training loss is the cross-entropy: no auxiliary loss was added to it."
    if "held-out cross-entropy (probe)" in columns:
        said += " The probe is a fixed batch that is never trained on."
    st.caption(said)
    figure = metric_curves(
        curves,
        title=_loss_title(curves),
        y_title="loss (nats per token)" if "cross-entropy" in columns else "loss",
        theme=charts.theme(),
        max_points=_CURVE_POINTS // len(curves),
        panel_height=230,
    )
    charts.show(
        figure,
        key="losses",
        alt=f"Losses of {run.name} by step.",
        numbers=pd.concat(columns, axis=1).rename_axis("step").sort_index().reset_index(),
    )


def _loss_title(curves: Sequence[Curve]) -> str:
    def at(curve: Curve, place: int) -> str:
        return value(float(curve.values_S[place]), 3)

    by_name = {curve.name: curve for curve in curves}
    shown = by_name.get("cross-entropy", curves[0])
    finite = np.flatnonzero(np.isfinite(shown.values_S))
    if finite.size < 2:
        return f"{shown.name[0].upper()}{shown.name[1:]} by step"
    first, end = int(finite[0]), finite[-LOSS_WINDOW:]
    name = f"{shown.name[0].upper()}{shown.name[1:]}"
    said = f"{name}: {at(shown, first)} at step {int(shown.steps_S[first]):,}, "
    if finite.size > LOSS_WINDOW:  # one batch says little: its noise is larger than what 50 steps still gain
        said += f"{value(float(shown.values_S[end].mean()), 3)} over the last {LOSS_WINDOW} steps"
    else:
        said += f"{at(shown, int(end[-1]))} at step {int(shown.steps_S[end[-1]]):,}"
    null_S = np.zeros(shown.steps_S.shape, bool) if shown.null_S is None else shown.null_S
    lost = np.flatnonzero(~np.isfinite(shown.values_S) & ~null_S)
    if lost.size:
        said += f"; not finite at {count(lost.size, 'step')}, first at {int(shown.steps_S[lost[0]]):,}"
    return said


def _panels(series: Sequence[LoadSeries]) -> dict[str, Any]:
    return {
        "max_points": max(100, _CURVE_POINTS // max(2 * len(series), 1)),  # two curves a panel
        "panel_height": 220 if len(series) <= _LARGE_PANELS else 130,
    }


def violation(run: Run, series: Sequence[LoadSeries], window: int) -> None:
    """max_violation over the steps, a small chart a layer."""
    st.caption(
        "Near 0 is balance; near the dashed bound nearly all tokens go to one expert. The thick line sums the loads of "
        "up to 50 steps: it is free of the noise of single batches, and trails the thin one where the load moves."
    )
    figure = violation_curves(
        series,
        title="max_violation: how far the busiest expert is above the uniform share",
        theme=charts.theme(),
        window=window,
        **_panels(series),
    )
    if len(series) > _LARGE_PANELS:  # a low panel has no room for the words beside its heading
        figure.for_each_annotation(lambda label: label.update(text=label.text.partition(": all tokens")[0]))
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
    charts.show(
        figure,
        key="violation",
        alt=f"max_violation by step and layer of {run.name}, each step and over {window} steps, with its bound.",
        numbers=pd.concat(frames, ignore_index=True),
    )


def unused(run: Run, series: Sequence[LoadSeries], window: int) -> None:
    """Idle and dead experts over the steps, a small chart a layer."""
    st.caption("Zero is good. A line that rises and stays up is a collapse; dead experts no longer learn at all.")
    figure = unused_curves(
        series,
        title=f"Idle and dead experts, over up to {count(window, 'step')} that end at each",
        theme=charts.theme(),
        window=window,
        **_panels(series),
    )
    frames = []
    for one in series:
        summed_SE = metrics.rolling_window_load(one.load_SE, window)
        counts = {"idle experts": metrics.idle_experts(summed_SE), "dead experts": metrics.dead_experts(summed_SE)}
        frames.append(
            pd.DataFrame({"step": one.steps_S, "layer": one.label, **counts, "experts": one.num_experts}).astype(
                dict.fromkeys(counts, "Int64")
            )
        )
    charts.show(
        figure,
        key="unused",
        alt=f"Idle and dead experts by step and layer of {run.name}, over a window of {window} steps.",
        numbers=pd.concat(frames, ignore_index=True),
    )


def shares(run: Run, layer: int) -> None:
    """Each expert's share of the assignments of one layer over the steps."""
    series = data.load_series(run, layer)
    if series.steps_S.size < 2:
        st.caption("Shares over time take two recorded steps. Those of the only one:")
        charts.table(share_numbers(series), key="shares_numbers")
        return
    st.caption(
        "Bands of one height are balance. A band that swallows the others is collapse: the experts under it starve."
    )
    figure = share_area(series, title=_share_title(series), theme=charts.theme())
    charts.show(
        figure,
        key="shares",
        alt=f"Share of the assignments of every expert of layer {series.label} of {run.name} by step, in per cent.",
        numbers=share_numbers(series),
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
