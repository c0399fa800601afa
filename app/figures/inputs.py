"""What the figures take: arrays with the names a picture needs, checked once.

Shape legend: S recorded steps, E experts, T tokens, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class LoadSeries:
    """The load of one router of one run over its recorded steps.

    run: the name shown. layer: what tells it from the run's other routers, and orders them. label: what is shown
    for it behind "layer", by default `layer`. top_k: experts per token.
    steps_S: recorded steps, ascending. load_SE: assignments per expert (before capacity drops any), counts >= 0;
    NaN or a row of zeros where there is no data.
    restarts: first steps of later segments (a resumed run).
    at_S: places of the steps on the x axis of curves, where that is not the step (see `app.x_axis`); None else.
    Raises ValueError for shapes that do not fit, steps that do not ascend and a top_k outside 1..E.
    """

    run: str
    layer: int
    steps_S: NDArray[np.int64]
    load_SE: NDArray[np.int64] | NDArray[np.float64]
    top_k: int
    restarts: Sequence[int] = field(default=())
    label: int | str = ""
    at_S: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.label == "":
            object.__setattr__(self, "label", self.layer)
        steps = np.asarray(self.steps_S)
        load = np.asarray(self.load_SE)
        if load.ndim != 2 or steps.shape != load.shape[:1]:
            raise ValueError(
                f"load_SE must be (steps, experts) with one row per step, got {load.shape} for {steps.shape} steps"
            )
        if np.any(np.diff(steps) <= 0):
            raise ValueError("steps_S must ascend")
        _check_places(self.at_S, steps)
        if not 1 <= self.top_k <= max(load.shape[1], 1):
            raise ValueError(f"top_k must lie in 1..{load.shape[1]}, got {self.top_k}")
        object.__setattr__(self, "steps_S", steps)
        object.__setattr__(self, "load_SE", load)

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.load_SE.shape[1])

    @property
    def bound(self) -> float:
        """The largest possible load / uniform share, E / k: every token uses this expert."""
        return self.num_experts / self.top_k


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart over steps.

    name: what hover and legend call it. group: the run (or domain) whose colour it takes; curves of one group
    share one legend entry. colour: place of the group in the fixed order of colours.
    steps_S ascending; values_S float, NaN and infinities are values that were really not finite. null_S: True where
    nothing was recorded (a plain gap). panel: heading of the small chart it belongs to.
    style: "line", "thin" (drawn faint, behind), "thick", "dash" or "dot".
    restarts: first steps of later segments. at_S: as in `LoadSeries`.
    """

    name: str
    steps_S: NDArray[np.int64]
    values_S: NDArray[np.float64]
    group: str
    colour: int
    null_S: NDArray[np.bool_] | None = None
    panel: str = ""
    style: str = "line"
    restarts: Sequence[int] = field(default=())
    at_S: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        steps = np.asarray(self.steps_S)
        values = np.asarray(self.values_S, dtype=np.float64)
        if steps.ndim != 1 or steps.shape != values.shape:
            raise ValueError(f"curve {self.name!r}: {steps.shape} steps but {values.shape} values")
        if self.null_S is not None and np.shape(self.null_S) != steps.shape:
            raise ValueError(f"curve {self.name!r}: null_S has shape {np.shape(self.null_S)}, steps {steps.shape}")
        if self.style not in ("line", "thin", "thick", "dash", "dot"):
            raise ValueError(f"curve {self.name!r}: unknown style {self.style!r}")
        _check_places(self.at_S, steps)
        object.__setattr__(self, "steps_S", steps)
        object.__setattr__(self, "values_S", values)


@dataclass(frozen=True, kw_only=True)
class ReferenceLine:
    """A horizontal line with a name: a bound, or the value that perfect balance gives. panel None: every panel."""

    value: float
    label: str
    panel: str | None = None


def _check_places(at_S: NDArray[np.float64] | None, steps_S: NDArray[np.int64]) -> None:
    if at_S is not None and np.shape(at_S) != steps_S.shape:
        raise ValueError(f"at_S has shape {np.shape(at_S)}, steps {steps_S.shape}")
