"""When a layer collapsed, recovered or became balanced, and which experts died: from its loads alone. Numpy only.

Loads of single steps are noisy, so windows of them are judged: see `window_rows`. Whether a layer is in a state is
decided by windows; the step at which it came into it is then the most likely change point of the first of them.

Shapes: S recorded steps that routed tokens, E experts, V = S - window + 1 windows, named by their first row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_core import metrics
from recorder.diagnosis.rules import (
    BALANCED_BELOW,
    COLLAPSED_BELOW,
    MOST_OF_THE_LOAD,
    RECOVERED_ABOVE,
    WINDOW_ASSIGNMENTS,
    WINDOW_STEPS,
    WINDOWS_TO_JUDGE,
)

_Test = Callable[[NDArray], NDArray[np.bool_]]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Rows in which a layer was in a state: `first` is 0 from the start, `end` is S until the end (exclusive)."""

    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Dead:
    """Experts that get nothing any more; `since` is the first row from which on all of these got none, 0 = never."""

    experts: list[int]
    since: int


def window_rows(load_SE: NDArray) -> int:
    """Rows of a window: enough for WINDOW_ASSIGNMENTS an expert at the uniform share, WINDOW_STEPS at least."""
    per_step = float(np.median(load_SE.sum(axis=-1))) if len(load_SE) else 0.0
    needed = WINDOW_ASSIGNMENTS * load_SE.shape[-1] / per_step if per_step else 0.0
    return max(WINDOW_STEPS, math.ceil(needed))


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


def collapses(load_SE: NDArray, top_k: int) -> list[Stretch]:
    """When the layer was collapsed: effective share of a window below COLLAPSED_BELOW, until above RECOVERED_ABOVE."""

    def below(load: NDArray) -> NDArray[np.bool_]:
        return effective_share(load, top_k) < COLLAPSED_BELOW

    def above(load: NDArray) -> NDArray[np.bool_]:
        return effective_share(load, top_k) > RECOVERED_ABOVE

    return _stretches(load_SE, below, above)


def balanced_since(load_SE: NDArray) -> int | None:
    """The row from which on the layer is balanced, max_violation of every window below BALANCED_BELOW; None if not."""

    def below(load: NDArray) -> NDArray[np.bool_]:
        return np.asarray(metrics.max_violation(load)) < BALANCED_BELOW

    def not_below(load: NDArray) -> NDArray[np.bool_]:
        return ~below(load)

    last = [one for one in _stretches(load_SE, below, not_below) if one.end == len(load_SE)]
    return last[0].first if last else None


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


def _stretches(load_SE: NDArray, enters: _Test, leaves: _Test) -> list[Stretch]:
    """The stretches in a state that hold two windows without a common row.

    enters, leaves: which loads (..., E) bring a layer into the state, and out of it; between the two it stays.
    """
    window = window_rows(load_SE)
    load_VE = metrics.rolling_window_load(load_SE, window)[window - 1 :]
    in_state_V = _held(enters(load_VE), leaves(load_VE))
    edges = np.diff(np.concatenate([[False], in_state_V, [False]]).astype(np.int8))
    found = []
    for first, end in zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True):
        if end - first <= (WINDOWS_TO_JUDGE - 1) * window:
            continue
        last = len(load_SE) if end == len(in_state_V) else change_point(load_SE, end, window)
        since = change_point(load_SE, first, window)
        if first == 0 and since and enters(load_SE[:since].sum(axis=0)):
            since = 0  # a change within the state
        found.append(Stretch(first=since, end=last))
    return found


def _held(enter_V: NDArray[np.bool_], leave_V: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """In the state from an `enter` until the next `leave`; where neither, as before. Out of it at first."""
    at_V = np.arange(len(enter_V))
    entered_V = np.maximum.accumulate(np.where(enter_V, at_V, -1))
    left_V = np.maximum.accumulate(np.where(leave_V, at_V, -1))
    return entered_V > left_V


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
