"""The losses of a run over its steps: training, cross-entropy, and those of text that is never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import streamlit as st
from numpy.typing import NDArray

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


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Held-out and training values of the same steps, in the window at the end of training.

    steps_S   the held-out steps in it
    held_out  mean of their values
    training  mean at the same steps of the straight line through the training values of the window
    scatter   standard deviation of the training values about that line: what a single step says is no surer
    """

    steps_S: NDArray[np.int64]
    held_out: float
    training: float
    scatter: float

    @property
    def gap(self) -> float | None:
        """How far the held-out mean lies above training; None within the scatter."""
        apart = self.held_out - self.training
        return apart if abs(apart) > self.scatter else None


def against_held_out(curves: Sequence[Curve]) -> Beside | None:
    """The curve of the title beside the same value of held-out text.

    None where there is none in the window, or no more than one window of training: over the first steps the loss
    falls too fast and too crookedly to be read at a step.
    """
    shown, held_out = _shown(curves), _first_held_out(curves)
    if held_out is None or not _same_value(shown, held_out):
        return None
    known = np.flatnonzero(np.isfinite(shown.values_S))
    if known.size <= _WINDOW:
        return None
    last = known[-_WINDOW:]
    steps_S, values_S = shown.steps_S[last], shown.values_S[last]
    within_S = np.isfinite(held_out.values_S) & (held_out.steps_S >= steps_S[0])
    if not within_S.any():
        return None
    line = np.polynomial.Polynomial.fit(steps_S, values_S, 1)  # a mean alone would set falling values of other steps
    return Beside(
        steps_S=held_out.steps_S[within_S],
        held_out=float(held_out.values_S[within_S].mean()),
        training=float(line(np.minimum(held_out.steps_S[within_S], steps_S[-1])).mean()),
        scatter=float((values_S - line(steps_S)).std()),
    )


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
    beside = against_held_out(curves)
    st.caption(" ".join([said, *_of_held_out(run, names, beside), axis.note]).strip())
    figure = metric_curves(
        [replace(curve, at_S=axis.at(curve.steps_S)) for curve in curves],
        title=_title(curves, beside),
        y_title="loss (nats per token)" if CROSS_ENTROPY in names else "loss",
        theme=charts.theme(),
        max_points=_CURVE_POINTS // len(curves),
        panel_height=230,
        x_title=axis.title,
    )
    charts.show(figure, key="losses", alt=f"Losses of {run.name} by {axis.title}.", numbers=lambda: numbers)


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


def _shown(curves: Sequence[Curve]) -> Curve:
    """The curve that the title is about."""
    return next((curve for curve in curves if curve.name == CROSS_ENTROPY), curves[0])


def _first_held_out(curves: Sequence[Curve]) -> Curve | None:
    found = (curve for curve in curves if curve.name.startswith("held-out") and np.isfinite(curve.values_S).any())
    return next((curve for curve in found if curve is not _shown(curves)), None)


def _same_value(shown: Curve, held_out: Curve) -> bool:
    """Whether both are cross-entropies, or both losses with whatever is added to them."""
    return (shown.name == CROSS_ENTROPY) == held_out.name.startswith(f"held-out {CROSS_ENTROPY}")


def _of_held_out(run: Run, names: set[str], beside: Beside | None) -> list[str]:
    """Sentences on what the held-out curves are and what they can say."""
    if not any(name.startswith("held-out") for name in names):
        return []
    said = []
    if any("(probe)" in name for name in names):
        tokens = data.steps(run, "probe")["tokens"].dropna().unique()
        size = f" of {count(int(tokens[0]), 'token')}" if len(tokens) == 1 else ""
        said.append(
            f"The probe is one fixed batch{size} that is never trained on; its level may lie below training by the "
            "text alone."
        )
    if beside is not None:
        said.append(
            f"Training beside it: the straight line through the last {_WINDOW} steps, read at the held-out ones "
            f"({_range(beside.steps_S)}); single steps scatter about it by {value(beside.scatter, 2)} (standard "
            "deviation), and no smaller gap is claimed."
        )
    said.append("Where it stays behind while training goes on falling, the training text is learned by heart.")
    return said


def _title(curves: Sequence[Curve], beside: Beside | None) -> str:
    shown = _shown(curves)
    name = f"{shown.name[0].upper()}{shown.name[1:]}"
    finite = np.flatnonzero(np.isfinite(shown.values_S))
    if finite.size < 2:
        return f"{name} by step"
    first, end = int(finite[0]), finite[-_WINDOW:]
    said = f"{name}: {_at(shown, first)} at step {int(shown.steps_S[first]):,}, "
    if finite.size > _WINDOW:  # one batch says little: its noise is larger than what 50 steps still gain
        said += f"{value(float(shown.values_S[end].mean()), 4)} over the last {_WINDOW} steps"
    else:
        said += f"{_at(shown, int(end[-1]))} at step {int(shown.steps_S[end[-1]]):,}"
    null_S = np.zeros(shown.steps_S.shape, bool) if shown.null_S is None else shown.null_S
    lost = np.flatnonzero(~np.isfinite(shown.values_S) & ~null_S)
    if lost.size:
        said += f"; not finite at {count(lost.size, 'step')}, first at {int(shown.steps_S[lost[0]]):,}"
    held_out = _first_held_out(curves)
    if beside is not None:
        said += f"; {_beside_words(beside)}"
    elif held_out is not None:
        known = int(np.flatnonzero(np.isfinite(held_out.values_S))[-1])
        what = "held-out" if _same_value(shown, held_out) else held_out.name.partition(" (")[0]
        said += f"; {what} {_at(held_out, known)} at step {int(held_out.steps_S[known]):,}"
    return said


def _range(steps_S: NDArray[np.int64]) -> str:
    first, last = int(steps_S[0]), int(steps_S[-1])
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _beside_words(beside: Beside) -> str:
    said = f"held-out {value(beside.held_out, 4)} against {value(beside.training, 4)} of training at the same steps, "
    if beside.gap is None:
        return f"{said}no further apart than single steps scatter"
    return f"{said}{value(abs(beside.gap), 2)} {'above' if beside.gap > 0 else 'below'}"


def _at(curve: Curve, place: int) -> str:
    return value(float(curve.values_S[place]), 3)
