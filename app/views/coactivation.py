"""Which experts fire together: within a layer, and from one MoE layer to the next.

Shapes: E experts of a layer, F of the next MoE layer.
"""

import numpy as np
import streamlit as st

from app import charts, coactivation, data, glossary, layer_keys, navigation
from app.figures.pair_matrix import pair_matrix
from app.text import plain
from app.views import one_layer
from app.words import count, in_phase, value
from recorder.reader import Run


def render() -> None:
    """Draw the page."""
    about = one_layer.choose("Co-activation", unknown="experts fired for the same token")
    if about is None:
        return
    run, layer, phase, load_E = about.run, about.layer, about.phase, about.load_E
    steps_S = data.decision_steps(run, phase)
    with about.head:
        title = st.empty()
        st.caption(
            f"**{plain(run.name)}**, phase {phase}: all recorded decisions of {count(steps_S.size, 'step')}, "
            f"{steps_S[0]:,} to {steps_S[-1]:,}, counted together."
        )
    said = _together(run, layer, phase, load_E)
    title.title(
        said
        or f"Layer {in_phase(layer_keys.label(run, layer), phase)}: each token uses one expert, so none fire together",
        help=glossary.explain("coactivation"),
    )
    _flow(run, layer, phase, load_E)
    if st.button("See this layer's tokens", key="coactivation_tokens", icon=":material/text_fields:"):
        navigation.go("tokens", layer=layer, phase=phase)


def _together(run: Run, layer: int, phase: str, load_E: np.ndarray) -> str | None:
    """Draw the pairs of a layer and return what they say; None where tokens use one expert each."""
    stats = data.layer_stats(run, layer, phase)
    if stats.top_k < 2:
        st.caption("With k = 1 a token has no pair of experts in a layer; below, where its tokens go in the next one.")
        return None
    named = layer_keys.label(run, layer)
    tokens, together_EE = data.pairs_of_decisions(run, layer, phase)
    share_EE = _pairs(run, layer, phase)
    chance = coactivation.pair_chance(len(load_E), stats.top_k)
    limit = max(float(np.nanmax(_pairs(run, one, phase), initial=0)) for one in _layers_with_pairs(run, phase))
    st.caption(
        "Each row is of one expert's own tokens, however few; the Numbers count the tokens of every pair. Experts that "
        "fire together stand side by side: squares that stand out along the diagonal are groups of "
        "experts that share their tokens; an even ground is chance. The diagonal itself says nothing and is left out."
    )
    order_E = coactivation.together_order(share_EE)
    figure = pair_matrix(
        share_EE,
        order_E,
        order_E,
        title=coactivation.closest_title(named, share_EE, load_E, chance),
        row_title="of the tokens of expert",
        column_title="use expert",
        hover="of the tokens of expert %{y} use %{x} too",
        limit=max(limit, chance),
        theme=charts.theme(),
        note=f"Chance: {value(100 * chance)}%, (k - 1) / (E - 1). One scale for all layers of the run.",
    )
    charts.show(
        figure,
        key="coactivation",
        alt=f"Share of each expert's tokens that use each other one of layer {named}.",
        numbers=lambda: coactivation.together_table(together_EE, tokens, stats.top_k),
    )
    return coactivation.commonest_title(in_phase(named, phase), together_EE, tokens, stats.top_k)


def _pairs(run: Run, layer: int, phase: str) -> np.ndarray:
    share_EE = data.of_run(run, "coactivation", layer, phase).to_numpy(np.float64).copy()
    np.fill_diagonal(share_EE, np.nan)
    return share_EE


def _layers_with_pairs(run: Run, phase: str) -> list[int]:
    return [
        layer
        for layer in layer_keys.keys(run)
        if data.layer_stats(run, layer, phase).top_k > 1 and data.load_of_decisions(run, layer, phase).sum()
    ]


def _flow(run: Run, layer: int, phase: str, load_E: np.ndarray) -> None:
    frame = data.of_run(run, "transitions", layer, phase)
    named = layer_keys.label(run, layer)
    if frame.empty:
        st.caption(f"Layer {named} is the last MoE layer: its tokens go to no other.")
        return
    next_key = layer_keys.key_of(run, frame.attrs["next_layer"], frame.attrs["next_router"])
    following = layer_keys.label(run, next_key)
    st.subheader(f"From layer {named} to layer {following}", anchor=False, help=glossary.explain("transition"))
    st.caption(
        "Each row spreads the choices of an expert over the experts of the next MoE layer. Rows that all look alike "
        "mean that the next layer does not care; a cell that stands out is a path that tokens take together."
    )
    share_EF = frame.to_numpy(np.float64)
    taken_F = np.nansum(share_EF * load_E[:, None], axis=0) / load_E.sum()
    rows, columns = coactivation.flow_orders(share_EF)
    figure = pair_matrix(
        share_EF,
        rows,
        columns,
        title=coactivation.flow_title(named, following, share_EF, load_E, taken_F),
        row_title=f"expert of layer {named}",
        column_title=f"expert of layer {following}",
        hover="of the choices of expert %{y} go on to %{x}",
        limit=_greatest_flow(run, phase),
        theme=charts.theme(),
        note="One scale for all layers of the run.",
    )
    charts.show(
        figure,
        key="transitions",
        alt=f"Share of the choices of each expert of layer {named} that go on to each expert of layer {following}.",
        numbers=lambda: coactivation.flow_table(share_EF, taken_F),
    )


def _greatest_flow(run: Run, phase: str) -> float:
    """The greatest share between any two MoE layers that follow one another."""
    frames = [data.of_run(run, "transitions", layer, phase) for layer in layer_keys.keys(run)]
    return max(float(np.nanmax(frame.to_numpy(np.float64), initial=0)) for frame in frames)
