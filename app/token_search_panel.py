"""The part of the page Tokens that follows one token over steps and layers.

Shapes: R rows (layers or experts), S steps in which the token occurs.
"""

from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import charts, data, layer_keys, state, token_search
from app.figures.token_paths import token_paths
from app.figures.token_text import TokenRows, visible_text
from app.text import plain
from app.token_search import Search
from app.words import count, listed, percent
from recorder.reader import Run

MAX_EXPERTS = 24  # rows of the matrix of one layer; the experts that get fewer are left out, and said so
MAX_LAYER_COLUMNS = 8  # of the table; more layers, and only the chosen one has a column
MAX_IDS = 4  # token ids that are named one by one
_PICKED = "token_search_rows"


def pick() -> str:
    """Draw the field for what is looked for, and return it."""
    return state.pick_text(
        "find",
        "Find a token",
        placeholder="text, or id:17",
        help="Its text as it is shown here (a space before it does not matter), or id: and its number. It is followed "
        "over all recorded steps and layers.",
    )


def found_T(rows: TokenRows, words: str) -> np.ndarray:
    """Which of these tokens are looked for, bool, to be framed in the text."""
    query = token_search.parse(words)
    if query is None:
        return np.zeros(len(rows), dtype=bool)
    ids = np.array([-1 if i is None else int(i) for i in rows.token_id_T or [None] * len(rows)])
    by_text_T = np.array([token_search.is_text(text, query) for text in rows.text_T], dtype=bool)
    return by_text_T if by_text_T.any() or query.token_id is None else ids == query.token_id


def show(run: Run, words: str, phase: str, layer: int, num_experts: int) -> None:
    """Draw what was found: the way over the layers, that over the experts of one layer, and every occurrence."""
    with st.spinner("Looking through the recorded steps ..."):
        found = data.search_token(run, words, phase)
    name = f"“{visible_text(words)}”"
    if not found.occurrences:
        st.subheader(f"{plain(name)} was not found", anchor=False)
        st.caption(_searched(found, phase))
        if found.suggestions:
            near = [f"“{visible_text(text)}”" for text in found.suggestions]
            st.caption(plain(f"Tokens of step {found.searched[-1]:,} that hold it: {listed(near)}."))
        return
    steps = found.steps()
    by_id = "Found by its id. " if found.by_id else ""
    st.subheader(plain(_answer(run, found, name, layer, steps)), anchor=False)
    text = "" if phase == "probe" else " Every batch is other text, so the token stands elsewhere in each step."
    st.caption(f"{by_id}{_searched(found, phase)}{plain(_each_id(found))}{text}")
    _layers(run, found, steps, name)
    _experts(run, found, steps, name, layer, num_experts)
    _table(run, found, phase, layer)


def _searched(found: Search, phase: str) -> str:
    these = count(len(found.searched), "recorded step")
    text = f"Searched: {these} of phase {phase}"
    if len(found.searched) < found.recorded:
        text += f", evenly spread over the {found.recorded:,} there are, to keep the search short"
    of_ids = f" of {count(len(found.spellings), 'token id')}" if len(found.spellings) > 1 else ""
    return f"{text}; {count(found.occurrences, 'occurrence')}{of_ids} in {count(len(found.steps()), 'step')}."


def _each_id(found: Search) -> str:
    """What tells the token ids found apart; "" for one."""
    if len(found.spellings) < 2:
        return ""
    each = [
        f"{'' if text is None else f'“{_spelled(text)}” '}(id {token_id}) {number:,} times"
        for token_id, (text, number) in found.spellings.items()
    ]
    more = f" and {count(len(each) - MAX_IDS, 'other')}" if len(each) > MAX_IDS else ""
    return (
        f" Counted together here: {', '.join(each[:MAX_IDS])}{more}. To follow one alone, look for id: and its number."
    )


def _spelled(text: str | None) -> str:
    """A token apart from any other: its leading space, which reads as a space in a text, is shown too."""
    shown = visible_text(text or "")
    return f"·{shown[1:]}" if shown.startswith(" ") else shown


def _top(found: Search, key: int, step: int) -> tuple[int, float] | None:
    shares = found.shares(key, step)
    return max(shares.items(), key=lambda item: (item[1], -item[0])) if shares else None


def _answer(run: Run, found: Search, name: str, layer: int, steps: list[int]) -> str:
    known = [step for step in steps if found.shares(layer, step)]
    label = layer_keys.label(run, layer)
    if not known:
        return f"{name}: layer {label} decided nothing on it in the steps searched"
    (first, first_share), (last, last_share) = (_top(found, layer, step) or (-1, 0.0) for step in (known[0], known[-1]))
    occurrences = sum(found.counts[known[-1], layer].values())
    now = f"{_expert(last)} for {percent(last_share)} of {count(occurrences, 'occurrence')} at step {known[-1]:,}"
    said = f"{name} goes to {now} in layer {label}"
    if len(known) == 1:
        return said
    if first != last:
        return f"{said}; at step {known[0]:,} it went to {_expert(first)}"
    elsewhere = sum((_top(found, layer, step) or (-1, 0.0))[0] != last for step in known)
    but = f", but not at {elsewhere} of the {len(known)} steps" if elsewhere else ""
    return f"{said}, as at step {known[0]:,} ({percent(first_share)}){but}"


def _expert(expert: int) -> str:
    return f"expert {expert}" if expert >= 0 else "no expert"


