"""When a layer collapsed, recovered or became balanced, and which experts died: from its loads alone. Numpy only.

Loads of single steps are noisy, so windows of them are judged: see `window_rows`. Whether a layer is in a state is
decided by windows; the step at which it came into it is then looked for step by step: see `_change`.

Shapes: S recorded steps that routed tokens, E experts, V = S - window + 1 windows, named by their first row.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_core import metrics
from recorder.diagnosis.rules import (
    BALANCED_BELOW,
    COLLAPSED_BELOW,
    MOST_OF_THE_LOAD,
    ONSET_ASSIGNMENTS,
    RECOVERED_ABOVE,
    WINDOW_ASSIGNMENTS,
    WINDOW_STEPS,
    WINDOWS_TO_JUDGE,
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """The first row of a new state: most likely `row`, for certain one of `low` to `high` (inclusive)."""

    row: int
    low: int
    high: int


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """Rows in which a layer was collapsed, from `onset` on; `recovery` is None where it is so until the end."""

    onset: Change
    recovery: Change | None


@dataclass(frozen=True, kw_only=True)
class Dead:
    """Experts that get nothing any more; `since` is the first row from which on all of these got none, 0 = never."""

    experts: list[int]
    since: int


def window_rows(load_SE: NDArray) -> int:
    """Rows of a window: WINDOW_STEPS, or as many as hold WINDOW_ASSIGNMENTS an expert wherever the window stands."""
    return max(WINDOW_STEPS, _rows_of(WINDOW_ASSIGNMENTS, load_SE))


def can_be_judged(load_SE: NDArray) -> bool:
    """Whether there are rows for WINDOWS_TO_JUDGE windows."""
    return len(load_SE) >= WINDOWS_TO_JUDGE * window_rows(load_SE)


def effective_share(load: NDArray, top_k: int) -> NDArray[np.float64]:
    """Where the effective number of experts exp(H(f)) lies between the fewest, k, and all E: 0 to 1; NaN for k = E.

    load: (..., E). Tokens choose k different experts, so a full collapse still uses k of them.
    """
    num_experts = load.shape[-1]
    if num_experts == top_k:
        return np.full(load.shape[:-1], np.nan)
    return np.asarray((metrics.effective_experts(load) - top_k) / (num_experts - top_k))


def collapses(load_SE: NDArray, top_k: int) -> list[Collapse]:
    """When the layer was collapsed: effective share of a window below COLLAPSED_BELOW, until above RECOVERED_ABOVE."""
    window = window_rows(load_SE)
    share_V = effective_share(_rolling(load_SE, window), top_k)
    found = []
    for first, end in _stretches(share_V < COLLAPSED_BELOW, share_V > RECOVERED_ABOVE, window):
        onset = _change(load_SE, first, top_k, collapses=True)
        recovery = _change(load_SE, end, top_k, collapses=False) if end < len(share_V) else None
        found.append(Collapse(onset=onset, recovery=recovery))
    return found


def balanced_since(load_SE: NDArray) -> int | None:
    """The row from which on max_violation of every window is below BALANCED_BELOW; None if there is none."""
    window = window_rows(load_SE)
    below_V = np.asarray(metrics.max_violation(_rolling(load_SE, window))) < BALANCED_BELOW
    return next((first for first, end in _stretches(below_V, ~below_V, window) if end == len(below_V)), None)


def dead(load_SE: NDArray) -> list[Dead]:
    """Experts without an assignment in the last rows, a window at least: those never used, then the others."""
    rows = len(load_SE)
    used_SE = load_SE > 0
    # the row after the last one in which it was used; 0 where it never was
    since_E = np.where(used_SE.any(axis=0), rows - used_SE[::-1].argmax(axis=0), 0)
    dead_E = rows - since_E >= window_rows(load_SE)
    never, later = np.flatnonzero(dead_E & (since_E == 0)), np.flatnonzero(dead_E & (since_E > 0))
    found = [Dead(experts=never.tolist(), since=0)] if len(never) else []
    return [*found, Dead(experts=later.tolist(), since=int(since_E[later].max()))] if len(later) else found


def concentration(load_E: NDArray) -> tuple[int, float]:
    """The fewest experts that together take MOST_OF_THE_LOAD of a load, and the share that they take."""
    share = np.cumsum(np.sort(load_E)[::-1]) / load_E.sum()
    number = int(np.searchsorted(share, MOST_OF_THE_LOAD - 1e-12)) + 1
    return number, float(share[number - 1])


def _rows_of(assignments: int, load_SE: NDArray) -> int:
    """The fewest successive rows that hold so many assignments an expert at the uniform share, wherever they start.

    Where all rows together hold fewer: how many rows like the median one would hold them.
    """
    rows, needed = len(load_SE), assignments * load_SE.shape[-1]
    if not rows:
        return 1
    before_S = np.concatenate([[0], load_SE.sum(axis=-1).cumsum()])
    if before_S[-1] < needed:
        per_step = float(np.median(np.diff(before_S)))
        return max(rows + 1, math.ceil(needed / per_step) if per_step else 1)
    held = range(1, rows + 1)  # more rows never hold less
    return held[bisect.bisect_left(held, needed, key=lambda some: (before_S[some:] - before_S[:-some]).min())]


def _rolling(load_SE: NDArray, rows: int) -> NDArray:
    """The sums of all `rows` successive rows, named by their first."""
    return metrics.rolling_window_load(load_SE, rows)[rows - 1 :]


def _stretches(enter_V: NDArray[np.bool_], leave_V: NDArray[np.bool_], window: int) -> list[tuple[int, int]]:
    """The stretches of windows in a state, (first, end exclusive), that hold WINDOWS_TO_JUDGE without a common row."""
    edges = np.diff(np.concatenate([[False], _held(enter_V, leave_V), [False]]).astype(np.int8))
    found = zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True)
    return [(first, end) for first, end in found if end - first > (WINDOWS_TO_JUDGE - 1) * window]


def _held(enter_V: NDArray[np.bool_], leave_V: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """In the state from an `enter` until the next `leave`; where neither, as before. Out of it at first."""
    at_V = np.arange(len(enter_V))
    entered_V = np.maximum.accumulate(np.where(enter_V, at_V, -1))
    left_V = np.maximum.accumulate(np.where(leave_V, at_V, -1))
    return entered_V > left_V


def _change(load_SE: NDArray, first: int, top_k: int, *, collapses: bool) -> Change:
    """Where the layer collapsed, or recovered, when the window at row `first` is the first to show it.

    The effective share of single rows (of a few together where those hold under ONSET_ASSIGNMENTS an expert) is
    followed through that window and the one before, each the median of itself and its neighbours, so that one noisy row
    is neither onset nor end: the change is the last time that it passed the threshold, at the first row that is past
    it by itself. Where it did not pass it (the rows of a window may use few experts each, but not the same), the window
    as a whole is all that is known.
    """
    window = window_rows(load_SE)
    start = max(first - window, 0)
    rows_RE = load_SE[start : first + window]
    few = _rows_of(ONSET_ASSIGNMENTS, rows_RE)
    share_R = effective_share(_rolling(rows_RE, few), top_k)

    def below(values_R: NDArray[np.float64]) -> NDArray[np.bool_]:
        return values_R < COLLAPSED_BELOW

    def above(values_R: NDArray[np.float64]) -> NDArray[np.bool_]:
        return values_R > RECOVERED_ABOVE

    enters, leaves = (below, above) if collapses else (above, below)
    smooth_R = _median_of_three(share_R)
    outside = np.flatnonzero(~_held(enters(smooth_R), leaves(smooth_R)))
    since = int(outside[-1]) + 1 if outside.size else 0
    if since == len(share_R) or (since == 0 and start > 0):
        return Change(row=change_point(load_SE, first, window), low=first, high=first + window - 1)
    low = start + since + int(enters(share_R[since:]).argmax())
    row = low if few == 1 else change_point(load_SE, low, few)
    return Change(row=row, low=low, high=low + few - 1)


def _median_of_three(values_R: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each value and its neighbours; the ends count twice. A step from one level to another stays where it is."""
    padded = np.pad(values_R, 1, mode="edge")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, 3), axis=-1))


