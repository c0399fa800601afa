"""Which expert does each token go to? The text coloured by expert, and the gate weights of one sequence.

Shape suffixes: T tokens, K top-k, E experts.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, data, layer_keys, navigation, state, token_routes, token_search_panel, words
from app.figures.theme import OKABE_ITO, categorical_colour
from app.figures.token_matrix import token_matrix
from app.figures.token_text import INK, TokenRows, token_ground, token_html
from app.text import plain
from app.views.empty import require_run, where_readable
from recorder.reader import Run

MAX_TEXT_TOKENS = 1024  # of all sequences shown: about three screens of text
MAX_SEQUENCES = 8
_LEGEND = 7  # as many experts as there are colours
_PHASES = ("probe", "train", "eval", "generate")
_DOMAIN = "domain:"
_OTHER = "tokens_other_expert"


class _Scope(NamedTuple):
    """What is looked at: the tokens at `index_T`, in words, and the sequences whose text is shown."""

    index_T: np.ndarray
    words: str
    shown: list[int]


def render() -> None:
    """Draw the page."""
    title = st.empty()
    title.title("Which expert does each token go to?")
    run = require_run(decisions=True)
    if run is None:
        return
    phases = [phase for phase in _PHASES if data.decision_steps(run, phase).size]
    if not phases:
        _nothing_recorded(run)
        return

    controls = st.container(horizontal=True, gap="medium")
    with controls:
        phase = state.pick_phase(phases)
        layer = state.pick_layer(run)
        asked = state.wanted("step")
        with st.container(width="stretch"):
            step = state.pick_step(
                data.decision_steps(run, phase), help="Only steps whose single decisions were recorded."
            )
    decisions = data.decisions(run, step, layer, phase)
    label = layer_keys.label(run, layer)
    if decisions.empty:
        st.info(
            f"No decisions of layer {label} were recorded at step {step:,}{where_readable(run)}. "
            "Choose another layer or step."
        )
        return
    routes = token_routes.join(decisions, data.tokens(run, step, phase))
    rows = routes.rows
    if len(rows) == 0:
        st.info("The tokens table names none of this step's tokens, so there is no text to colour.")
        return
    with controls, st.container(width=160):
        scope = _pick_scope(routes, run)
    with controls, st.container(width=140):
        wanted = token_search_panel.pick()
    stats = data.layer_stats(run, layer, phase)
    num_experts = max(stats.num_experts, int(rows.experts_TK.max(initial=0)) + 1)

    seen = token_routes.take(rows, scope.index_T)
    share_E = token_routes.shares(seen.experts_TK, num_experts)
    domains = token_routes.in_order(token_routes.domains_T(seen), run.domains)
    domains = domains if len(domains) > 1 else []
    expert = _wanted_expert(num_experts)
    table, share_DE = token_routes.by_domain(seen, num_experts, domains, "first")
    title.title(
        plain(_answer(seen, share_E, share_DE, domains, scope.words, expert)),
        help="Share of these tokens whose first choice is the expert; then the domain with the greatest share of its "
        "own tokens on one expert. An expert stands out above twice the uniform share 1/E, or above half of all.",
    )
    _about(run, routes, seen, phase, step, asked, num_experts)

    legend = token_routes.busiest(share_E, _LEGEND, always=expert)
    trained = data.layer_stats(run, layer)
    total_E = (trained if trained.steps_S.size else stats).load_SE.sum(axis=0)
    places = token_routes.colour_owners(np.asarray(total_E))
    expert = _pick_expert(legend, places, share_E)
    _text(routes, scope, places, expert, label, step, wanted, num_experts)
    if st.button("Replay this step", key="replay_step", icon=":material/play_circle:"):
        navigation.go("replay", layer=layer, step=step, phase=phase)
    if wanted:
        token_search_panel.show(run, wanted, phase, layer, num_experts)
    _matrix(routes, scope.shown[0], num_experts, label, step)
    _table(seen, num_experts, domains, table)


def _nothing_recorded(run: Run) -> None:
    if data.problems(run):
        st.info("This run holds no single decisions in the part files that can be read.")
        st.markdown("**What to do:** put the files named above back from a copy, or pick another run in the sidebar.")
        return
    if run.status == "running":
        st.info("This run has not recorded single decisions yet.", icon=":material/timer:")
    else:
        st.info("This run recorded no single decisions, only how many tokens each expert got.")
    st.markdown("**What to do:** pick another run in the sidebar, or record one with decisions:")
    st.code("routescope record --decisions-every 10 --probe-every 20", "bash")
    st.caption(
        "`--decisions-every 10` keeps the decisions of every tenth training step with their tokens; "
        "`--probe-every 20` routes the same held-out text every 20 steps."
    )


# --------------------------------------------------------------------------------------------------- controls


def _pick_scope(routes: token_routes.Routes, run: Run) -> _Scope:
    rows = routes.rows
    found = token_routes.sequences(rows)
    domains = token_routes.in_order(np.array([name for _, name in found], dtype=object), run.domains)
    names = {str(number): f"{name or 'sequence'} {number}" for number, name in found}
    names |= {_DOMAIN + name: f"all of {name}" for name in domains}
    names |= {"all": f"all {len(found):,} sequences"}
    if len(found) == 1:
        return _Scope(np.arange(len(rows)), "", [found[0][0]])
    chosen = state.pick_option(
        "sequence",
        "Sequence",
        ["all", *(_DOMAIN + name for name in domains), *(str(number) for number, _ in found)],
        format_func=names.__getitem__,
        as_list=True,
        help="Title, colours and table are of these tokens.",
    )
    if chosen == "all":
        first_of: dict[str | None, int] = {}
        for number, name in found:
            first_of.setdefault(name, number)
        one_each = [first_of[name] for name in domains] if len(domains) > 1 else [number for number, _ in found]
        return _Scope(np.arange(len(rows)), "", one_each[:MAX_SEQUENCES])
    if chosen.startswith(_DOMAIN):
        name = chosen.removeprefix(_DOMAIN)
        within = [number for number, domain in found if domain == name]
        index_T = np.flatnonzero(np.isin(rows.sequence_T, within))
        return _Scope(index_T, f" of {name}", within[:MAX_SEQUENCES])
    domain = dict(found)[int(chosen)]
    index_T = np.flatnonzero(rows.sequence_T == int(chosen))
    return _Scope(index_T, f" of sequence {chosen}" + (f" ({domain})" if domain else ""), [int(chosen)])


def _wanted_expert(num_experts: int) -> int | None:
    text = state.wanted("expert") or ""
    return int(text) if text.isdecimal() and int(text) < num_experts else None


def _pick_expert(legend: list[int], places: list[int], share_E: np.ndarray) -> int | None:
    """The legend: an entry for each of the busiest experts, which shows that expert's tokens alone."""
    others = [e for e in token_routes.busiest(share_E, len(share_E)) if e not in legend]
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        chosen = state.pick_option(
            "expert",
            "Expert and share: choose one to see its tokens alone",
            ["all", *map(str, legend)],
            format_func=lambda text: "all" if text == "all" else f"{text} · {words.percent(float(share_E[int(text)]))}",
            help="Share of the tokens whose first choice is this expert, busiest first. The seven experts that are "
            "busiest over all training steps of this layer have a colour, the same at every step and in every "
            "sequence; the small number beside each token is its expert.",
        )
        if others:
            st.selectbox(
                "Another",
                others,
                index=None,
                key=_OTHER,
                format_func=lambda e: f"expert {e} · {words.percent(float(share_E[e]))}",
                placeholder=f"{len(others)} more",
                on_change=_choose_other,
                width=140,
            )
    _colour_buttons(legend, places)
    return None if chosen == "all" else int(chosen)


