"""Choosing runs: the one that every page shows, and the several that are compared."""

from collections.abc import Sequence

import streamlit as st

from app import data, folders, state
from app.text import plain
from recorder.reader import Run

_NOT_CHOSEN = "_run_not_chosen"


def pick_run() -> None:
    """Draw the choice of the run that every page shows. Draws nothing where there are no runs."""
    for line in data.unreachable():
        st.warning(plain(line), icon=":material/cloud_off:")
    runs = {run.reference: run for run in in_order(data.listed())}
    if not runs:
        return
    fallback = default_run(list(runs.values())).reference
    wanted = state.wanted("run") or None
    found = _resolve(wanted, runs)
    if wanted is None:
        st.session_state[_NOT_CHOSEN] = fallback
    if wanted is None or (found is not None and found != wanted):
        # Named from here on, so that a reload shows the same run even after others have been recorded.
        state.choose(run=found or fallback)
    elif found is None:  # the pages that show it say so too: see `say_missing`
        st.caption(f"There is no run {plain(wanted[:80])} in the folders shown; another one is shown instead.")
    state.pick_option(
        "run",
        "Run",
        list(runs),
        default=fallback,
        format_func=lambda reference: label(runs[reference]),
        as_list=True,
    )


def chosen_run() -> str | None:
    """Reference of the run that every page shows, if a person or a link has named it and not `pick_run`."""
    wanted = state.wanted("run")
    return None if wanted == st.session_state.get(_NOT_CHOSEN) else wanted


def say_missing() -> None:
    """Say that the run a link names, or the one shown until it was deleted, is not there. Nothing where it is.

    Stands until the person picks a run. Call in the main area, after `pick_run`.
    """
    runs = {run.reference: run for run in in_order(data.listed())}
    wanted = state.wanted("run")
    if not wanted or not runs or _resolve(wanted, runs) is not None:
        return
    instead = runs.get(state.current("run") or "") or default_run(list(runs.values()))
    st.warning(
        f"Run {plain(wanted[:80])} is not in the folders shown; showing {plain(instead.label)} instead.",
        icon=":material/link_off:",
    )
    # The picker in the sidebar already shows this one, so that picking it there would change nothing.
    if st.button(f"Stay with {plain(instead.label)}", key="stay_with_run"):
        state.choose(run=instead.reference)
        st.rerun()


def pick_runs(
    *, default: Sequence[str] = (), label_: str = "Runs", max_runs: int | None = None
) -> list[tuple[data.Listed, Run]]:
    """Draw the choice of several runs and return those that can be read, in the order they were chosen.

    Draws one line for each that cannot be read or is not there.

    default   references shown where nothing was chosen
    max_runs  no more than these can be chosen
    """
    runs = {run.reference: run for run in in_order(data.listed())}
    chosen = state.pick_options(
        "runs",
        label_,
        list(runs),
        default=default,
        format_func=lambda reference: label(runs[reference]),
        max_selections=max_runs,
    )
    for name in state.wanted_list("runs"):
        if name not in runs:
            st.warning(f"Run {plain(name[:80])} is not in the folders shown and is left out.")
    opened = []
    for reference in chosen:
        run, error = data.open_run(runs[reference].path)
        if run is None:
            st.warning(f"{plain(reference)} cannot be read and is left out: {plain(error or '')}")
        else:
            opened.append((runs[reference], run))
    return opened


def default_run(runs: Sequence[data.Listed]) -> data.Listed:
    """The run to show where none was chosen: the newest of one's own, else the first sample."""
    return next((run for run in runs if not run.read_only), runs[0])


def in_order(runs: Sequence[data.Listed]) -> list[data.Listed]:
    """One's own runs first, the newest on top; then the samples in the order they were recorded."""
    return [run for run in reversed(runs) if not run.read_only] + [run for run in runs if run.read_only]


def label(run: data.Listed) -> str:
    """What a list of runs calls it: its name, and its status where that is not finished."""
    return run.label if run.info.status == "finished" else f"{run.label} ({run.info.status})"


def _resolve(reference: str | None, runs: dict[str, data.Listed]) -> str | None:
    return None if reference is None else folders.resolve(reference, {name: run.path for name, run in runs.items()})
