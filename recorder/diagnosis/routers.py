"""What is said of one router of a run: its balance, its dead experts, and what it could not route.

Shapes: S recorded steps, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moe_core import metrics
from recorder.diagnosis import balance
from recorder.diagnosis.rules import BALANCED_BELOW, BIAS_RANGE_ABOVE, DROPPED_FROM, WINDOWS_TO_JUDGE, Finding
from recorder.schema import lists_to_matrix

_BOUNDED_SCORES = ("softmax", "sigmoid")
_MOST_NAMED = 12  # experts; more are counted


@dataclass(frozen=True, kw_only=True)
class RouterRows:
    """The `layer_stats` of one router in one phase, by step.

    layer, router   its place; `router` is None where the layer has only one
    top_k           k; where nobody says, told by loads and tokens, else 1
    score_function  as the manifest names it, or None
    rows            of `Run.layer_stats`, ascending
    """

    layer: int
    router: int | None
    top_k: int
    score_function: str | None
    rows: pd.DataFrame

    @property
    def name(self) -> str:
        return f"layer {self.layer}" + ("" if self.router is None else f" (router {self.router})")

    @property
    def title(self) -> str:
        return self.name[0].upper() + self.name[1:]


def too_short(rows: RouterRows) -> tuple[int, int] | None:
    """Steps with tokens that there are, and that are needed, where those are more."""
    load_SE, _ = _routed(rows)
    needed = WINDOWS_TO_JUDGE * balance.window_rows(load_SE)
    return (len(load_SE), needed) if len(load_SE) < needed else None


def of_router(rows: RouterRows) -> list[Finding]:
    """All sentences about one router; none about its balance where it is `too_short`."""
    found = [*_unrouted(rows), *_invalid(rows)]
    load_SE, steps_S = _routed(rows)
    if balance.can_be_judged(load_SE):
        window = balance.window_rows(load_SE)
        found += [
            *_balance(rows, load_SE, steps_S, window),
            *_dead(rows, load_SE, steps_S, window),
            *_dropped(rows, window),
            *_bias(rows, window),
        ]
    return found


def _routed(rows: RouterRows) -> tuple[np.ndarray, np.ndarray]:
    """Loads (S, E) and steps (S,) of the steps that routed tokens."""
    if rows.rows.empty:
        return np.zeros((0, 1), dtype=np.int64), np.zeros(0, dtype=np.int64)
    load_SE = lists_to_matrix(rows.rows["load"])
    routed_S = load_SE.sum(axis=-1) > 0
    return load_SE[routed_S], rows.rows["step"].to_numpy(dtype=np.int64)[routed_S]


def _finding(rows: RouterRows, rule: str, text: str, **more: Any) -> Finding:
    return Finding(rule=rule, text=text, layer=rows.layer, router=rows.router, **more)


def _balance(rows: RouterRows, load_SE: np.ndarray, steps_S: np.ndarray, window: int) -> list[Finding]:
    """The state the layer is in at the end, one sentence; and collapses that it has recovered from."""
    collapses = balance.collapses(load_SE, rows.top_k)
    found = [_was_collapsed(rows, one.onset, one.recovery, load_SE, steps_S) for one in collapses if one.recovery]
    if collapses and collapses[-1].recovery is None:
        return [_collapsed(rows, collapses[-1].onset, load_SE, steps_S, window), *found]
    violation = float(metrics.max_violation(load_SE[-window:].sum(axis=0)))
    measured = {"max_violation": violation, "window": window, **_spell(steps_S[-window:])}
    since = balance.balanced_since(load_SE)
    if since is not None:
        step = int(steps_S[since])
        became = f"became balanced at step {step:,}" if since else "is balanced from its first step on"
        text = f"{rows.title} {became}: max_violation of {_last(steps_S[-window:])} is {violation:.2g}"
        return [*found, _finding(rows, "balanced", text, step=step, value=violation, evidence=measured)]
    state = "uneven but not collapsed"
    if violation < BALANCED_BELOW:
        state = f"even by now, but has not been for {WINDOWS_TO_JUDGE * window:,} steps"
    text = (
        f"{rows.title} is {state}: over {_last(steps_S[-window:])} its busiest expert gets "
        f"{violation + 1:.2g} times the uniform share"
    )
    return [*found, _finding(rows, "uneven", text, step=int(steps_S[-1]), value=violation, evidence=measured)]


def _collapsed(
    rows: RouterRows, onset: balance.Change, load_SE: np.ndarray, steps_S: np.ndarray, window: int
) -> Finding:
    """The sentence, its evidence and its value are all of the last steps, a window or as many as the pages sum."""
    start = max(onset.high, len(load_SE) - max(window, metrics.WINDOW))
    last_E, steps = load_SE[start:].sum(axis=0), steps_S[start:]
    number, share = balance.concentration(last_E)
    text = (
        f"{rows.title} collapsed {_when(onset, steps_S)}; over {_last(steps)} {number:,} of {load_SE.shape[1]:,} "
        f"experts {'takes' if number == 1 else 'take'} {share:.0%} of the assignments"
    )
    evidence = {
        "onset": _bracket(onset, steps_S),
        "experts": number,
        "num_experts": load_SE.shape[1],
        "share": share,
        "effective_experts": float(metrics.effective_experts(last_E)),
        "busiest": np.argsort(-last_E, kind="stable")[:number].tolist(),
        "window": window,
        **_spell(steps),
    }
    value = float(balance.effective_share(last_E, rows.top_k))
    return _of_change(rows, "collapsed", text, onset, steps_S, value=value, evidence=evidence)


def _was_collapsed(
    rows: RouterRows, onset: balance.Change, recovery: balance.Change, load_SE: np.ndarray, steps_S: np.ndarray
) -> Finding:
    text = f"{rows.title} collapsed {_when(onset, steps_S)} and recovered {_when(recovery, steps_S)}"
    evidence = {
        "onset": _bracket(onset, steps_S),
        "recovery": _bracket(recovery, steps_S),
        "recovered_step": int(steps_S[recovery.row]),
    }
    value = float(balance.effective_share(load_SE[onset.row : recovery.row].sum(axis=0), rows.top_k))
    return _of_change(rows, "was_collapsed", text, onset, steps_S, value=value, evidence=evidence)


def _of_change(
    rows: RouterRows, rule: str, text: str, change: balance.Change, steps_S: np.ndarray, **more: Any
) -> Finding:
    within = max(change.row - change.low, change.high - change.row)
    return _finding(rows, rule, text, step=int(steps_S[change.row]), within=within, **more)


def _bracket(change: balance.Change, steps_S: np.ndarray) -> list[int]:
    """The last recorded step that was before a change for certain (its own where none was), and the first after it."""
    return [int(steps_S[max(change.low - 1, 0)]), int(steps_S[change.high])]


def _when(change: balance.Change, steps_S: np.ndarray) -> str:
    """As exactly as the records tell; steps that were not recorded, between two that were, are not told apart."""
    before, after = _bracket(change, steps_S)
    if change.low == 0:
        return f"within its first {change.high + 1:,} steps" if change.high else f"at its first step ({after:,})"
    return f"at step {after:,}" if after == before + 1 else f"between steps {before:,} and {after:,}"


def _dead(rows: RouterRows, load_SE: np.ndarray, steps_S: np.ndarray, window: int) -> list[Finding]:
    found = []
    for dead in balance.dead(load_SE):
        step, without = int(steps_S[dead.since]), steps_S[dead.since :]
        never = dead.since == 0
        who = f"{_experts(dead.experts)} of {rows.name} {'has' if len(dead.experts) == 1 else 'have'}"
        text = f"{who} received nothing in {_last(without)}"
        if never:
            text = f"{who} never received an assignment in {without.size:,} steps"
        evidence = {"experts": dead.experts, "since_step": step, "never": never, "window": window, **_spell(without)}
        found.append(_finding(rows, "dead_experts", text, step=step, value=0.0, evidence=evidence))
    return found


def _unrouted(rows: RouterRows) -> list[Finding]:
    _, routed = _routed(rows)
    every = rows.rows["step"].to_numpy(dtype=np.int64)
    without = np.setdiff1d(every, routed)
    if not without.size:
        return []
    text = f"No token of {rows.name} was routed in {_of_steps(without, every)}"
    return [_finding(rows, "unrouted", text, step=int(without[0]), value=without.size, evidence=_spell(without))]


def _invalid(rows: RouterRows) -> list[Finding]:
    invalid_S = rows.rows["invalid"].to_numpy(dtype=np.float64, na_value=0)
    steps = rows.rows["step"].to_numpy(dtype=np.int64)
    bad = steps[invalid_S > 0]
    if not bad.size:
        return []
    many = int(invalid_S.sum())
    tokens = "1 token" if many == 1 else f"{many:,} tokens"
    text = f"{tokens} of {rows.name} could not be routed, in {_of_steps(bad, steps)}"
    evidence = {"tokens": many, **_spell(bad)}
    return [_finding(rows, "invalid_rows", text, step=int(bad[0]), value=many, evidence=evidence)]


def _dropped(rows: RouterRows, window: int) -> list[Finding]:
    recorded = rows.rows[rows.rows["dropped"].notna().to_numpy(dtype=bool)].tail(window)
    if recorded.empty:
        return []
    dropped_S = lists_to_matrix(recorded["dropped"]).sum(axis=-1)
    rate = float(metrics.drop_rate(dropped_S.sum(), lists_to_matrix(recorded["load"]).sum()))
    if not rate >= DROPPED_FROM:
        return []
    steps = recorded["step"].to_numpy(dtype=np.int64)
    text = f"{rows.title} dropped {rate:.0%} of the assignments of {_last(steps)} for lack of capacity"
    evidence = {"window": len(recorded), **_spell(steps)}
    return [_finding(rows, "dropped", text, step=int(steps[-1]), value=rate, evidence=evidence)]


def _bias(rows: RouterRows, window: int) -> list[Finding]:
    if str(rows.score_function) not in _BOUNDED_SCORES:
        return []
    recorded = rows.rows[rows.rows["expert_bias"].notna().to_numpy(dtype=bool)]
    if len(recorded) < WINDOWS_TO_JUDGE * window:
        return []
    bias_SE = lists_to_matrix(recorded["expert_bias"]).astype(np.float64)
    range_S = bias_SE.max(axis=-1) - bias_SE.min(axis=-1)
    now, before, halfway = (float(range_S[place]) for place in (-1, -1 - window, len(range_S) // 2))
    if not (now > BIAS_RANGE_ABOVE and now > before and now > halfway):
        return []
    steps = recorded["step"].to_numpy(dtype=np.int64)
    first = int(np.flatnonzero(~(range_S > BIAS_RANGE_ABOVE))[-1] + 1) if (range_S <= BIAS_RANGE_ABOVE).any() else 0
    text = f"The biases of {rows.name} run away: they span {now:.3g}, more than {BIAS_RANGE_ABOVE:g} since step "
    text += f"{int(steps[first]):,}, and still spread"
    evidence = {"range": now, "range_halfway": halfway, "since_step": int(steps[first])}
    return [_finding(rows, "bias_runaway", text, step=int(steps[first]), value=now, evidence=evidence)]


def _experts(experts: list[int]) -> str:
    if len(experts) == 1:
        return f"Expert {experts[0]}"
    if len(experts) > _MOST_NAMED:
        return f"{len(experts):,} experts"
    return f"Experts {', '.join(map(str, experts[:-1]))} and {experts[-1]}"


def _of_steps(some: np.ndarray, every: np.ndarray) -> str:
    if some.size == every.size:
        return f"all {every.size:,} steps" if every.size > 1 else "the only step"
    return f"{some.size:,} of {every.size:,} steps, the first of them step {int(some[0]):,}"


def _last(steps: np.ndarray) -> str:
    return f"the last {steps.size:,} steps ({int(steps[0]):,} to {int(steps[-1]):,})"


def _spell(steps: np.ndarray) -> dict[str, int]:
    return {"steps": int(steps.size), "first_step": int(steps[0]), "last_step": int(steps[-1])}
