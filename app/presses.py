"""Quick presses that add up: the keys and buttons of a replay, counted in the browser.

Streamlit makes one of several clicks of a button that come while a page is drawn. Here the browser counts them, sends
their sum, and waits with the next sum until the page has followed the last one.
"""

from typing import Any, NamedTuple

import streamlit as st

BACK, PLAY, FORWARD = "step_back", "play", "step_forward"  # keys of the buttons

_KEY = "presses"
_TAKEN = "_presses_taken"

# `sum` is all that was ever pressed, moves (forward less back) and plays; `sent` what of it the server was told. A
# message may be lost, with a server that starts anew, say: after PATIENCE the next one goes out all the same.
_JS = r"""
const GATHER = 60, PATIENCE = 5000;
const FIELD = "input, textarea, select, canvas, [contenteditable=true], [role=slider], [role=radio], [role=tab], " +
  "[role=combobox], [role=listbox], [role=menu], [role=dialog]";

function count() {
  const its = { sum: null, sent: null, busy: 0, timer: 0 };
  const same = (one, other) => one.moves === other.moves && one.plays === other.plays;
  const send = () => {
    if (Date.now() < its.busy || same(its.sum, its.sent)) return;
    its.sent = { ...its.sum };
    its.busy = Date.now() + PATIENCE;
    its.set("sum", its.sent);
    setTimeout(send, PATIENCE + 1);
  };
  const press = (name, event) => {
    event.preventDefault();
    event.stopImmediatePropagation();
    if (name === "play") its.sum.plays += 1;
    else if (!its.data.playing) its.sum.moves += name === "step_forward" ? 1 : -1;
    clearTimeout(its.timer);
    its.timer = setTimeout(send, GATHER);
  };
  const names = { ArrowLeft: "step_back", ArrowRight: "step_forward", " ": "play" };
  const key = (event) => {
    const name = names[event.key];
    if (!name || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const at = event.composedPath()[0];
    // A radio button that has just been clicked keeps the space key for itself, though there is nothing left to choose.
    const chosen = name === "play" && at.closest?.("[role=radio][aria-checked=true]");
    if (!chosen && at.closest?.(FIELD)) return;
    press(name, event);
  };
  const click = (event) => {
    for (const name of Object.values(names)) {
      if (event.target.closest?.(".st-key-" + name + " button:not(:disabled)")) press(name, event);
    }
  };
  window.addEventListener("keydown", key, true);
  window.addEventListener("click", click, true);
  its.follow = (data, set) => {
    Object.assign(its, { data, set });
    its.sum ??= { ...data.taken };
    its.sent ??= { ...data.taken };
    if (same(data.taken, its.sent)) { its.busy = 0; send(); }
  };
  its.stop = () => {
    window.removeEventListener("keydown", key, true);
    window.removeEventListener("click", click, true);
    clearTimeout(its.timer);
  };
  return its;
}

export default function({ parentElement, data, setStateValue }) {
  const its = (parentElement.counted ??= count());
  its.follow(data, setStateValue);
  return its.stop;
}
"""


class Presses(NamedTuple):
    """Moves forward less moves back, and presses of play."""

    moves: int
    plays: int


def take() -> Presses:
    """What was pressed since the last call. Call it before anything that shows the outcome is drawn."""
    session = st.session_state
    told = (session.get(_KEY) or {}).get("sum")
    if told is None:
        return Presses(0, 0)
    now = Presses(int(told["moves"]), int(told["plays"]))
    # A browser that outlives its session tells the new one of presses that the old one has followed.
    before = session.get(_TAKEN, now)
    session[_TAKEN] = now
    return Presses(now.moves - before.moves, now.plays - before.plays)


def count(*, playing: bool) -> None:
    """Count from here on. Call it last in the fragment: the browser takes it as the sign that all is drawn."""
    taken = st.session_state.setdefault(_TAKEN, Presses(0, 0))
    # Registered at each call: Streamlit forgets nothing, but another server in this process would know nothing of it.
    mount = st.components.v2.component("routescope_presses", html="", js=_JS)
    data: dict[str, Any] = {"taken": taken._asdict(), "playing": playing}
    mount(key=_KEY, data=data, on_sum_change=lambda: None)
