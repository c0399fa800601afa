"""Replay's bars: load and bias of every expert at one step, what is known of one expert, and what changed."""

from typing import Any

import numpy as np
import streamlit as st

from app import charts, layer_keys, moving
from app.figures.load_bars import MAX_MARKED, load_bars
from app.layer_stats import LayerStats
from app.moments import Moment, changes, expert_numbers, share_change_E
from app.text import plain
from app.words import NONE, count, value
from moe_core import metrics
from recorder.reader import Run

MOST = 5  # experts listed as gaining or losing most


def bars(stats: LayerStats, now: Moment, expert: int | None, answer: str) -> None:
    """Bars of load and, where there is one, of the bias.

    answer: the page's title, for those who cannot see the bars.
    """
    bias_range = _bias_range(stats)
    moves = bias_moves(stats)
    nothing_E = np.full_like(now.load_E, np.nan)
    marks = []
    if len(now.load_E) <= MAX_MARKED:  # the figure draws none for more experts
        marks += ["Dashes mark the step recorded before."] if stats.steps_S.size > 1 else []
        marks += [] if np.isnan(now.gate_mass_E).all() else ["Diamonds mark each expert's share of the gate weights."]
    st.caption(
        "Look for bars at the foot (purple: below 1/16 of the uniform share) beside one that stands far above 1. "
        + " ".join(marks)
    )
    bias = "" if bias_range is None else " and bias" if moves else " and fixed bias"
    figure = load_bars(
        now.load_E,
        top_k=now.top_k,
        title=f"Load{bias} per expert, layer {stats.label}, step {now.step:,}",
        theme=charts.theme(),
        # Marks without a place at the first step: with none at all the legend would grow at the second.
        previous_load_E=nothing_E if stats.steps_S.size > 1 and now.before_load_E is None else now.before_load_E,
        previous_step=now.before_step,
        gate_mass_E=None if np.isnan(now.gate_mass_E).all() else now.gate_mass_E,
        bias_E=None if bias_range is None else now.bias_E,
        previous_bias_E=now.before_bias_E if now.bias_E is not None and moves else None,
        bias_range=bias_range,
        highlight=expert,
        wrap_at=200,  # one line at every step, so that nothing moves
    )
    moving.show(figure, key="replay_bars", alt=f"Bars of load over the uniform share, one an expert. {answer}.")


def notes(run: Run, stats: LayerStats, now: Moment, expert: int | None) -> None:
    """The numbers of the bars; a line on one expert, where one is chosen, and one on the bias."""
    charts.table_to_open(lambda: expert_numbers(now), key="replay_experts")
    if expert is not None:
        st.caption(_of_expert(now, expert, bias_moves(stats)))
    st.caption(_about_bias(run, stats, now))


def bias_moves(stats: LayerStats) -> bool:
    """Whether the bias differs between any two recorded steps; True where a single step cannot tell."""
    if stats.expert_bias_SE is None:
        return False
    known_SE = stats.expert_bias_SE[np.isfinite(stats.expert_bias_SE).any(axis=1)]
    return len(known_SE) < 2 or bool((known_SE != known_SE[0]).any())


def _bias_range(stats: LayerStats) -> tuple[float, float] | None:
    """Smallest and largest bias of the whole run; None where there never was one, or it is 0 throughout."""
    if stats.expert_bias_SE is None:
        return None
    finite = stats.expert_bias_SE[np.isfinite(stats.expert_bias_SE)]
    if not finite.size or (not finite.any() and not bias_moves(stats)):
        return None
    return float(finite.min()), float(finite.max())


def _about_bias(run: Run, stats: LayerStats, now: Moment) -> str:
    bias_range = _bias_range(stats)
    if bias_range is None and stats.expert_bias_SE is None:
        return f"No bias is drawn: none is recorded here; the balancer is: {_balancer(run, stats.layer)}."
    if bias_range is None:
        return (
            f"No bias is drawn: it is 0 for every expert at every recorded step; nothing moves it here. "
            f"The balancer is: {_balancer(run, stats.layer)}."
        )
    if now.bias_E is None:
        return "No bias was recorded at this step."
    low, high = int(np.nanargmin(now.bias_E)), int(np.nanargmax(now.bias_E))
    said = (
        f"Bias used in this step: from {now.bias_E[low]:+.4g} (expert {low}) to {now.bias_E[high]:+.4g} "
        f"(expert {high}). It is added to the scores for selection only; axes are those of the whole run."
    )
    return said if bias_moves(stats) else f"{said} It is the same at every recorded step: no balancer moves it here."


