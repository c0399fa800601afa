"""The curves of a comparison: each run's values over its steps, a group's mean and range, and differences of two runs.

Shape suffixes: S recorded steps, E experts, R runs.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from app import data, layer_keys, x_axis
from app.comparison import WINDOW, Compared
from app.figures.group_range import GroupRange
from app.figures.inputs import Curve, ReferenceLine
from app.words import listed, value
from app.x_axis import STEPS, XAxis
from moe_core import metrics
from moe_core.curves import smooth


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What the curves of several runs run over: steps, or what each run has added up at its steps.

    of_runs  the axis of each run, by label; all in one unit
    """

    of_runs: Mapping[str, XAxis]

    @property
    def title(self) -> str:
        """Name and unit."""
        return next((axis.title for axis in self.of_runs.values()), STEPS.title)

    @property
    def note(self) -> str:
        """What is added up, run by run where that differs; "" for steps."""
        notes: dict[str, list[str]] = {}
        for label, axis in self.of_runs.items():
            notes.setdefault(axis.note, []).append(label)
        if len(notes) == 1:
            return next(iter(notes))
        return " ".join(f"{listed(labels)}: {note}" for note, labels in notes.items())

    @property
    def is_steps(self) -> bool:
        """Whether the curves run over the steps themselves."""
        return all(axis.at_S is None for axis in self.of_runs.values())

    def at(self, one: Compared, steps_S: np.ndarray) -> np.ndarray | None:
        """Where steps of a run lie; None where that is at the steps."""
        return self.of_runs.get(one.label, STEPS).at(steps_S)


OVER_STEPS = Axis(of_runs={})


def axes_offered(runs: Sequence[Compared]) -> list[x_axis.Name]:
    """The axes that every one of these runs can tell, steps first."""
    each = [x_axis.offered(data.steps(one.run)) for one in runs]
    return [name for name in each[0] if all(name in others for others in each)]


def axis_of(runs: Sequence[Compared], name: x_axis.Name) -> Axis:
    """The axis of this name, the same unit of time for all runs."""
    frames = {one.label: data.steps(one.run) for one in runs}
    longest_s = max(float(frame["wall_time_s"].sum()) for frame in frames.values()) if name == "time" else None
    return Axis(of_runs={label: x_axis.axis(frame, name, longest_s=longest_s) for label, frame in frames.items()})


@dataclass(frozen=True, kw_only=True)
class Values:
    """One quantity of one run over its recorded steps: values_S float, NaN where null_S says nothing was recorded."""

    one: Compared
    steps_S: np.ndarray
    values_S: np.ndarray
    null_S: np.ndarray


def losses(runs: Sequence[Compared]) -> list[Values]:
    """The cross-entropy of those runs that recorded one."""
    found = []
    for one in runs:
        frame = data.steps(one.run)
        if not frame["ce_loss"].isna().all():
            values_S = frame["ce_loss"].to_numpy(np.float64, na_value=np.nan)
            null_S = frame["ce_loss"].isna().to_numpy(bool)
            found.append(Values(one=one, steps_S=frame["step"].to_numpy(np.int64), values_S=values_S, null_S=null_S))
    return found


def of_loads(
    runs: Sequence[Compared], layer: int, quantity: Callable[[Any], Any], window: int = WINDOW
) -> list[Values]:
    """A metric of the loads of a layer, summed over a trailing window (1: of each step), of the runs that have it."""
    found = []
    for one in runs:
        if layer in one.layers:
            stats = data.layer_stats(one.run, layer)
            load_SE = stats.load_SE if window == 1 else metrics.rolling_window_load(stats.load_SE, window)
            values_S = np.atleast_1d(np.asarray(quantity(load_SE), dtype=np.float64))
            found.append(Values(one=one, steps_S=stats.steps_S, values_S=values_S, null_S=np.isnan(values_S)))
    return found


def curves(
    values: Sequence[Values], axis: Axis, panels: Mapping[str, str], *, style: str = "line", what: str = ""
) -> list[Curve]:
    """One curve a run in its own colour.

    panels  the panel of each run, by label; what  said behind the run's name in hover
    """
    return [
        Curve(
            name=f"{one.one.label}{what}",
            group=one.one.label,
            colour=one.one.colour,
            steps_S=one.steps_S,
            values_S=one.values_S,
            null_S=one.null_S,
            panel=panels.get(one.one.label, ""),
            style=style,
            restarts=data.restarts(one.one.run),
            at_S=axis.at(one.one, one.steps_S),
        )
        for one in values
    ]


