"""What can be said of a run in plain sentences, each with the rule that fired and its evidence. Loads no torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

from recorder.diagnosis.routers import RouterRows, of_router, too_short
from recorder.diagnosis.rules import LEVELS, RULES, Finding, Level, Rule
from recorder.reader import Run
from recorder.summary import routers_of

__all__ = ["LEVELS", "RULES", "Finding", "Level", "Rule", "diagnose"]


def diagnose(run: Run, phase: str | None = None) -> list[Finding]:
    """Everything the rules find in a run, alarms first, then by the order of RULES, step, layer and router.

    Args:
        run: finished or running, with or without steps.
        phase: train, probe, eval or generate; None = `run.main_phase`.

    Raises:
        ValueError: an unknown phase.
    """
    phase = phase or run.main_phase
    routers = _routers(run, phase)
    found = [*_of_run(run), *_losses(run, phase), *_steps_of_ranks(run, phase)]
    known = [rows for rows in routers if len(rows.rows)]
    if not known:
        found.append(Finding(rule="no_load", text="No load was recorded, so nothing can be said of its balance"))
    for rows in known:
        found += of_router(rows)
    found += _too_short(known)
    order = list(RULES)
    return sorted(found, key=lambda one: (LEVELS.index(one.level), order.index(one.rule), one.step or 0))


def _routers(run: Run, phase: str) -> list[RouterRows]:
    routers = routers_of(run, phase)
    several = {layer for layer, times in Counter(layer for layer, _ in routers).items() if times > 1}
    found = []
    for layer, router in routers:
        rows = run.layer_stats(layer, phase=phase, router=router)
        rows = rows[rows["load"].notna().to_numpy(dtype=bool)]
        told: dict[str, Any] = next(
            (one for one in run.moe_layers if one.get("index") == layer and router in (None, one.get("router"))), {}
        )
        found.append(
            RouterRows(
                layer=layer,
                router=router if layer in several else None,
                top_k=told.get("top_k") or _told_by_loads(rows),
                score_function=told.get("score_function"),
                rows=rows,
            )
        )
    return found


def _told_by_loads(rows: pd.DataFrame) -> int:
    tokens = rows["tokens"].to_numpy(dtype=np.float64, na_value=np.nan)
    assignments = np.array([sum(load) for load in rows["load"]], dtype=np.float64)
    known = tokens > 0
    return max(1, round(float(assignments[known].sum() / tokens[known].sum()))) if known.any() else 1


def _too_short(routers: list[RouterRows]) -> list[Finding]:
    """One sentence for the routers that have equally few steps."""
    groups: dict[tuple[int, int], list[RouterRows]] = {}
    for rows in routers:
        lengths = too_short(rows)
        if lengths is not None:
            groups.setdefault(lengths, []).append(rows)
    found = []
    for (there, needed), alike in groups.items():
        which = alike[0].title if len(alike) == 1 else f"{len(alike):,} MoE layers"
        which = "All MoE layers" if 1 < len(alike) == len(routers) else which
        text = f"{which} cannot be judged yet: {needed:,} steps with tokens are needed, {there:,} were recorded"
        evidence = {"steps": there, "needed": needed, "layers": [rows.layer for rows in alike]}
        layer = alike[0].layer if len(alike) == 1 else None
        found.append(Finding(rule="too_short", text=text, layer=layer, value=there, evidence=evidence))
    return found


def _of_run(run: Run) -> list[Finding]:
    found = []
    if run.status == "failed":
        error = str(run.manifest.get("error") or "no reason given").splitlines()[0]
        found.append(Finding(rule="failed", text=f"The run failed: {error}", step=run.last_step))
    if run.status == "unfinished":
        text = "The run was not closed, as if its process had been killed"
        found.append(Finding(rule="unfinished", text=text, step=run.last_step))
    for segment in run.segments:
        if segment.segment > 0:
            text = f"The run was resumed at step {segment.first_step:,}"
            evidence = {"segment": segment.segment}
            found.append(Finding(rule="resumed", text=text, step=segment.first_step, evidence=evidence))
    if run.problems:
        many = "1 part file" if len(run.problems) == 1 else f"{len(run.problems):,} part files"
        damaged = {"files": [line.partition(": ")[0] for line in run.problems]}
        text = f"{many} cannot be read: the rows there are missing from all numbers"
        found.append(Finding(rule="unreadable", text=text, value=len(run.problems), evidence=damaged))
    events = run.events()
    faults = events[(events["kind"] == "recorder_error").to_numpy(dtype=bool)]
    if len(faults):
        step = int(faults["step"].iloc[0])
        times = "a fault" if len(faults) == 1 else f"{len(faults):,} faults"
        text = f"The recorder noted {times} of its own, at step {step:,} first: {faults['message'].iloc[0]}"
        found.append(Finding(rule="recorder_error", text=text, step=step, value=len(faults)))
    return found


def _losses(run: Run, phase: str) -> list[Finding]:
    steps = run.steps(phase)
    bad_S = np.zeros(len(steps), dtype=bool)
    for name in ("loss", "ce_loss"):
        values_S = steps[name].to_numpy(dtype=np.float64, na_value=0.0)
        bad_S |= ~np.isfinite(values_S)
    if not bad_S.any():
        return []
    numbers_S = steps["step"].to_numpy(dtype=np.int64)
    bad = numbers_S[bad_S]
    on = np.array_equal(bad, numbers_S[-bad.size :])
    where = f"from step {bad[0]:,} on" if on else f"in {bad.size:,} of {len(steps):,} steps, the first step {bad[0]:,}"
    evidence = {"steps": bad.size, "first_step": int(bad[0]), "last_step": int(bad[-1])}
    text = f"The loss is not finite {where}"
    return [Finding(rule="non_finite_loss", text=text, step=int(bad[0]), value=bad.size, evidence=evidence)]


def _steps_of_ranks(run: Run, phase: str) -> list[Finding]:
    steps = run.incomplete_steps(phase)
    if steps.empty:
        return []
    first, last = int(steps["step"].iloc[0]), int(steps["step"].iloc[-1])
    text = f"{len(steps):,} steps between {first:,} and {last:,} have rows of fewer ranks than the others"
    if len(steps) == 1:
        text = f"Step {first:,} has rows of fewer ranks than the others"
    evidence = {"first_step": first, "last_step": last, "fewest_ranks": int(steps["ranks"].min())}
    text += ": a load that falls there is no real fall"
    return [Finding(rule="incomplete_ranks", text=text, step=first, value=len(steps), evidence=evidence)]
