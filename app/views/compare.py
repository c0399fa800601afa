"""Two or more runs side by side on one scale: who leaves experts idle, at what loss, and since when."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import streamlit as st

from app import (
    charts,
    comparison,
    comparison_choice,
    comparison_metrics,
    comparison_settings,
    comparison_words,
    data,
    diagnosis_panel,
    folders,
    layer_keys,
    live,
    pickers,
    state,
    words,
)
from app.comparison import WINDOW, Compared, layer_label
from app.report.button import report_button
from app.text import plain
from app.views import compare_curves, compare_differences, compare_loads, compare_tables, empty

MAX_RUNS = 12
MAX_FILES = 3  # more that cannot be read are counted, not named
DIAGNOSED = 3  # sentences shown at once of each run, and runs whose sentences are shown at once


def render() -> None:
    """Draw the page."""
    title = st.empty()
    title.title("Compare")
    runs = pickers.in_order(data.listed())
    if not runs:
        empty.no_runs()
        return
    if len(runs) == 1:
        _only_one(runs[0])
        return
    runs_, layer_ = st.columns([3, 2])
    with runs_:
        default = comparison_choice.default_pair(runs, pickers.chosen_run())
        if not state.wanted_list("runs"):
            # Named from here on: a link or a reload shows these even after others have been recorded.
            state.choose(runs=default)
        picked = pickers.pick_runs(default=default, max_runs=MAX_RUNS)
    compared = _usable(picked)
    live.keep_up_with([(one.label, run) for one, run in picked])
    if len(compared) < 2:
        st.info("Pick two runs or more above, each with a recorded load, to compare them.")
        return
    layers = sorted({layer for one in compared for layer in one.layers})
    with layer_:
        common = [layer for layer in layers if all(layer in one.layers for one in compared)]
        layer = state.pick_option(
            "layer",
            "MoE layer",
            layers,
            default=(common or layers)[0],
            format_func=lambda key: layer_label(compared, key),
            help="Index in the whole model.",
        )

    steps_S = comparison.shared_steps(compared, layer)
    window = comparison.window_of(steps_S)
    found = [comparison_metrics.measure(one, window) for one in compared]
    title.title(
        plain(comparison_words.answer(compared, found, window)),
        help=f"Over {window.words}, each run in its worst layer. Idle: less than a tenth of the uniform share of the "
        "loads summed over them. The uniform share is that of one expert if all had the same load.",
    )
    _say_what_went_wrong(compared)
    _diagnoses(compared)
    _say_what_differs(compared, layers, steps_S)
    compare_loads.heatmaps(compared, layers, layer, found, window)
    compare_loads.at_one_step(compared, layer, steps_S)
    compare_tables.metrics(compared, found, layer, window)
    compare_curves.show(compared, found, layer, window)
    compare_differences.show(compared, found, layer, window)
    report_button([one.run for one in compared])


# --------------------------------------------------------------------------------------------------- which runs


def _only_one(run: data.Listed) -> None:
    st.info(f"There is only one run here, {plain(run.label)}: nothing to compare it with yet.")
    st.markdown("**Record another:** open *Record a run* in the sidebar, or in a terminal, with another balancer:")
    target = folders.recording_folder(data.shown_folders())
    st.code(f"routescope record --balancer quantile --steps 400 --out {target or 'runs'}", "bash")
    st.markdown("**Or show runs from elsewhere beside it:**")
    st.code("routescope app FOLDER FOLDER", "bash")


def _usable(picked: Sequence[tuple[data.Listed, Any]]) -> list[Compared]:
    """Those that hold a load, with their colours; one line names each of the others and says why."""
    places = comparison_choice.colours([one.reference for one, _ in picked], [run.reference for run in data.listed()])
    usable: list[Compared] = []
    left_out: list[str] = []
    for one, run in picked:
        problem = data.loads_problem(run)
        if problem is not None:
            left_out.append(f"{one.label} ({problem})")
        elif data.lists_no_layers(run):
            left_out.append(f"{one.label} (its run.json does not list the layers; routescope summary reads it)")
        elif not run.moe_layers:
            left_out.append(f"{one.label} (no MoE layer)")
        elif not any(data.layer_stats(run, key).steps_S.size for key in layer_keys.keys(run)):
            left_out.append(f"{one.label} ({run.status}, no load recorded{empty.where_readable(run)})")
        else:
            candidate = Compared(label=one.label, reference=one.reference, colour=places[one.reference], run=run)
            other = next((known.label for known in usable if not candidate.agrees(known)), None)
            if other is None:
                usable.append(candidate)
            else:
                left_out.append(f"{one.label} (its layers have other routers than those of {other})")
    if left_out:
        st.warning(f"Left out: {plain(words.listed(left_out))}.")
    return usable


# ------------------------------------------------------------------------------------------------ what they are


def _say_what_went_wrong(compared: Sequence[Compared]) -> None:
    """A line for each run whose balance is not that of a run that learns."""
    for one in compared:
        wrong = data.trouble(one.run, WINDOW).words
        if wrong is not None:
            st.warning(f"**{plain(one.label)}**: {plain(wrong)}.")
        files = [line.partition(": ")[0] for line in data.problems(one.run)]
        if files:
            named = words.listed(files) if len(files) <= MAX_FILES else words.count(len(files), "part file")
            st.warning(f"**{plain(one.label)}**: {plain(named)} cannot be read; the rest is compared.")


def _diagnoses(compared: Sequence[Compared]) -> None:
    if len(compared) <= DIAGNOSED:
        for one in compared:
            diagnosis_panel.show(one.run, reference=one.reference, label=one.label, most=DIAGNOSED)
        return
    with st.expander("What stands out in each run"):
        for one in compared:  # all of its sentences: nothing folds inside what is folded
            diagnosis_panel.show(one.run, reference=one.reference, label=one.label, most=len(data.diagnosis(one.run)))


def _say_what_differs(compared: Sequence[Compared], layers: Sequence[int], steps_S: np.ndarray) -> None:
    alike: dict[str, list[str]] = {}
    for one in compared:
        alike.setdefault(_what_it_is(one), []).append(f"**{plain(one.label)}**")
    if len(alike) == 1 and len(compared) > 2:
        text = f"All {len(compared)} runs: {next(iter(alike))}."
    else:
        text = "; ".join(f"{words.listed(labels)} {what}" for what, labels in alike.items()) + "."
    if any(set(one.layers) != set(layers) for one in compared):
        text += " Their MoE layers differ."
    if steps_S.size:
        text += f" They share {words.count(steps_S.size, 'recorded step')}, {steps_S[0]:,} to {steps_S[-1]:,};"
        text += f" the title is about {comparison.window_of(steps_S).words.split(' that all')[0]} of them."
    st.caption(text)
    st.caption(plain(comparison_settings.sentence(compared)))
    table = comparison_settings.table(compared)
    if len(table):
        with st.expander(
            f"{words.count(len(table), 'setting')} differ{'s' if len(table) == 1 else ''}", icon=":material/table:"
        ):
            charts.table(table, key="compare_settings")


def _what_it_is(one: Compared) -> str:
    status = "" if one.run.status == "finished" else f", {one.run.status}"
    shapes = dict.fromkeys(one.shape(layer) for layer in one.layers)
    experts = words.listed([f"top-{k} of {words.count(e or 0, 'expert')}" for e, k in shapes])
    phase = data.main_phase(one.run)
    judged = "" if phase == "train" else f", judged by its {words.step_word(phase)}s: it has no training steps"
    return f"{experts}, last step {words.value(one.run.last_step)}{status}{judged}"
