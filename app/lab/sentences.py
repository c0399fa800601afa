"""What the numbers of the lab say, in words. No torch, no Streamlit."""

from __future__ import annotations

import numpy as np

from app.lab.lab import Lab
from app.lab.run import Outcome
from app.lab.settings import Settings
from app.words import count, listed, value
from moe_core.metrics import max_violation

_MOST_NAMED = 3  # experts in a title; more are counted


def title(outcome: Outcome, settings: Settings) -> str:
    """The page's answer: who takes how much, and what the balancer would do about it."""
    if outcome.num_routed == 0:
        return "No token can be routed"
    return f"{_who(outcome, settings)}; {_then(outcome, settings)}"


def update(outcome: Outcome, lab: Lab) -> str:
    """What the update does to this batch: "The update takes max violation on this batch from 2 to 0." """
    before, after = (float(max_violation(load_E)) for load_E in (outcome.load_E, outcome.next_load_E))
    applied = f"{count(lab.applied, 'update')} applied so far. " if lab.applied else ""
    one = "The next" if lab.applied else "The update"
    if outcome.num_routed == 0:
        return f"{applied}There is no token to learn from."
    if np.array_equal(outcome.load_E, outcome.next_load_E):
        return f"{applied}{one} leaves every choice in this batch as it is: max violation stays at {value(before)}."
    if before == after:
        return f"{applied}{one} moves choices, yet max violation stays at {value(before)}."
    return f"{applied}{one} takes max violation on this batch from {value(before)} to {value(after)}."


def refusal(error: ValueError, settings: Settings) -> str:
    """Why moe_core refuses these settings, and what to choose instead."""
    if settings.router == "softmax-after" and settings.top_k == 1:
        return (
            "With k = 1 a softmax over the one chosen expert makes every weight 1, so that the router gets no gradient "
            "and learns nothing. Choose a higher k, or another router."
        )
    return f"{str(error)[:1].upper()}{str(error)[1:]}. Choose another router, balancer or k."


def _who(outcome: Outcome, settings: Settings) -> str:
    load_E, tokens = outcome.load_E, outcome.num_routed
    most = int(load_E.max())
    of = f"{most:,} of {count(tokens, 'token')}"
    busiest = np.flatnonzero(load_E == most).tolist()
    none = int((outcome.routed_T & (outcome.expert_ids_TK < 0).all(-1)).sum())
    left = f", and {count(none, 'token')} get{'s' if none == 1 else ''} none" if none else ""
    if len(busiest) == len(load_E):
        return f"Every expert takes {of}{left}"
    if len(busiest) == 1:
        return f"Expert {busiest[0]} takes {of}{left}"
    names = f"Experts {listed([str(e) for e in busiest])}" if len(busiest) <= _MOST_NAMED else f"{len(busiest)} experts"
    return f"{names} take {of} each{left}"


def _then(outcome: Outcome, settings: Settings) -> str:
    if settings.moves_bias:
        old_E = np.zeros(len(outcome.load_E)) if outcome.bias_E is None else outcome.bias_E
        if np.array_equal(old_E, outcome.updated.bias_E):
            return "no bias would move"
        expert = int(outcome.load_E.argmax())
        whose = "the bias of the first" if (outcome.load_E == outcome.load_E.max()).sum() > 1 else "its bias"
        before, after = (value(float(bias_E[expert])) for bias_E in (old_E, outcome.updated.bias_E))
        return f"{whose} would stay at {before}" if before == after else f"{whose} would go from {before} to {after}"
    if settings.balancer == "z":
        return f"the z-loss is {value(outcome.z_loss)}"
    if settings.is_loss:
        loss = value(outcome.aux_loss)
        return f"the aux loss is {'that' if loss == '1' else f'{loss} times that'} of an even load"
    if outcome.rerouted:
        return f"the bias changed {outcome.rerouted:,} of {count(int(outcome.load_E.sum()), 'choice')}"
    dropped = 0 if outcome.dropped_E is None else int(outcome.dropped_E.sum())
    if dropped:
        return f"{count(dropped, 'assignment')} {'is' if dropped == 1 else 'are'} dropped"
    return "no balancer would change that"
