"""Where a curve may not be joined: a resumed run whose steps between two segments are missing.

Shape legend: S recorded steps, B breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def breaks(steps_S: NDArray[np.int64], restarts: Sequence[int]) -> NDArray[np.int64]:
    """Places i, ascending, such that no line may lead from record i - 1 to record i; (B,) int64.

    A restart lies between the two, and more steps than between the records on either side: a line there would
    draw values that nobody recorded. Without records on either side any missing step counts.

    restarts: first recorded step of each later segment.
    """
    gaps = np.diff(steps_S)
    found = set()
    for restart in restarts:
        place = int(np.searchsorted(steps_S, restart))
        if not 0 < place < len(steps_S):
            continue
        gap = place - 1
        beside = [int(gaps[side]) for side in (gap - 1, gap + 1) if 0 <= side < len(gaps)]
        if gaps[gap] > max(beside, default=1):
            found.add(place)
    return np.array(sorted(found), dtype=np.int64)


def with_gaps(places_B: NDArray[np.int64], *columns: NDArray[Any]) -> tuple[NDArray[np.float64], ...]:
    """The columns (S,) as floats with a NaN before each of these places, so that a drawn line ends there."""
    return tuple(np.insert(column.astype(np.float64), places_B, np.nan) for column in columns)


def restart_position(steps_S: NDArray[np.int64], at_S: NDArray[np.float64] | None, restart: int) -> float:
    """Where a restart is marked on the x axis: half a step before it, or half way from the record before it.

    at_S: places of the records on the axis, None where it runs over steps.
    """
    if at_S is None or len(steps_S) == 0:
        return restart - 0.5
    place = int(np.clip(np.searchsorted(steps_S, restart), 0, len(steps_S) - 1))
    return float(at_S[max(place - 1, 0)] + at_S[place]) / 2