def _layers(run: Run, found: Search, steps: list[int], name: str) -> None:
    """The expert that takes most of the occurrences, in every layer and step."""
    labels = layer_keys.labels(run)
    if len(labels) < 2:
        return
    keys = list(labels)
    tops = [[_top(found, key, step) for step in steps] for key in keys]
    share_RS = np.array([[np.nan if top is None else top[1] for top in of_layer] for of_layer in tops])
    expert_RS = np.array([[-1 if top is None else top[0] for top in of_layer] for of_layer in tops])
    sure = int((share_RS[:, -1] > 0.5).sum())
    figure = token_paths(
        share_RS,
        expert_RS,
        steps,
        [f"layer {labels[key]}" for key in keys],
        keys,
        title=f"At step {steps[-1]:,}, {sure} of {len(keys)} layers send most of its occurrences to one expert",
        y_title="",
        theme=charts.theme(),
        note="Colour: share of the expert that takes most. Number: that expert." if len(steps) <= 32 else None,
        numbered=True,
    )
    strong = "Pale" if charts.theme() == "dark" else "Dark"
    st.caption(
        f"{strong} rows: the layer has settled on one expert for it. Click a cell to look at that layer and step."
    )
    points = charts.show(
        figure,
        key="token_layers",
        alt=f"The expert that takes most occurrences of {name}, by layer and step.",
        numbers=lambda: _numbers(found, labels),
        selectable=True,
    )
    _go(points)


def _experts(run: Run, found: Search, steps: list[int], name: str, layer: int, num_experts: int) -> None:
    """The shares of the experts of one layer over the steps."""
    shares = [found.shares(layer, step) for step in steps]
    total_E = np.zeros(num_experts + 1)  # the last for no expert
    for of_step in shares:
        for expert, share in of_step.items():
            total_E[expert] += share
    used = [int(expert) for expert in np.argsort(-total_E, kind="stable") if total_E[expert] > 0]
    drawn = sorted(used[:MAX_EXPERTS])
    if not drawn:
        return
    ids = [expert if expert < num_experts else -1 for expert in drawn]
    share_RS = np.array([[of_step.get(expert, 0.0) if of_step else np.nan for of_step in shares] for expert in ids])
    share_RS[share_RS == 0] = np.nan
    label = layer_keys.label(run, layer)
    figure = token_paths(
        share_RS,
        np.tile(np.array(ids)[:, None], len(steps)),
        steps,
        [str(expert) if expert >= 0 else "none" for expert in ids],
        [layer] * len(ids),
        title=f"Layer {label}: {count(len(used), 'expert')} of {num_experts} took it at least once",
        y_title="expert",
        theme=charts.theme(),
        note=f"The {len(drawn)} that took it most often." if len(drawn) < len(used) else None,
    )
    points = charts.show(
        figure,
        key="token_experts",
        alt=f"Share of the occurrences of {name} by expert of layer {label} and step.",
        numbers=lambda: _numbers(found, {layer: label}),
        selectable=True,
    )
    _go(points)


def _numbers(found: Search, labels: dict[int, Any]) -> pd.DataFrame:
    """A row for each expert that took the token, by step and layer."""
    return pd.DataFrame(
        [
            {
                "step": step,
                "layer": labels[key],
                "expert": expert if expert >= 0 else None,
                "occurrences": number,
                "share (%)": round(100 * number / sum(counts.values()), 2),
            }
            for (step, key), counts in sorted(found.counts.items())
            if key in labels
            for expert, number in counts.items()
        ],
        columns=["step", "layer", "expert", "occurrences", "share (%)"],
    ).astype({"expert": "Int64"})


def _go(points: list[dict[str, Any]]) -> None:
    for point in points:
        cell = point.get("customdata")
        if isinstance(cell, list) and len(cell) >= 2:
            state.choose(layer=int(cell[0]), step=int(cell[1]))
            st.rerun()


def _table(run: Run, found: Search, phase: str, layer: int) -> None:
    labels = layer_keys.labels(run)
    keys = [key for key in labels if key in found.listed]
    shown = keys if len(keys) <= MAX_LAYER_COLUMNS else [key for key in keys if key == layer]
    frame = found.listed.drop(columns=[key for key in keys if key not in shown])
    frame = frame.rename(columns={key: f"layer {labels[key]}" for key in shown})
    frame["token"] = [_spelled(text) for text in frame["token"]]
    if not found.spellings:
        frame = frame.drop(columns="token_id")
    more = f" The newest {len(frame):,} of {found.occurrences:,} are listed." if len(frame) < found.occurrences else ""
    st.caption(
        "Every occurrence, the newest step first, with its experts, best first. Choose a row to open the place in the "
        f"text.{more}"
    )
    event = st.dataframe(
        frame,
        hide_index=True,
        width="stretch",
        height=min(35 * (len(frame) + 1) + 3, 300),
        placeholder="-",
        key=_PICKED,
        on_select="rerun",
        selection_mode="single-row",
    )
    with st.container(horizontal=True, gap="small"):
        charts.save_table(frame, key="occurrences")
    picked = list(event["selection"]["rows"])
    if picked and st.session_state.get("_token_search_opened") != (found.listed.shape, picked):
        st.session_state["_token_search_opened"] = (found.listed.shape, picked)
        row = found.listed.iloc[picked[0]]
        state.choose(step=int(row["step"]), sequence=int(row["sequence"]), phase=phase)
        st.rerun()
