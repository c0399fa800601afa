"""How the lab's controls change what the URL holds, one field or slider at a time, and how a change is undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from app import state
from app.lab.lab import Lab

KEY = "lab_"  # before the names of widgets
_PAST = "_lab_past"  # what was chosen before each change, oldest first
_MOST_UNDONE = 100


def current() -> Lab:
    """What the URL says."""
    return Lab.from_entries(state.wanted_list("lab"))


def change(lab: Lab) -> None:
    """Take a new state over; the one before can be had back by *Undo*."""
    past = st.session_state.setdefault(_PAST, [])
    past.append(state.wanted_list("lab"))
    del past[:-_MOST_UNDONE]
    state.choose(lab=lab.entries())


def can_undo() -> bool:
    """Whether something was changed in this session."""
    return bool(st.session_state.get(_PAST))


def undo() -> None:
    """Take the last change back."""
    past = st.session_state.get(_PAST)
    if past:
        state.choose(lab=past.pop() or None)


def fill(name: str, value: Any) -> None:
    """Put a value into the field of that name before it is drawn."""
    # On every run: the browser draws the fields of a closed popover only once it is opened, from the newest run.
    st.session_state[f"{KEY}{name}"] = value


def slider(
    name: str,
    label: str,
    low: Any,
    high: Any,
    step: Any,
    value: Any,
    *,
    store: Callable[..., None] | None = None,
    args: tuple[Any, ...] = (),
    format: str | None = None,
) -> None:
    """Draw a slider; store is called with args when it was moved, by default to set the setting of that name."""
    key = f"{KEY}{name}"
    # Only where it differs by more than rounding: set on every run, it would jump back under the hand that moves it.
    held = st.session_state.get(key)
    if held is None or abs(held - value) > 1e-6:
        st.session_state[key] = value
    store, args = (set_value, (name,)) if store is None else (store, args)
    st.slider(label, low, high, step=step, key=key, on_change=store, args=args, format=format)


def set_value(name: str) -> None:
    """Widget callback: the setting of that name is what its widget shows."""
    value = st.session_state[f"{KEY}{name}"]
    if value is not None:  # a field that was emptied keeps its number
        change(current().with_settings(**{name: value}))
