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
from recorder.diagnosis.rules import BIAS_RANGE_ABOVE, DROPPED_FROM, WINDOWS_TO_JUDGE, Finding
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
    found, last_E = [], load_SE[-window:].sum(axis=0)
    violation = float(metrics.max_violation(last_E))
    stretches = balance.collapses(load_SE, rows.top_k)
    for stretch in stretches:
        if stretch.end < len(load_SE):
            first, last = int(steps_S[stretch.first]), int(steps_S[stretch.end])
            began = f"from step {first:,} on" if stretch.first else f"within its first {window:,} steps"
            text = f"{rows.title} was collapsed {began} and recovered at step {last:,}"
            evidence = {"first_step": first, "recovered_step": last, "window": window}
            lowest = balance.effective_share(load_SE[stretch.first : stretch.end].sum(axis=0), rows.top_k)
            found.append(
                _finding(rows, "was_collapsed", text, step=first, within=window, value=float(lowest), evidence=evidence)
            )
    if stretches and stretches[-1].end == len(load_SE):
        return [_collapsed(rows, stretches[-1].first, load_SE, steps_S, window), *found]
    measured = {"max_violation": violation, "window": window}
    since = balance.balanced_since(load_SE)
    if since is not None:
        step = int(steps_S[since])
        became = f"became balanced at step {step:,}" if since else f"is balanced from its first {window:,} steps on"
        text = f"{rows.title} {became}: max_violation of the last {window:,} steps is {violation:.2g}"
        return [*found, _finding(rows, "balanced", text, step=step, within=window, value=violation, evidence=measured)]
    text = (
        f"{rows.title} is uneven but not collapsed: its busiest expert gets {violation + 1:.2g} times the uniform share"
        f" of the last {window:,} steps"
    )
    return [*found, _finding(rows, "uneven", text, step=int(steps_S[-1]), value=violation, evidence=measured)]


def _collapsed(rows: RouterRows, first: int, load_SE: np.ndarray, steps_S: np.ndarray, window: int) -> Finding:
    last_E = load_SE[max(first, len(load_SE) - max(window, metrics.WINDOW)) :].sum(axis=0)
    number, share = balance.concentration(last_E)
    step = int(steps_S[first if first else window - 1])  # at once collapsed, its first window shows it as a whole
    when = f"at step {step:,}" if first else f"within its first {window:,} steps"
    text = (
        f"{rows.title} collapsed {when}: {number:,} of {load_SE.shape[1]:,} experts take {share:.0%} of the assignments"
    )
    evidence = {
        "experts": number,
        "num_experts": load_SE.shape[1],
        "share": share,
        "effective_experts": float(metrics.effective_experts(last_E)),
        "busiest": np.argsort(-last_E, kind="stable")[:number].tolist(),
        "window": window,
    }
    value = float(balance.effective_share(load_SE[-window:].sum(axis=0), rows.top_k))
    return _finding(rows, "collapsed", text, step=step, within=window, value=value, evidence=evidence)


def _dead(rows: RouterRows, load_SE: np.ndarray, steps_S: np.ndarray, window: int) -> list[Finding]:
    found = []
    for dead in balance.dead(load_SE):
        step = int(steps_S[dead.since])
        never = dead.since == 0
        who = f"{_experts(dead.experts)} of {rows.name} {'has' if len(dead.experts) == 1 else 'have'}"
        text = f"{who} never received an assignment" if never else f"{who} received nothing since step {step:,}"
        evidence = {"experts": dead.experts, "since_step": step, "never": never, "window": window}
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
    text = (
        f"{rows.title} dropped {rate:.0%} of the assignments of the last {len(recorded):,} steps for lack of capacity"
    )
    step = int(recorded["step"].iloc[-1])
    return [_finding(rows, "dropped", text, step=step, value=rate, evidence={"window": len(recorded)})]


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


def _spell(steps: np.ndarray) -> dict[str, int]:
    return {"steps": int(steps.size), "first_step": int(steps[0]), "last_step": int(steps[-1])}