def _balancer(run: Run, layer: int) -> str:
    of_layer = layer_keys.router(run, layer).get("balancer")
    return plain(str(of_layer or run.config.get("balancer") or "not named"))


def _of_expert(now: Moment, expert: int, bias: bool) -> str:
    ratio = float(metrics.load_ratio(now.load_E)[expert])
    text = f"Expert {expert}: {value(now.load_E[expert])} assignments, {value(ratio)} x the uniform share"
    change = float(share_change_E(now)[expert])
    if np.isfinite(change):
        moved = f", {change:+.2f} points of its share since" if change else ", the same share as at"
        text += f"{moved} step {now.before_step:,}"
    if now.bias_E is not None and bias:
        text += f", bias {now.bias_E[expert]:+.4g}"
    return text + "."


# ------------------------------------------------------------------------------------------------- what changed


def what_changed(stats: LayerStats, now: Moment) -> None:
    """The experts whose share of the assignments gained and lost most since the step recorded before."""
    if stats.steps_S.size < 2:
        st.caption("Only one step is recorded, so there is nothing to compare it with.")
        return
    moves = bias_moves(stats)
    if now.before_step is None:
        st.subheader("What changed", anchor=False)
        st.caption(f"Step {now.step:,} is the first one recorded: there is none before it.")
    else:
        st.subheader(f"What changed since step {now.before_step:,}", anchor=False)
        st.caption(_in_words(now, stats.phase, moves))
    gained, lost = changes(now, MOST)
    for column, heading, frame, key in zip(
        st.columns(2, gap="medium"), ("Gained most", "Lost most"), (gained, lost), ("gained", "lost"), strict=True
    ):
        with column:
            st.markdown(f"**{heading}**")
            st.dataframe(
                frame if moves else frame.drop(columns="bias change", errors="ignore"),
                hide_index=True,
                width="stretch",
                height=35 * (MOST + 1) + 3,  # fixed: fewer rows must not move what is below
                placeholder=NONE,
                key=f"replay_{key}",
                column_config=_columns(),
                alt=f"{heading}: experts, with their shares of the assignments at this step and the one before.",
            )


def _columns() -> dict[str, Any]:
    number = st.column_config.NumberColumn
    return {
        "before (%)": number(format="%.2f", help="Share of the assignments of the step recorded before."),
        "now (%)": number(format="%.2f", help="Share of the assignments of this step."),
        "change (points)": number("points", format="%+.2f", help="The one less the other, in points of per cent."),
        "bias change": number(format="%+.4g"),
    }


def _in_words(now: Moment, phase: str, moves: bool) -> str:
    change_E = share_change_E(now)
    gained, lost = int((change_E > 0).sum()), int((change_E < 0).sum())
    other = ", which had other tokens" if phase == "train" else ""
    text = (
        f"Shares of this step's assignments less those of the step before{other}: "
        f"{count(gained, 'expert')} gained and {count(lost, 'expert')} lost"
    )
    if now.tokens != now.before_tokens and np.isfinite([now.tokens, now.before_tokens]).all():
        text += f"; the tokens went from {value(now.before_tokens)} to {value(now.tokens)}, which shares allow for"
    text += "."
    if moves and now.bias_E is not None and now.before_bias_E is not None:
        change_bias_E = now.bias_E - now.before_bias_E
        moved_E = np.nan_to_num(np.abs(change_bias_E))
        most = np.flatnonzero(np.isclose(moved_E, moved_E.max(initial=0), rtol=1e-4))
        changed = int((change_bias_E != 0).sum())
        text += f" The bias changed for {count(changed, 'expert')}"
        if not changed:
            return f"{text}."
        if len(most) == 1:
            text += f", most for expert {most[0]} ({change_bias_E[most[0]]:+.4g})."
        else:
            text += f", most, by {moved_E[most[0]]:.4g}, for {len(most)} of them."
    return text
