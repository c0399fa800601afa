"""What experts specialise in: domains, token ids, and examples in their context.

Shapes: D domains, E experts.
"""

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, columns, data, glossary, layer_keys, navigation, specialisation, state
from app.figures.domain_matrix import domain_matrix
from app.text import plain
from app.views import one_layer
from app.words import count, in_phase, percent
from moe_core import metrics
from recorder.reader import Run

MAX_TOKENS = 2000  # token ids to choose from, the most frequent
MAX_EXAMPLES = 25


def render() -> None:
    """Draw the page."""
    about = one_layer.choose("Specialisation", unknown="tokens went to which expert")
    if about is None:
        return
    run, layer, phase, load_E = about.run, about.layer, about.phase, about.load_E
    named = layer_keys.label(run, layer)
    share = data.of_run(run, "domain_specialisation", layer, phase)
    steps_S = data.decision_steps(run, phase)
    with about.head:
        st.title(
            plain(specialisation.headline(in_phase(named, phase), share))
            if len(share)
            else f"Layer {in_phase(named, phase)}: which tokens its experts take",
            help=glossary.explain(
                "domain_specialisation",
                "An expert is called a domain's own where the domain uses it at least "
                f"{specialisation.MUCH:g} times as much as the other domains do on average.",
            ),
        )
        st.caption(
            f"**{plain(run.name)}**, phase {phase}: all recorded decisions of {count(steps_S.size, 'step')}, "
            f"{steps_S[0]:,} to {steps_S[-1]:,}, counted together, those of early training too. At one step alone: "
            "the page Tokens."
        )
        last = int(steps_S[-1])
        if st.button(f"Tokens at step {last:,}", key="specialisation_tokens", icon=":material/text_fields:"):
            navigation.go("tokens", layer=layer, phase=phase, step=last)
    _domains(run, layer, share)
    vocabulary = data.of_run(run, "vocabulary", layer, phase)
    if not len(vocabulary):
        st.info(
            "No token ids were recorded with these decisions, so experts cannot be told by their tokens. From your own "
            "code, record them with `recorder.step(step, token_ids=...)`."
        )
        return
    _tokens_of_expert(run, layer, phase, vocabulary, load_E, share)
    _experts_of_token(named, vocabulary)


def _domains(run: Run, layer: int, share: pd.DataFrame) -> None:
    if not len(share):
        st.caption("No domains were recorded: `recorder.step(step, domains=[...])` names one for each sequence.")
        return
    st.caption(
        "A row is the load that one domain alone would put on the experts: white is even use, red more, blue less, "
        "purple next to nothing. Rows that look alike mean that experts do not care for domains."
    )
    figure = domain_matrix(
        share.to_numpy(np.float64),
        [str(domain) for domain in share.index],
        float(share.attrs["baseline"]),
        title=f"Use of the experts of layer {layer_keys.label(run, layer)} by domain, over the uniform share",
        theme=charts.theme(),
    )
    charts.show(
        figure,
        key="domains",
        alt=f"Share of each domain's tokens that use each expert of layer {layer_keys.label(run, layer)}, over k/E.",
        numbers=lambda: specialisation.domain_numbers(share),
    )


def _tokens_of_expert(
    run: Run, layer: int, phase: str, vocabulary: pd.DataFrame, load_E: np.ndarray, share: pd.DataFrame
) -> None:
    st.subheader(f"What an expert of layer {layer_keys.label(run, layer)} takes", anchor=False)
    found = specialisation.own_expert(share.to_numpy(np.float64), share.attrs["baseline"]) if len(share) else None
    expert = state.pick_option(
        "expert",
        "Expert",
        list(range(len(load_E))),
        default=int(load_E.argmax()) if found is None else found[1],
        as_list=True,
        help="The one most particular to a domain unless chosen otherwise.",
    )
    frame = specialisation.tokens_of(vocabulary, expert, int(load_E[expert]), metrics.MIN_OCCURRENCES)
    of_all = percent(load_E[expert] / load_E.sum())
    if not len(frame):
        st.caption(
            f"Expert {expert} got {of_all} of all assignments, none of a token id seen {metrics.MIN_OCCURRENCES} times."
        )
        return
    most = frame["share of the token's (%)"] >= 50
    st.markdown(
        f"**Expert {expert} takes half or more of the occurrences of {count(int(most.sum()), 'token id')}**, and "
        f"{of_all} of all assignments."
    )
    st.caption(f"Token ids seen at least {metrics.MIN_OCCURRENCES} times, the most faithful first.")
    charts.table(frame, key="expert_tokens")
    step = int(data.decision_steps(run, phase)[-1])
    lines = specialisation.examples(
        data.decisions(run, step, layer, phase), data.tokens(run, step, phase), expert, MAX_EXAMPLES
    )
    if len(lines):
        st.caption(f"Examples in context, from step {step:,}: up to {MAX_EXAMPLES}, spread over all of that step.")
        charts.table(lines, key="expert_examples")


def _experts_of_token(layer: layer_keys.Label, vocabulary: pd.DataFrame) -> None:
    st.subheader("Where a token goes", anchor=False)
    frequent = vocabulary.sort_values(["occurrences", "token_id"], ascending=[False, True]).head(MAX_TOKENS)
    about = (columns.values(frequent[name]) for name in ("token_id", "text", "occurrences"))
    names = {
        str(token_id): f"{'' if text is None else repr(text)} (id {token_id}, {times:,} times)"
        for token_id, text, times in zip(*about, strict=True)
    }
    ids = list(names)
    token = state.pick_option("token", "Token", ids, format_func=names.__getitem__, as_list=True)
    row = frequent.iloc[ids.index(token)]
    frame = specialisation.experts_of(row)
    seen = int(row["occurrences"])
    known = vocabulary["share"].dropna().to_numpy(np.float64)
    most = percent(frame["share (%)"].iloc[0] / 100)
    said = f"**{most} of its {seen:,} occurrences use expert {frame['expert'].iloc[0]}.**"
    if seen < metrics.MIN_OCCURRENCES:
        said += f" Fewer than {metrics.MIN_OCCURRENCES}: that says little."
    if known.size:
        said += f" Over all {count(known.size, 'token id')} of layer {layer} seen often enough the main expert gets "
        said += f"{percent(float(known.mean()))} on average."
    st.markdown(said)
    charts.table(frame, key="token_experts")