def _choose_other() -> None:
    state.choose(expert=st.session_state[_OTHER])
    st.session_state[_OTHER] = None


def _colour_buttons(legend: list[int], places: list[int]) -> None:
    theme = charts.theme()
    rules = []
    for number, expert in enumerate(legend, start=2):  # the first button is for all experts
        if expert not in places:
            continue
        ground = token_ground(OKABE_ITO[places.index(expert)], theme)
        button = f".st-key-expert button[role=radio]:nth-of-type({number})"
        rules.append(f"{button}{{background:{ground}!important;color:{INK}!important}}")
        rules.append(f"{button} p{{color:{INK}!important}}")
    chosen = ".st-key-expert button[aria-checked=true]"
    rules.append(f"{chosen}{{box-shadow:inset 0 -4px 0 {categorical_colour(5, theme='light')}!important}}")
    rules.append(f"{chosen} p{{font-weight:700}}")
    st.html(f"<style>{''.join(rules)}</style>")


# ---------------------------------------------------------------------------------------------------- answers


def _answer(
    seen: TokenRows,
    share_E: np.ndarray,
    share_DE: np.ndarray,
    domains: list[str],
    of: str,
    expert: int | None,
) -> str:
    """The page's title: where these tokens go, and the domain that goes most to one expert."""
    num_tokens, top_k = seen.experts_TK.shape
    these = f"these {words.count(num_tokens, 'token')}{of}" if num_tokens != 1 else f"this token{of}"
    takes = "takes" if top_k == 1 else "is the first choice of"
    if expert is not None:
        part = float(share_E[expert])
        text = f"Expert {expert} {takes} {words.percent(part) if part else 'none'} of {these}"
        if domains and part:
            most = int(share_DE[:, expert].argmax())
            text += f", and {words.percent(float(share_DE[most, expert]))} of {domains[most]}"
        if top_k > 1:
            any_ = float((seen.experts_TK == expert).any(axis=1).mean())
            text += f"; {words.percent(any_) if any_ else 'none'} use it as any of their {top_k} choices"
        return text
    top = int(share_E.argmax())
    if share_E[top] == 0:
        return f"No expert takes any of {these}"
    if _stands_out(float(share_E[top]), len(share_E)):
        text = f"Expert {top} {takes} {words.percent(float(share_E[top]))} of {these}"
    else:
        text = f"No expert stands out: the busiest, {top}, {takes} {words.percent(float(share_E[top]))} of {these}"
    if domains:
        where, most = divmod(int(np.nan_to_num(share_DE).argmax()), share_DE.shape[1])
        share = float(share_DE[where, most])
        if not _stands_out(share, len(share_E)):
            return text
        if share <= 0.5:
            return f"{text}; {domains[where]} favours expert {most}, with {words.percent(share)} of its tokens"
        goes = "goes to" if top_k == 1 else "goes first to"
        text += f"; {domains[where]} {goes} expert {most} for {words.percent(share)}"
    return text