def numbers(axis: Axis, columns: Mapping[str, Sequence[Values]], layer: layer_keys.Label | None = None) -> pd.DataFrame:
    """A row for each run and step; of each column the values of the same runs. layer: said where they are of one."""
    first, *_ = columns.values()
    fixed = {} if layer is None else {"layer": layer}
    frames = []
    for place, one in enumerate(first):
        label = one.one.label
        frame = pd.DataFrame(
            {"run": label, **fixed, "step": one.steps_S} | {name: its[place].values_S for name, its in columns.items()}
        )
        frames.append(axis.of_runs.get(label, STEPS).beside(frame))
    return pd.concat(frames, ignore_index=True)


def bounds(runs: Sequence[Compared], layer: int, panels: Mapping[str, str]) -> list[ReferenceLine]:
    """The largest possible max_violation, E/k - 1, in each panel; with its name where there is room, in one chart."""
    lines = {}
    for one in runs:
        experts, top_k = one.shape(layer)
        if experts and top_k:
            bound = metrics.max_violation_bound(experts, top_k)
            name = "" if panels else f"most possible: E/k - 1 = {value(bound)}"
            panel = panels.get(one.label, "")
            lines[panel, bound] = ReferenceLine(value=bound, label=name, panel=panel)
    return list(lines.values())


def ranges(values: Sequence[Values], panels: Mapping[str, str], smoothing: float = 0.0) -> list[GroupRange]:
    """Mean, lowest and highest of the runs of each panel that has several, at the steps that all of them recorded.

    One for each stretch without a hole: where a run has no finite value, or steps are missing at a resume, the group
    has no mean.
    """
    members: dict[str, list[Values]] = {}
    for one in values:
        members.setdefault(panels.get(one.one.label, ""), []).append(one)
    found = []
    for panel, several in members.items():
        steps_S = several[0].steps_S
        for one in several[1:]:
            steps_S = np.intersect1d(steps_S, one.steps_S)
        if len(several) < 2 or not steps_S.size:
            continue
        drawn = [smooth(one.values_S, smoothing) if smoothing else one.values_S for one in several]
        values_RS = np.stack([y[np.searchsorted(one.steps_S, steps_S)] for one, y in zip(several, drawn, strict=True)])
        restarts = {restart for one in several for restart in data.restarts(one.one.run)}
        for part in _without_holes(steps_S, np.isfinite(values_RS).all(axis=0), restarts):
            found.append(GroupRange(panel=panel, steps_S=steps_S[part], values_RS=values_RS[:, part]))
    return found


def _without_holes(steps_S: np.ndarray, whole_S: np.ndarray, restarts: Iterable[int]) -> list[slice]:
    gaps = np.diff(steps_S)
    usual = np.median(gaps) if gaps.size else 1
    at_restart = {int(np.searchsorted(steps_S, restart)) for restart in restarts}
    holes = {place for place in at_restart if 0 < place < len(steps_S) and gaps[place - 1] > usual}
    ends = sorted({0, len(steps_S), *holes, *(np.flatnonzero(np.diff(whole_S.astype(int))) + 1).tolist()})
    return [slice(start, stop) for start, stop in itertools.pairwise(ends) if whole_S[start]]


def differences(values: Sequence[Values], baseline: Compared) -> list[Values]:
    """Each other run minus the baseline, at the steps that the two recorded and where both are finite."""
    reference = next((one for one in values if one.one.label == baseline.label), None)
    if reference is None:
        return []
    found = []
    for one in values:
        if one is reference:
            continue
        steps_S, mine, its = np.intersect1d(one.steps_S, reference.steps_S, return_indices=True)
        behind_S = one.values_S[mine] - reference.values_S[its]
        finite_S = np.isfinite(behind_S)
        if finite_S.any():
            found.append(
                Values(
                    one=one.one,
                    steps_S=steps_S[finite_S],
                    values_S=behind_S[finite_S],
                    null_S=np.zeros(int(finite_S.sum()), bool),
                )
            )
    return found
