"""The losses of a run over its steps: training, cross-entropy, and those of text that is never trained on."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, data
from app.figures.curves import metric_curves
from app.figures.inputs import Curve
from app.words import count, value
from app.x_axis import XAxis
from moe_core import metrics
from recorder.reader import Run

_CURVE_POINTS = 10_000  # of all curves of the chart
_WINDOW = metrics.WINDOW
TRAINING, CROSS_ENTROPY = "training loss", "cross-entropy"
HELD_OUT = ("probe", "eval")  # phases without training


def losses(run: Run, axis: XAxis) -> None:
    """Training loss and cross-entropy, and the held-out ones beside them."""
    curves = [*_of_training(run), *_held_out(run)]
    if not curves:
        st.caption("No loss was recorded in this run.")
        return
    names = {curve.name for curve in curves}
    said = "Falling means it learns. "
    if CROSS_ENTROPY in names:
        said += "Between runs compare the cross-entropy: the training loss holds auxiliary losses too."
    else:
        said += "The training loss holds auxiliary losses too; no cross-entropy was recorded."
    numbers = _numbers(curves, axis)
    if {TRAINING, CROSS_ENTROPY} <= names and numbers[TRAINING].equals(numbers[CROSS_ENTROPY]):
        # Two lines in one place would look like one that lacks the other.
        curves = [curve for curve in curves if curve.name != TRAINING]
        said = "Falling means it learns. The training loss is the cross-entropy: no auxiliary loss was added to it."
    if any("(probe)" in name for name in names):
        said += " The probe is a fixed batch that is never trained on."
    if any(name.startswith("held-out") for name in names):
        said += " Held-out text that stays behind while training goes on falling is learned by heart."
    st.caption(" ".join([said, axis.note]).strip())
    figure = metric_curves(
        [replace(curve, at_S=axis.at(curve.steps_S)) for curve in curves],
        title=_title(curves),
        y_title="loss (nats per token)" if CROSS_ENTROPY in names else "loss",
        theme=charts.theme(),
        max_points=_CURVE_POINTS // len(curves),
        panel_height=230,
        x_title=axis.title,
    )
    charts.show(figure, key="losses", alt=f"Losses of {run.name} by {axis.title}.", numbers=numbers)


def _of_training(run: Run) -> list[Curve]:
    frame, restarts = data.steps(run), data.restarts(run)
    found = [
        _curve(frame, name, column, colour, restarts)
        for colour, (name, column) in enumerate(((TRAINING, "loss"), (CROSS_ENTROPY, "ce_loss")))
    ]
    return [curve for curve in found if curve is not None]


def _held_out(run: Run) -> list[Curve]:
    """Of each phase without training its cross-entropy, or else its loss."""
    found = []
    for colour, phase in enumerate(HELD_OUT, start=2):
        if phase == data.main_phase(run):
            continue
        frame, restarts = data.steps(run, phase), data.restarts(run)
        curve = _curve(frame, f"held-out {CROSS_ENTROPY} ({phase})", "ce_loss", colour, restarts)
        found.append(curve or _curve(frame, f"held-out loss ({phase})", "loss", colour, restarts))
    return [curve for curve in found if curve is not None]


def _curve(frame: pd.DataFrame, name: str, column: str, colour: int, restarts: Sequence[int]) -> Curve | None:
    known = frame[column].notna().to_numpy(dtype=bool)
    if not known.any():
        return None
    steps_S = frame["step"].to_numpy(dtype=np.int64)
    return Curve(
        name=name,
        group=name,
        colour=colour,
        steps_S=steps_S,
        values_S=frame[column].to_numpy(dtype=np.float64, na_value=np.nan),
        null_S=~known,
        # Without those of before its first row: a phase recorded later was not resumed.
        restarts=[step for step in restarts if len(steps_S) and step > steps_S[0]],
    )


def _numbers(curves: Sequence[Curve], axis: XAxis) -> pd.DataFrame:
    columns = {curve.name: pd.Series(curve.values_S, index=curve.steps_S) for curve in curves}
    frame = pd.concat(columns, axis=1).rename_axis("step").sort_index().reset_index()
    return axis.beside(frame)


def _title(curves: Sequence[Curve]) -> str:
    by_name = {curve.name: curve for curve in curves}
    shown = by_name.get(CROSS_ENTROPY, curves[0])
    name = f"{shown.name[0].upper()}{shown.name[1:]}"
    finite = np.flatnonzero(np.isfinite(shown.values_S))
    if finite.size < 2:
        return f"{name} by step"
    first, end = int(finite[0]), finite[-_WINDOW:]
    said = f"{name}: {_at(shown, first)} at step {int(shown.steps_S[first]):,}, "
    if finite.size > _WINDOW:  # one batch says little: its noise is larger than what 50 steps still gain
        said += f"{value(float(shown.values_S[end].mean()), 3)} over the last {_WINDOW} steps"
    else:
        said += f"{_at(shown, int(end[-1]))} at step {int(shown.steps_S[end[-1]]):,}"
    null_S = np.zeros(shown.steps_S.shape, bool) if shown.null_S is None else shown.null_S
    lost = np.flatnonzero(~np.isfinite(shown.values_S) & ~null_S)
    if lost.size:
        said += f"; not finite at {count(lost.size, 'step')}, first at {int(shown.steps_S[lost[0]]):,}"
    for curve in curves:
        known = np.flatnonzero(np.isfinite(curve.values_S))
        if curve is not shown and curve.name.startswith("held-out") and known.size:
            said += f"; held-out {_at(curve, int(known[-1]))} at step {int(curve.steps_S[known[-1]]):,}"
            break
    return said


def _at(curve: Curve, place: int) -> str:
    return value(float(curve.values_S[place]), 3)