def _stands_out(share: float, num_experts: int) -> bool:
    return share > 2 / num_experts or share > 0.5


def _about(
    run: Run,
    routes: token_routes.Routes,
    seen: TokenRows,
    phase: str,
    step: int,
    asked: str | None,
    num_experts: int,
) -> None:
    """One line on what the numbers are of; and whatever the run does not tell."""
    k = seen.experts_TK.shape[1]
    text = f"{words.count(len(seen), 'token')} of step {step:,}"
    text += ", the same held-out batch at every probe." if phase == "probe" else f", phase {phase}."
    text += f" Uniform share: {words.value(100 / num_experts)}% an expert."
    if k > 1:
        text += f" Each token has {k} experts; title and colours are of the first."
    unrouted = int((token_routes.first_choice(seen.experts_TK) < 0).sum())
    if unrouted:
        text += f" {words.count(unrouted, 'token')} reached no expert."
    if asked is not None and asked.lstrip("-").isdecimal() and int(asked) != step:
        text += f" Step {int(asked):,} has no decisions; {step:,} is the nearest that has."
    st.caption(text)
    lacking = []
    if routes.numbered and data.problems(run):
        lacking.append(
            "The tokens of this step are not in the part files that can be read: they are numbered in order."
        )
    elif routes.numbered:
        lacking.append("The run does not tell which tokens these are: they are numbered in the order of the batch.")
    elif not routes.has_text:
        shown = (
            "by their id"
            if routes.rows.token_id_T and any(i is not None for i in routes.rows.token_id_T)
            else "by number"
        )
        if run.config.get("task") == "regression":
            lacking.append("A regression has no text: a token is one random sample, shown by its number.")
        else:
            lacking.append(f"The run holds no text; tokens are shown {shown}.")
    if not routes.numbered and all(name is None for name in token_routes.domains_T(routes.rows)):
        lacking.append("It names no domains, so nothing is said about them.")
    if routes.left_out:
        lacking.append(f"{words.count(routes.left_out, 'decision')} without a recorded token left out.")
    if routes.ranks > 1:
        lacking.append(f"Tokens of {routes.ranks} ranks: sequences of the later ranks are numbered on.")
    if lacking:
        st.caption(" ".join(lacking))


# --------------------------------------------------------------------------------------------------- pictures


