"""Every run on one page: how it ended, how well it learned, how balanced it is; and the way to open or compare them."""

import time
from collections.abc import Sequence
from typing import Any

import streamlit as st

from app import data, housekeeping, navigation, pickers, runs_filter, runs_folders, state
from app.fragments import fragment
from app.runs_headline import RULE, headline
from app.runs_table import table
from app.text import plain
from app.views import empty
from app.words import listed

_REFRESH_S = 3.0
_QUICK_S = 0.3  # reading that takes no longer needs no progress bar
_LONGEST_NAME = 40  # in the row of buttons


def render() -> None:
    """Draw the page."""
    head = st.container()
    runs = pickers.in_order(data.listed())
    if not runs:
        head.title("Runs")
        housekeeping.say_what_happened()
        empty.no_runs()
        runs_folders.show()
        return
    with head:
        title = st.empty()
    pairs = list(zip(runs, _rows(runs, title), strict=True))
    choice = runs_filter.pick(pairs) if len(runs) > 1 else runs_filter.Choice()
    shown = runs_filter.apply(choice, pairs)
    some, rows = [run for run, _ in shown], [row for _, row in shown]
    title.title(headline(some, rows, of=len(runs)), help=RULE)
    with head:
        housekeeping.say_what_happened()
    if not shown:
        label = f"Show all {len(runs):,} runs"
        st.button(label, key="runs_all", icon=":material/filter_alt_off:", on_click=runs_filter.clear)
    else:
        actions = st.container(horizontal=True, vertical_alignment="center", gap="xsmall", key="runs_actions")
        ticked = table(some, rows)
        with actions:
            _offer([some[place] for place in ticked], [rows[place] for place in ticked])
    runs_folders.show()
    if any(row["status"] == "running" for _, row in pairs):
        fragment(_watch, run_every=_REFRESH_S)(_progress(runs))


def _rows(runs: Sequence[data.Listed], title: Any) -> list[dict[str, Any]]:
    """`data.row` of each run. What is not known yet takes a moment each: the bar says how far it is."""
    place = st.empty()
    rows: list[dict[str, Any]] = []
    said = time.monotonic()
    for run in runs:
        if time.monotonic() - said > _QUICK_S:
            title.title("Runs")
            place.progress(len(rows) / len(runs), text=f"Reading each run once: {len(rows):,} of {len(runs):,}")
            said = time.monotonic()
        rows.append(data.row(run))
    place.empty()
    return rows


# ----------------------------------------------------------------------------------------------- what can be done


def _offer(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> None:
    if not runs:
        # As high as the row of buttons to come, so that the table stays where it is while rows are ticked.
        st.button("Overview", key="open_nothing", icon=":material/monitoring:", disabled=True)
        st.markdown("Tick one run to open, rename, zip or delete it, or several to compare them.", width="content")
    elif len(runs) == 1:
        _offer_one(runs[0], rows[0])
    else:
        _offer_several(runs, rows)


def _offer_one(run: data.Listed, row: dict[str, Any]) -> None:
    if row["status"] == "unreadable":
        if st.button("See what to do about it", key="open_overview", icon=":material/error:", type="primary"):
            navigation.go("overview", run=run.reference)
        housekeeping.offer([run])
        return
    buttons = (
        ("overview", "Overview", ":material/monitoring:"),
        ("replay", "Replay", ":material/play_circle:"),
        ("tokens", "Tokens", ":material/text_fields:"),
    )
    for page, label, icon in buttons:
        kind = "primary" if page == "overview" else "secondary"
        if st.button(label, key=f"open_{page}", icon=icon, type=kind):  # type: ignore[arg-type]
            navigation.go(page, run=run.reference)
    housekeeping.offer([run])


def _offer_several(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]]) -> None:
    good = [run for run, row in zip(runs, rows, strict=True) if row["status"] != "unreadable"]
    left_out = [run.label for run in runs if run not in good]
    if len(good) > 1:
        label = f"Compare these {len(good)} runs"
        if st.button(label, key="compare", icon=":material/compare_arrows:", type="primary"):
            navigation.go("compare", runs=[run.reference for run in good])
    housekeeping.offer(runs)
    if len(good) > 1:
        st.markdown(listed([f"**{plain(_short(run.label))}**" for run in good]), width="content")
    else:
        st.markdown("Two runs that can be read are needed for a comparison.", width="content")
    if left_out:
        st.markdown(f"Left out, unreadable: {listed([plain(label) for label in left_out])}.", width="content")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _progress(runs: Sequence[data.Listed]) -> list[tuple[str, str, int]]:
    rows = [data.row(run) for run in runs]
    return [(row["reference"], row["status"], row["num_steps"]) for row in rows]


def _watch(drawn: list[tuple[str, str, int]]) -> None:
    """Draw the page again when a run has moved on, ended, or been added: at the next tick, not while it is drawn.

    A run that is faster than the page would else have it drawn without end.
    """
    if state.in_fragment() and _progress(pickers.in_order(data.listed())) != drawn:
        state.draw_again()
