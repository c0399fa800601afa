"""Text beside a replay: where the tokens of one sequence go at the step shown, as text and as a matrix.

Single decisions are recorded at some steps only: shown are those of the last such step at or before the one replayed.
Shape suffixes: S steps, T tokens, K top-k.
"""

from typing import Any

import numpy as np
import streamlit as st

from app import charts, data, layer_keys, moving, navigation, state, token_routes, words
from app.figures.token_matrix import token_matrix
from app.figures.token_text import TokenRows, token_html
from recorder.reader import Run

PHASES = ("probe", "train", "eval", "generate")  # the probe first: its text stays while the experts change
MAX_TOKENS = 256  # of the sequence; text and matrix are sent anew with every frame
MAX_MATRIX_TOKENS = 128
_TEXT_HEIGHT = 190  # pixels; fixed, so that nothing below moves
_ROUTES = "_token_strip_routes"


def text(run: Run, layer: int, step: int, expert: int | None) -> tuple[TokenRows, int] | None:
    """Draw the choice of a sequence and its text as it was routed at `step`, or last recorded before it.

    layer   its key, see `app.layer_keys`
    expert  whose tokens alone are coloured; None colours the busiest experts
    Returns its tokens and the step they are of; None where there are none, after saying so.
    """
    phases = [phase for phase in PHASES if data.decision_steps(run, phase).size]
    if not phases:
        st.caption("No single decisions were recorded in this run, so no text moves with the loads.")
        return None
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        phase = state.pick_option("phase", "Text of", phases, format_func=_phase_in_words)
        at = at_or_before(data.decision_steps(run, phase), step)
        routes = None if at is None else _routes(run, layer, at, phase)
        sequence = None if routes is None else _pick_sequence(routes.rows)
        if at is not None and st.button("Open in Tokens", key="strip_tokens", icon=":material/text_fields:"):
            navigation.go("tokens", layer=layer, step=at, phase=phase, sequence=sequence)
    label = layer_keys.label(run, layer)
    if at is None:
        first = int(data.decision_steps(run, phase)[0])
        st.caption(
            f"None of phase {phase} at or before step {step:,}: the first decisions are those of step {first:,}."
        )
        return None
    if routes is None or sequence is None:
        st.caption(f"No decisions of layer {label} were recorded at step {at:,}.")
        return None
    rows = token_routes.take(routes.rows, np.flatnonzero(routes.rows.sequence_T == sequence)[:MAX_TOKENS])
    st.caption(_about(routes.rows, rows, sequence, phase, at, step))
    with st.container(height=_TEXT_HEIGHT, border=False, key="replay_text"):
        st.html(_html(run, layer, rows, expert, f"Layer {label}, step {at:,}"))
    return rows, at


def matrix(run: Run, layer: int, rows: TokenRows, at: int) -> None:
    """Draw the gate weights of what `text` returned; nothing where none were recorded."""
    weights_TK = np.where(rows.experts_TK >= 0, rows.weights_TK, 0.0)
    if np.isnan(weights_TK).all():
        return
    num_experts = max(data.layer_stats(run, layer).num_experts, int(rows.experts_TK.max(initial=0)) + 1)
    used = len(np.unique(rows.experts_TK[rows.experts_TK >= 0]))
    where = f"layer {layer_keys.label(run, layer)}, step {at:,}"
    heading = f"Its {words.count(len(rows), 'token')} use {used} of {num_experts} experts, {where}"
    figure = token_matrix(
        rows,
        num_experts=num_experts,
        title=heading,
        theme=charts.theme(),
        weight_limit=min(1.0, 4 / rows.experts_TK.shape[1]),  # by k alone: a colour means the same at every step
        max_tokens=MAX_MATRIX_TOKENS,
        wrap_at=200,
    )
    moving.show(figure, key="replay_tokens", alt=f"Gate weights of the tokens by expert. {heading}.")
    charts.table_to_open(lambda: token_routes.numbers(rows), key="replay_token_numbers", label="Numbers of the tokens")


def at_or_before(steps_S: np.ndarray, step: int) -> int | None:
    """The last of these ascending steps that is not after `step`; None where all are."""
    place = int(np.searchsorted(steps_S, step, side="right"))
    return int(steps_S[place - 1]) if place else None


def _phase_in_words(phase: str) -> str:
    return "the probe" if phase == "probe" else "the training batch" if phase == "train" else phase


def _routes(run: Run, layer: int, at: int, phase: str) -> token_routes.Routes | None:
    """The joined decisions, kept for as long as the same ones are asked for: several frames show one step's."""
    key = (run.path, hash(run.fingerprint), layer, at, phase)
    kept: Any = st.session_state.get(_ROUTES)
    if kept is None or kept[0] != key:
        decisions = data.decisions(run, at, layer, phase)
        found = None if decisions.empty else token_routes.join(decisions, data.tokens(run, at, phase))
        kept = (key, found if found is not None and len(found.rows) else None)
        st.session_state[_ROUTES] = kept
    routes: token_routes.Routes | None = kept[1]
    return routes


def _pick_sequence(rows: TokenRows) -> int:
    found = token_routes.sequences(rows)
    if len(found) == 1:
        return found[0][0]
    names = {number: f"{domain or 'sequence'} {number}" for number, domain in found}
    return state.pick_option("sequence", "Sequence", list(names), format_func=names.__getitem__, as_list=True)


def _about(all_rows: TokenRows, rows: TokenRows, sequence: int, phase: str, at: int, step: int) -> str:
    which = "this step" if at == step else f"step {at:,}, the last with recorded decisions at or before step {step:,}"
    text = f"Decisions of {which}. "
    if phase == "probe":
        text += "The probe is the same held-out text each time: watch colours and numbers change, not words."
    else:
        text += "Every batch has other text. Colours and numbers are experts."
    total = int((all_rows.sequence_T == sequence).sum())
    if len(rows) < total:
        text += f" The first {len(rows):,} of {total:,} tokens."
    return text


def _html(run: Run, layer: int, rows: TokenRows, expert: int | None, title: str) -> str:
    places = token_routes.colour_owners(np.asarray(data.layer_stats(run, layer).load_SE.sum(axis=0)))
    return token_html(
        rows,
        title=title,
        theme=charts.theme(),
        highlight=None if expert is None else [expert],
        colour_experts=places if expert is None or expert in places else [expert],
        legend=False,
    )