def change_point(load_SE: NDArray, first: int, window: int) -> int:
    """The row at which shares most likely changed, among the rows of the window that starts at row `first`.

    Maximum likelihood of two multinomials, one before and one from it on, over the window and one on either side. At
    the start of the run no change at all is possible too (row 0); a change must then be worth its E - 1 parameters
    more (Bayesian information criterion).

    Source: Hinkley & Hinkley, "Inference about the change-point in a sequence of binomial variables" (1970).
    """
    low, high = max(first - window, 0), min(first + 2 * window, len(load_SE))
    rows_RE = load_SE[low:high].astype(np.float64)
    before_RE = np.concatenate([np.zeros((1, rows_RE.shape[1])), rows_RE.cumsum(axis=0)])  # [r]: up to row low + r
    likelihood_R = _log_likelihood(before_RE) + _log_likelihood(before_RE[-1] - before_RE)
    candidates = np.arange(first, min(first + window, len(load_SE)))
    likelihood_C = likelihood_R[candidates - low]
    if first == 0:
        likelihood_C[1:] -= (rows_RE.shape[1] - 1) / 2 * math.log(max(before_RE[-1].sum(), 1.0))
    return int(candidates[likelihood_C.argmax()])


def _log_likelihood(counts_RE: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of counts under their own shares, sum c ln(c / sum c), with 0 ln 0 = 0."""
    total_R = counts_RE.sum(axis=-1)
    logs_RE = np.log(np.where(counts_RE > 0, counts_RE, 1.0))
    return (counts_RE * logs_RE).sum(axis=-1) - total_R * np.log(np.where(total_R > 0, total_R, 1.0))
