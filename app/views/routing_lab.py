"""Routing lab: one small batch by hand, routed and balanced by moe_core itself, with every number in between.

torch is loaded when the page is opened first, in `app.lab.run` alone.
"""

import numpy as np
import streamlit as st

from app import charts, state
from app.figures.choice_matrix import MOST_ROWS, choice_matrix
from app.figures.load_bars import load_bars
from app.lab import choices, controls, frames, run, sections, sentences, steps
from app.lab.lab import Lab
from app.lab.presets import PRESETS
from app.text import plain
from app.words import NONE, percent, value
from moe_core.metrics import drop_rate, max_violation, max_violation_bound


def render() -> None:
    """Draw the page."""
    lab = choices.current()
    state.show("lab", lab.entries())
    head = st.container()
    controls.head(lab)
    try:
        with st.spinner("Loading PyTorch, once for this server"):
            outcome = run.run(lab)
    except ValueError as error:
        head.title("These settings do not go together")
        st.error(plain(sentences.refusal(error, lab.settings)), icon=":material/error:")
        controls.actions(lab, can_apply=False)
        sections.given(lab)
        return
    ranking = steps.ranking(outcome, lab.settings)
    head.title(
        sentences.title(outcome, lab.settings),
        help="A mixture-of-experts layer sends each token to a few of its experts. This page does it for one small "
        "batch, with the code that trains real models, and shows every number on the way.",
    )
    begun = PRESETS[lab.preset]
    st.caption(begun.look if lab.is_as_begun else f"Begun as *{begun.label}*, and changed since.")
    _large_numbers(lab, outcome)
    _pictures(lab, outcome, ranking)
    st.write(sentences.update(outcome, lab) if lab.settings.balancer != "none" else "")
    can_move = lab.settings.moves_bias or (lab.settings.is_loss and lab.is_editable)
    controls.actions(lab, can_apply=can_move and outcome.num_routed > 0)
    sections.given(lab)
    sections.one_token(lab, outcome, ranking)
    sections.all_tokens(lab, outcome, ranking)
    sections.bias(lab, outcome)
    sections.load(lab, outcome)
    sections.losses(lab, outcome)
    sections.update(lab, outcome)


def _large_numbers(lab: Lab, outcome: run.Outcome) -> None:
    bound = max_violation_bound(lab.batch.num_experts, lab.settings.top_k)
    after = value(float(max_violation(outcome.next_load_E)))
    moves = lab.settings.balancer != "none"
    drops = None if outcome.dropped_E is None else float(drop_rate(outcome.dropped_E.sum(), outcome.load_E.sum()))
    columns = st.columns(5)
    columns[0].metric(
        "Max violation",
        value(float(max_violation(outcome.load_E))),
        f"then {after}" if moves else None,
        delta_color="off",
        delta_arrow="off",
        help=f"Load of the busiest expert over the mean load, minus 1: 0 is even, and it is at most E/k - 1 = "
        f"{value(bound)} here. Below it: the same after the update.",
    )
    columns[1].metric(
        "Aux loss",
        value(outcome.aux_loss),
        help="E x the sum of f x P over the experts, without its coefficient: an even load gives 1, and more is worse.",
    )
    columns[2].metric(
        "Z-loss",
        value(outcome.z_loss),
        help="The mean of the squared logsumexp of each token's logits, without its coefficient: small logits give a "
        "small one.",
    )
    columns[3].metric(
        "Rerouted",
        NONE if outcome.rerouted is None else percent(outcome.rerouted / max(int(outcome.load_E.sum()), 1), 1),
        help="What the bias changed: assignments that would have gone to another expert without it, over all "
        "assignments.",
    )
    columns[4].metric(
        "Dropped",
        percent(drops, 1),
        help="Assignments beyond their expert's capacity, over all assignments. A dash: there is no limit.",
    )


def _pictures(lab: Lab, outcome: run.Outcome, ranking: steps.Ranking) -> None:
    left, right = st.columns([3, 2], gap="large")
    settings = lab.settings
    by_experts = settings.router == "expert-choice"
    drawn = frames.assignments(outcome)
    name = "score" if by_experts else "corrected logit" if settings.router == "softmax-after" else "corrected score"
    with left:
        charts.show(
            choice_matrix(
                outcome.selection_TE if by_experts else ranking.corrected_TE,
                outcome.expert_ids_TK if by_experts else ranking.order_TR,
                num_chosen=outcome.expert_ids_TK.shape[1],
                value_name=name,
                title="Each expert takes its best tokens" if by_experts else _choice_title(settings.top_k, name),
                dropped_TE=_dropped(outcome),
                theme=charts.theme(),
                wrap_at=46,
            ),
            key="lab_choices",
            alt=f"Tokens by experts, the {name} of each, the chosen ones framed.",
            numbers=lambda: drawn[drawn["token"] < MOST_ROWS],
        )
    with right:
        bias_E = outcome.bias_E
        charts.show(
            load_bars(
                outcome.load_E,
                top_k=settings.top_k,
                title="Load over the even share" + (", and the bias that gave it" if bias_E is not None else ""),
                theme=charts.theme(),
                bias_E=bias_E,
                colorbar=False,
                wrap_at=30,
            ),
            key="lab_loads",
            alt="Bars of each expert's load over the even share" + (", and its bias." if bias_E is not None else "."),
            numbers=lambda: frames.loads(outcome),
        )


def _choice_title(top_k: int, name: str) -> str:
    many = f"its {top_k} experts" if top_k > 1 else "one expert"
    return f"Each token takes {many} with the highest {name}{'s' if top_k > 1 else ''}"


def _dropped(outcome: run.Outcome) -> np.ndarray | None:
    """Which token and expert were dropped, bool (T, E)."""
    if outcome.kept_TK is None:
        return None
    dropped_TE = np.zeros(outcome.logits_TE.shape, dtype=bool)
    tokens, slots = np.nonzero((outcome.expert_ids_TK >= 0) & ~outcome.kept_TK)
    dropped_TE[tokens, outcome.expert_ids_TK[tokens, slots]] = True
    return dropped_TE