def _text(
    routes: token_routes.Routes,
    scope: _Scope,
    places: list[int],
    expert: int | None,
    layer: layer_keys.Label,
    step: int,
    wanted: str,
    num_experts: int,
) -> None:
    rows = routes.rows
    shown, each = token_routes.shorten(rows, scope.shown, MAX_TEXT_TOKENS)
    heading = f"Layer {layer}, step {step:,}"
    if expert is not None:
        heading += f": the tokens of expert {expert}"
    html = token_html(
        shown,
        title=heading,
        theme=charts.theme(),
        highlight=None if expert is None else [expert],
        # an expert without a colour of its own borrows one where it alone is coloured
        colour_experts=places if expert is None or expert in places else [expert],
        legend=False,
        found_T=token_search_panel.found_T(shown, wanted),
    )
    cut = any(int((rows.sequence_T == number).sum()) > each for number in scope.shown)
    among = len(np.unique(rows.sequence_T[scope.index_T]))
    look = "one colour that fills a kind of text" if routes.has_text else "one colour that takes most of the tokens"
    notes = [f"Look for {look}. Point at a token for its place, experts and weights."]
    if expert is None and num_experts > len(places):
        notes.append(
            f"A colour have the {len(places)} experts that training used most in this layer; the others' tokens are "
            "plain, with their number."
        )
    if shown.kept_TK is not None and not shown.kept_TK.all():
        notes.append("A number struck out: that expert was full and did not compute the token.")
    if len(scope.shown) < among:
        of_each = len({rows.domain(int(np.argmax(rows.sequence_T == number))) for number in scope.shown})
        which = ", one of each domain" if 1 < of_each == len(scope.shown) else ""
        notes.append(f"Text of {len(scope.shown)} of {among} sequences{which}; choose others above.")
    if cut:
        notes.append(f"Of each sequence the first {each:,} tokens.")
    if expert is not None and rows.experts_TK.shape[1] > 1:
        notes.append(f"Coloured are the tokens that use expert {expert} as any of their choices.")
    st.html(html)
    st.caption(" ".join(notes))


def _matrix(routes: token_routes.Routes, sequence: int, num_experts: int, layer: layer_keys.Label, step: int) -> None:
    rows = token_routes.take(routes.rows, np.flatnonzero(routes.rows.sequence_T == sequence))
    domain = rows.domain(0)
    name = f"Sequence {sequence}" + (f" ({domain})" if domain else "")
    weights_TK = np.where(rows.experts_TK >= 0, rows.weights_TK, 0.0)
    if np.isnan(weights_TK).all():
        st.caption("The run holds no gate weights, so there is no matrix of them.")
        return
    used = np.unique(rows.experts_TK[rows.experts_TK >= 0])
    mass_E = np.bincount(
        np.maximum(rows.experts_TK, 0).ravel(), weights=np.nan_to_num(weights_TK).ravel(), minlength=num_experts
    )
    heading = f"{name} uses {len(used)} of {num_experts} experts"
    if mass_E.sum() > 0:
        top = int(mass_E.argmax())
        heading += f"; expert {top} has {words.percent(float(mass_E[top] / mass_E.sum()))} of its gate weight"
    k = rows.experts_TK.shape[1]
    figure = token_matrix(
        rows,
        num_experts=num_experts,
        title=heading,
        theme=charts.theme(),
        # By k alone, so that a colour means the same weight at every step: with many choices each one is small.
        weight_limit=min(1.0, 4 / k),
    )
    st.caption(
        "Gate weight of each token's experts: rows that stay empty are experts that none of these tokens uses."
        + (" Choose a sequence above to see another one." if len(np.unique(routes.rows.sequence_T)) > 1 else "")
    )
    charts.show(
        figure,
        key="token_matrix",
        alt=f"Gate weights of the tokens of {name} by expert in layer {layer} at step {step}. {heading}.",
        numbers=lambda: token_routes.numbers(rows),
    )


def _table(seen: TokenRows, num_experts: int, domains: list[str], first: pd.DataFrame) -> None:
    k = seen.experts_TK.shape[1]
    st.subheader(
        "Share of each domain's tokens by expert" if domains else "Share of these tokens by expert",
        anchor=False,
        help="Tokens (of a domain) that use the expert / all those tokens, in per cent. Without specialisation "
        f"every expert would have 1/E = {words.value(100 / num_experts)}% by first choice"
        + (f" and k/E = {words.value(100 * k / num_experts)}% by any of its {k} choices." if k > 1 else "."),
    )
    if k == 1:
        charts.table(first, key="domain_shares")
        return
    by_first, by_any = st.tabs(["First choice", f"Any of the {k} choices"])
    with by_first:
        charts.table(first, key="domain_shares_first")
    with by_any:
        st.caption(f"A token counts for each of its {k} experts, so a column adds up to {100 * k}%.")
        charts.table(token_routes.by_domain(seen, num_experts, domains, "any")[0], key="domain_shares_any")
