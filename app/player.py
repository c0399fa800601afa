"""Replay: a step slider with play and pause that moves without running the rest of the page again."""

import time
from collections.abc import Callable, Iterable

import numpy as np
import streamlit as st

from app import presses, state
from app.fragments import fragment

FRAME_S = 0.5  # seconds a frame stays; a figure of a few hundred cells draws well within it
SPEEDS = (1, 2, 5, 10, 20, 50, 100)  # recorded steps per frame
_FRAMES = 60  # the speed offered first plays a whole run in about this many frames

_NEXT_AT = "_player_next_at"
_SPEED = "player_speed"


def replay(steps: Iterable[int], draw: Callable[[int], None], *, label: str = "Step") -> None:
    """Draw the controls and, below them, `draw(step)`; while playing, only these are drawn again.

    The keys left, right and space press Previous, Next and Play, save in a field that takes them itself. Presses that
    come faster than the page is drawn add up.

    `draw` runs inside a fragment: load what does not depend on the step outside and let `draw` close over it;
    give its charts fixed keys, so that they are updated in place. One step alone has no controls. The step is
    `state`'s "step": it is in the URL (while playing, from the next pause on) and shared with other pages.

    steps  recorded steps in ascending order, without repetition; at least one
    """
    steps_S = np.asarray(list(steps), dtype=np.int64)
    playing = bool(st.session_state.get("playing")) and steps_S.size > 1
    fragment(_frame, run_every=FRAME_S if playing else None)(steps_S, draw, label)


def _frame(steps_S: np.ndarray, draw: Callable[[int], None], label: str) -> None:
    if steps_S.size > 1:
        _follow_presses(steps_S)
        _advance(steps_S)
        with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
            _buttons(steps_S)
            with st.container(width="stretch"):
                step = state.pick_step(steps_S, label=label)
            _speed(steps_S)
    else:
        step = state.pick_step(steps_S, label=label)
    draw(step)
    if steps_S.size > 1:
        presses.count(playing=bool(st.session_state.get("playing")))


def _follow_presses(steps_S: np.ndarray) -> None:
    pressed = presses.take()
    if pressed.moves and not st.session_state.get("playing"):
        _move(steps_S, pressed.moves)
    if pressed.plays % 2:
        _toggle(steps_S)
        st.rerun()  # the clock of a fragment is set where the whole page runs


def _advance(steps_S: np.ndarray) -> None:
    """Move on by one frame if it is time; a person's own move of the slider starts a new frame."""
    session = st.session_state
    if not session.get("playing"):
        return
    now = time.monotonic()
    # Something else in the fragment (the slider, the speed) can run it between two ticks of the clock.
    if now < session.get(_NEXT_AT, now):
        return
    session[_NEXT_AT] = now + 0.8 * FRAME_S
    here = _here(steps_S)
    there = min(here + _steps_per_frame(steps_S), steps_S.size - 1)
    state.choose(step=int(steps_S[there]))
    if there == steps_S.size - 1:
        _stop()
        st.rerun()


def _buttons(steps_S: np.ndarray) -> None:
    playing = bool(st.session_state.get("playing"))
    here = _here(steps_S)
    st.button(
        "Previous",
        key=presses.BACK,
        icon=":material/skip_previous:",
        shortcut="Left",
        help="One recorded step back",
        disabled=playing or here == 0,
        on_click=_move,
        args=(steps_S, -1),
    )
    if st.button(
        "Pause" if playing else "Play",
        key=presses.PLAY,
        icon=":material/pause:" if playing else ":material/play_arrow:",
        shortcut="Space",
        type="primary",
        on_click=_toggle,
        args=(steps_S,),
    ):
        st.rerun()  # the clock of a fragment is set where the whole page runs
    st.button(
        "Next",
        key=presses.FORWARD,
        icon=":material/skip_next:",
        shortcut="Right",
        help="One recorded step forward",
        disabled=playing or here == steps_S.size - 1,
        on_click=_move,
        args=(steps_S, 1),
    )


def _speed(steps_S: np.ndarray) -> None:
    options = [speed for speed in SPEEDS if speed == 1 or speed < steps_S.size / 4]
    if len(options) == 1:
        return
    if st.session_state.get(_SPEED) not in options:
        st.session_state[_SPEED] = _steps_per_frame(steps_S)
    st.selectbox(
        "Speed",
        options,
        key=_SPEED,
        format_func=lambda speed: f"{speed} per frame" if speed > 1 else "every step",
        help="Recorded steps that each frame moves on by",
        width=150,
    )


def _steps_per_frame(steps_S: np.ndarray) -> int:
    options = [speed for speed in SPEEDS if speed == 1 or speed < steps_S.size / 4]
    chosen = st.session_state.get(_SPEED)
    if chosen in options:
        return int(chosen)
    return min(options, key=lambda speed: abs(speed - steps_S.size / _FRAMES))


def _here(steps_S: np.ndarray) -> int:
    return int(np.searchsorted(steps_S, state.nearest_step(steps_S, state.wanted("step"))))


def _move(steps_S: np.ndarray, by: int) -> None:
    there = min(max(_here(steps_S) + by, 0), steps_S.size - 1)
    state.choose(step=int(steps_S[there]))


def _toggle(steps_S: np.ndarray) -> None:
    if st.session_state.get("playing"):
        _stop()
        return
    if _here(steps_S) == steps_S.size - 1:
        state.choose(step=int(steps_S[0]))
    st.session_state["playing"] = True
    st.session_state[_NEXT_AT] = time.monotonic() + FRAME_S


def _stop() -> None:
    st.session_state["playing"] = False
