"""A run that is still written: is it alive, and pages that keep up with it without losing their place."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import streamlit as st

from app import data, state
from app.fragments import fragment
from app.text import duration, plain
from app.words import count, listed
from recorder.manifest import heartbeat_age
from recorder.reader import Run
from recorder.storage import Place

CHECK_S = 2.0
FOLLOWING = ("overview", "replay", "tokens")  # pages cheap enough to be drawn again as a run grows
SILENT_AFTER_S = 45.0  # a writer gives a sign of life every 15 s even where no rows come
_SLOW = 10.0  # a step that takes this many times the usual is worth a word ...
_SLOW_AFTER_S = 60.0  # ... from this long on: an evaluation may lie between two steps
_REST = 3.0  # a page rests this many times as long as it took to draw
_MOST_OTHERS = 5

_FOLLOW = "follow_run"
_SHOWN_AT = "_live_shown_at"


class Pulse(NamedTuple):
    """How a running run is: whether something seems wrong, and one clause on it."""

    stalled: bool
    words: str


def pulse(run: Run) -> Pulse:
    """What the last sign of life and the last rows of a run that says it is running tell."""
    silent_s, usual_s = heartbeat_age(run.manifest), _usual_gap_s(run)
    # A writer that is used by hand gives signs of life with its rows alone, so as seldom as it has some.
    if silent_s > max(SILENT_AFTER_S, _SLOW * (usual_s or 0.0)):
        since = "ever" if np.isinf(silent_s) else f"for {duration(silent_s)}"
        return Pulse(True, f"no sign of life {since}: its process hangs, sleeps or cannot write")
    waited_s = _since_rows_s(run)
    if waited_s is not None and usual_s is not None and waited_s > max(_SLOW_AFTER_S, _SLOW * usual_s):
        return Pulse(True, f"no new step for {duration(waited_s)}, though its process lives")
    return Pulse(False, "recording")


def last_sign(run: Run) -> str:
    """When the writer of a run that is not closed last gave a sign of life, as a clause; "" where it never did."""
    silent_s = heartbeat_age(run.manifest)
    if np.isinf(silent_s):
        return ""
    at = str(run.manifest.get("heartbeat_at"))[:19].replace("T", " ")
    return f"its last sign of life came {duration(max(silent_s, 0.0))} ago, at {at} UTC"


def keep_up(run: Run) -> None:
    """Draw how a running run is, renewed by itself; pages of `FOLLOWING` are drawn again as it grows.

    What a person chose stays: only where no step was chosen does the newest one come into sight.
    """
    st.session_state[_SHOWN_AT] = time.monotonic()
    fragment(_watch, run_every=CHECK_S)(run.path, run.last_step)


def _watch(path: Place, drawn: int | None) -> None:
    run, _ = data.open_run(path)
    if run is None or run.status != "running":
        state.draw_again()
    grown = run.last_step != drawn
    follows = state.page() in FOLLOWING
    with st.container(horizontal=True, vertical_alignment="center"):
        now = pulse(run)
        said = f"Still recording: this page shows the steps up to {drawn}, the run is at step {run.last_step}."
        if now.stalled:
            st.warning(f"This run says it is running, but gives {now.words}. Its last step is {run.last_step}.")
        else:
            st.caption(said)
        if follows and st.toggle("Follow", value=True, key=_FOLLOW, help="Draw the page again as the run grows."):
            if state.wanted("step") is not None and st.button("Go to the newest step", key="newest_step"):
                state.choose(step=None)
                st.rerun()
            if grown and not st.session_state.get("playing") and _rested():
                state.draw_again()
        elif st.button("Show the newest", key="show_newest", disabled=not grown):
            st.rerun()
    _others(path)


def keep_up_with(runs: Sequence[tuple[str, Run]]) -> None:
    """The same for a page of several runs, each with what a person calls it; nothing where none of them is running."""
    running = [(label, run.path, run.last_step) for label, run in runs if run.status == "running"]
    if running:
        st.session_state[_SHOWN_AT] = time.monotonic()
        fragment(_watch_several, run_every=CHECK_S)(running)


def _watch_several(drawn: Sequence[tuple[str, Place, int | None]]) -> None:
    said, grown = [], False
    for label, path, shown in drawn:
        run, _ = data.open_run(path)
        if run is None or run.status != "running":
            state.draw_again()
        now = pulse(run)
        if now.stalled:
            st.warning(
                f"**{plain(label)}** says it is running, but gives {now.words}. Its last step is {run.last_step}."
            )
        grown = grown or run.last_step != shown
        said.append(f"{plain(label)} {_how_far(run.last_step, shown)}")
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"Still recording: {listed(said)}.")
        if not st.toggle("Follow", value=True, key=_FOLLOW, help="Draw the page again as the runs grow."):
            if st.button("Show the newest", key="show_newest", disabled=not grown):
                st.rerun()
        elif grown and not st.session_state.get("playing") and _rested():
            state.draw_again()


def _how_far(last: int | None, shown: int | None) -> str:
    if last is None:
        return "has no step yet"
    return f"is at step {last}" + ("" if last == shown else f", shown to {shown}" if shown is not None else "")


def _rested() -> bool:
    """Whether the page was drawn long enough ago for its reader, and for this machine, to have it drawn again."""
    age = time.monotonic() - float(st.session_state.get(_SHOWN_AT, 0.0))
    return age > max(CHECK_S, _REST * state.last_draw_s())


def _others(path: Place) -> None:
    """The other runs that are being recorded, each with its last step, as buttons that show them."""
    running = [run for run in data.listed() if run.info.status == "running" and run.path != path]
    if not running:
        return
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.caption(f"{count(len(running), 'other run')} being recorded:")
        for listed in running[:_MOST_OTHERS]:
            other, _ = data.open_run(listed.path)
            if other is None:
                continue
            now = pulse(other)
            at = f"step {other.last_step}" + (f", {now.words.partition(':')[0]}" if now.stalled else "")
            if st.button(f"{plain(listed.label)}: {at}", key=f"live_{listed.reference}", type="tertiary"):
                state.choose(run=listed.reference)
                st.rerun()
        if len(running) > _MOST_OTHERS:
            st.caption(f"and {len(running) - _MOST_OTHERS} more")


def _since_rows_s(run: Run) -> float | None:
    """Seconds since the newest part of `steps` was written; None where there is none or its time is not known."""
    newest_ns = max((file.mtime_ns for file in run.table("steps").files.values()), default=0)
    return time.time() - newest_ns / 1e9 if newest_ns else None


def _usual_gap_s(run: Run) -> float | None:
    """What a recorded step usually took, in seconds, with those between it and the one before; None if unknown."""
    steps = data.steps(run).tail(50)
    taken_S = steps["wall_time_s"].to_numpy(dtype=np.float64, na_value=np.nan)
    gaps_S = np.diff(steps["step"].to_numpy(dtype=np.int64))
    known_S = taken_S[np.isfinite(taken_S)]
    if not known_S.size:
        return None
    return float(np.median(known_S)) * float(np.median(gaps_S) if gaps_S.size else 1.0)
