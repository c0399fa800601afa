"""What curves run over: steps, tokens or time. The tokens and seconds are those of the recorded steps, added up.

Shape: S recorded steps.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from app import state
from app.words import count, percent

Name = Literal["step", "tokens", "time"]

_LABELS = {"step": "Steps", "tokens": "Tokens", "time": "Time"}
_UNITS = ((1, "s"), (60, "min"), (3600, "h"), (86_400, "days"))
_SHOWN_UNITS = 3.0  # a unit is used from this many of it on


@dataclass(frozen=True, kw_only=True)
class XAxis:
    """Places of a run's steps on the x axis of its curves.

    title    name and unit, as the axis says it
    note     what is added up and what is not, as a sentence; "" for steps
    steps_S  recorded steps of the phase that counts, ascending
    at_S     their places; None where the axis runs over the steps themselves
    """

    title: str = "step"
    note: str = ""
    steps_S: NDArray[np.int64] | None = None
    at_S: NDArray[np.float64] | None = None

    def at(self, steps: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """The places of any steps, of another phase for instance: that of the last one counted at or before each.

        0 before the first. None where the axis runs over the steps themselves.
        """
        if self.at_S is None or self.steps_S is None:
            return None
        place = np.searchsorted(self.steps_S, steps, side="right")
        return np.concatenate([[0.0], self.at_S])[place]

    def beside(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The table with these places in a column behind its column "step"; unchanged where they are the steps."""
        at = self.at(frame["step"].to_numpy(dtype=np.int64))
        if at is not None:
            frame.insert(list(frame).index("step") + 1, self.title, at)
        return frame


STEPS = XAxis()


def offered(steps: pd.DataFrame) -> list[Name]:
    """The axes that these rows of `Run.steps` (one phase, ascending) can tell, steps first.

    Tokens or seconds that are missing in some row would shorten the axis without a trace: then it is not offered.
    """
    names: list[Name] = ["step"]
    for name, column in (("tokens", "tokens"), ("time", "wall_time_s")):
        values_S = _values(steps, column)
        if values_S.size > 1 and np.isfinite(values_S).all() and values_S.sum() > 0:
            names.append(name)  # type: ignore[arg-type]
    return names


def axis(steps: pd.DataFrame, name: Name, *, longest_s: float | None = None) -> XAxis:
    """The axis of this name over rows of `Run.steps` (one phase, ascending).

    longest_s  seconds that choose the unit of time, where several runs share an axis; by default this run's own
    Raises ValueError for an axis that `offered` does not offer.
    """
    if name not in offered(steps):
        raise ValueError(f"x axis must be one of {', '.join(offered(steps))}, got {name!r}")
    if name == "step":
        return STEPS
    steps_S = steps["step"].to_numpy(dtype=np.int64)
    total_S = np.cumsum(_values(steps, "tokens" if name == "tokens" else "wall_time_s"))
    if name == "tokens":
        return XAxis(title="tokens so far", note=_note("the tokens", steps_S), steps_S=steps_S, at_S=total_S)
    seconds, unit = unit_of(float(total_S[-1]) if longest_s is None else longest_s)
    return XAxis(
        title=f"time in steps so far ({unit})",
        note=_note("the seconds that each step took (wall time)", steps_S) + " Pauses between steps are in no step.",
        steps_S=steps_S,
        at_S=total_S / seconds,
    )


def unit_of(seconds: float) -> tuple[int, str]:
    """(seconds in it, name) of the unit in which this long a time reads well."""
    return next((unit for unit in reversed(_UNITS) if seconds >= _SHOWN_UNITS * unit[0]), _UNITS[0])


def pick(names: list[Name], *, label: str = "x axis") -> Name:
    """Draw the choice of one of these axes, `x` in the URL, and return it."""
    return state.pick_option(
        "x",
        label,
        names,
        format_func=_LABELS.__getitem__,
        help="What the curves run over. Tokens and time are those of the recorded steps, added up: no pause, no "
        "step that was not recorded and no step that a resumed run did again is in them.",
    )


def _note(what: str, steps_S: NDArray[np.int64]) -> str:
    said = f"x adds up {what} of {count(len(steps_S), 'recorded step')}"
    between = int(steps_S[-1] - steps_S[0]) + 1
    if len(steps_S) < between:
        said += f", {percent(len(steps_S) / between)} of those from {steps_S[0]:,} to {steps_S[-1]:,}"
    return said + "."


def _values(steps: pd.DataFrame, column: str) -> NDArray[np.float64]:
    values: Any = steps[column].to_numpy(dtype=np.float64, na_value=np.nan)
    return np.asarray(values, dtype=np.float64)
