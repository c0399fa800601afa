"""Fewer cells than data: how steps and experts are pooled so that a hot expert and a dead one both stay visible.

Steps are pooled by their *sum*: a column shows the load of its few steps together over the uniform share of them, a
window as the metrics take it. A maximum would let the noise of balanced training look like overload (measured on a
quantile run: 45% of cells above the uniform share become 68% at two steps a column), and would hide how often an expert
gets nothing. Experts are pooled by the *maximum*, so that a hot one stays visible among its neighbours. The hover tells
the extremes that a cell covers.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """Columns of a picture over recorded steps; C columns, each one block of `per_column` consecutive records.

    start_C, stop_C: record indices [start, stop) of each column; start == stop for a hole, where nothing was
    recorded. edges: C + 1 positions on the step axis.
    """

    start_C: NDArray[np.int64]
    stop_C: NDArray[np.int64]
    edges: NDArray[np.float64]
    per_column: int

    @property
    def hole_C(self) -> NDArray[np.bool_]:
        return self.start_C == self.stop_C


def step_columns(steps_S: NDArray[np.int64], max_columns: int) -> StepColumns:
    """Split recorded steps (ascending) into at most about `max_columns` blocks of equally many records.

    A block never spans a hole: a stretch without records more than three times as long as the spacing on either
    side of it. Raises ValueError if max_columns < 1.
    """
    if max_columns < 1:
        raise ValueError(f"max_columns must be at least 1, got {max_columns}")
    steps = np.asarray(steps_S, dtype=np.int64)
    count = len(steps)
    if count == 0:
        empty = np.zeros(0, dtype=np.int64)
        return StepColumns(start_C=empty, stop_C=empty, edges=np.array([0.0]), per_column=1)
    per_column = -(-count // max_columns)
    gaps = np.diff(steps)
    # A hole stands out from the spacing before and after it; a change of recording interval does not.
    before = np.concatenate([gaps[:1] * 0, gaps[:-1]])
    after = np.concatenate([gaps[1:], gaps[-1:] * 0])
    hole_after = np.flatnonzero((gaps > 3 * np.maximum(before, after)) & (np.maximum(before, after) > 0))

    bounds = [0, *(hole_after + 1).tolist(), count]
    parts = list(itertools.pairwise(bounds))
    within = np.delete(gaps, hole_after)
    usual = float(np.median(within)) if len(within) else 1.0

    start: list[int] = []
    stop: list[int] = []
    edges: list[float] = []
    for part_start, part_stop in parts:
        alone = part_stop - part_start == 1
        first_gap = usual if alone else float(gaps[part_start])
        last_gap = usual if alone else float(gaps[part_stop - 2])
        # Both neighbours of a hole together take at most half of it.
        first_gap = min(first_gap, gaps[part_start - 1] / 2) if part_start else first_gap
        last_gap = min(last_gap, gaps[part_stop - 1] / 2) if part_stop < count else last_gap
        if start:  # a hole lies before this part: the edge so far ends the part before it
            start.append(part_start)
            stop.append(part_start)
        edges.append(steps[part_start] - first_gap / 2)
        for first in range(part_start, part_stop, per_column):
            last = min(first + per_column, part_stop) - 1
            start.append(first)
            stop.append(last + 1)
            inner = last + 1 < part_stop
            edges.append((steps[last] + steps[last + 1]) / 2 if inner else steps[last] + last_gap / 2)
    return StepColumns(
        start_C=np.array(start, dtype=np.int64),
        stop_C=np.array(stop, dtype=np.int64),
        edges=np.array(edges, dtype=np.float64),
        per_column=per_column,
    )


def pool_columns(load_SE: NDArray, columns: StepColumns) -> NDArray[np.float64]:
    """Assignments of each expert over each column: (S, E) -> (C, E). NaN for holes."""
    pooled = np.full((len(columns.start_C), load_SE.shape[1]), np.nan)
    filled = ~columns.hole_C
    if filled.any():
        # the starts of filled columns split the records without overlap
        pooled[filled] = np.add.reduceat(np.nan_to_num(load_SE.astype(np.float64)), columns.start_C[filled], axis=0)
    return pooled


def expert_groups(num_experts: int, max_rows: int) -> NDArray[np.int64]:
    """First expert of each row when at most `max_rows` rows show `num_experts` experts in order; (rows,)."""
    if max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}")
    per_row = -(-num_experts // max_rows)
    return np.arange(0, num_experts, max(per_row, 1), dtype=np.int64)


def pool_experts(ratio: NDArray[np.float64], first_R: NDArray[np.int64]) -> NDArray[np.float64]:
    """Maximum over the experts of each row: (..., E) -> (..., R). NaN where all experts of a row are NaN."""
    if ratio.shape[-1] == 0:
        return ratio.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.fmax.reduceat(ratio, first_R, axis=-1))


def group_labels(first_R: NDArray[np.int64], num_experts: int) -> list[str]:
    """Names of the rows: "7" for one expert, "14-20" for several, as strings so that axes stay categorical."""
    stops = [*first_R[1:].tolist(), num_experts]
    return [
        str(first) if stop - first == 1 else f"{first}-{stop - 1}"
        for first, stop in zip(first_R.tolist(), stops, strict=True)
    ]
