"""What a person has chosen (run, layer, step, ...): kept in the session, shown in the URL, safe on every page.

Three rules make a choice survive a reload, a page change, and back and forward:

* The *wanted* value is what the person last chose; it lives in the session under one key that belongs to no
  widget, so no page change can drop it. Widgets are filled from it before they are drawn.
* The *shown* value is the wanted one fitted to the run and page at hand (clamped, snapped to a recorded
  step). Fitting never overwrites what was wanted: step 57 shows as 10 in a run of 11 steps and is 57 again
  back in the longer run.
* The URL carries what is shown, else what is wanted. It is read when a session starts and when the browser
  goes back or forward, and is otherwise only written.

Streamlit's own `bind="query-params"` is not used: it drops values equal to the default from the URL, resets
out-of-range values instead of clamping them, takes a parameter out of the URL on pages without its widget,
and writes one history entry for every programmatic change, so for every frame of a replay.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from app import layer_keys
from moe_core.metrics import WINDOW

T = TypeVar("T")

NAMES = (
    "run",
    "runs",
    "colours",
    "group",
    "smoothing",
    "against",
    "layer",
    "step",
    "sequence",
    "expert",
    "token",
    "ranks",
    "spares",
    "phase",
    "window",
    "dispatch",
    "show",
    "models",
    "design",
    "x",
    "find",
    "lab",
    "filter",
    "status",
    "balancer",
    "tag",
    "sort",
    "term",
)
MAX_BUTTONS = 8  # more options than this fit no row of buttons and become a drop-down list

_WANTED = "_wanted"
_SHOWN = "_shown"
_PAGE = "_page"
_DRAWN = "_drawn"
_BY_ITSELF, _TELL_AGAIN = "_by_itself", "_tell_again"
_BEGAN_AT, _DRAW_S = "_began_at", "_draw_s"


def begin(page: str) -> None:
    """Start a run of the script: take over the URL where it is news. Call once, before any `pick_*`.

    page  url_path of the page about to be drawn
    """
    session = st.session_state
    session[_BEGAN_AT] = time.monotonic()
    context = get_script_run_ctx()
    is_new = _WANTED not in session
    went_back = bool(getattr(context, "is_history_navigation", False))
    session.setdefault(_WANTED, {})
    if is_new or went_back:
        in_url = {name: st.query_params.get_all(name) for name in NAMES if name in st.query_params}
        # A page change adds a bare URL to the browser's history before this script can complete it. Going
        # back to such an entry must not throw the choices away.
        if in_url:
            session[_WANTED] = in_url
    session[_SHOWN] = {}
    session[_TELL_AGAIN] = session.pop(_BY_ITSELF, False)
    if session.get(_PAGE) != page:
        forget_fragments()
        session["playing"] = False
        session[_DRAWN] = {}
    session[_PAGE] = page


def forget_fragments() -> None:
    """Drop the parts of the page that is left (see `app.fragments`), so that no late request draws them on the next."""
    context = get_script_run_ctx()
    if context is not None:
        context.fragment_storage.clear()


def finish() -> None:
    """End a run of the script: bring the URL up to date. Call once, after the page is drawn."""
    began_at = st.session_state.pop(_BEGAN_AT, None)
    if began_at is not None:  # not at the end of a fragment
        st.session_state[_DRAW_S] = time.monotonic() - began_at
        st.session_state[_TELL_AGAIN] = False
    target = url_parameters()
    current = {name: st.query_params.get_all(name) for name in st.query_params}
    if current != target:
        st.query_params.from_dict(target)


def draw_again() -> NoReturn:
    """`st.rerun()` of a page that nobody has asked for: every widget is told again what it shows.

    A browser that is behind may skip the draw before, and with it what that one has told the widgets.
    """
    st.session_state[_BY_ITSELF] = True
    st.rerun()


def page() -> str:
    """url_path of the page that is drawn."""
    return str(st.session_state.get(_PAGE) or "")


def last_draw_s() -> float:
    """Seconds that drawing the page took the last time."""
    return float(st.session_state.get(_DRAW_S, 0.0))


def url_parameters() -> dict[str, list[str]]:
    """The query parameters that describe what is chosen now: parameter name to its values, as text."""
    wanted, shown = _wanted(), st.session_state.get(_SHOWN, {})
    return {name: shown.get(name, wanted[name]) for name in NAMES if wanted.get(name)}


def wanted(name: str) -> str | None:
    """The chosen value of `name` as text, fitted to nothing; None where nothing was chosen."""
    values = _wanted().get(name)
    return values[-1] if values else None


def current(name: str) -> str | None:
    """The value of `name` that is shown on this page, else the chosen one, as text; None where there is none."""
    values = st.session_state.get(_SHOWN, {}).get(name) or _wanted().get(name)
    return values[-1] if values else None


def wanted_list(name: str) -> list[str]:
    """All chosen values of a choice of several, as text."""
    return list(_wanted().get(name, []))


def choose(**choices: Any) -> None:
    """Choose by program, for instance after a click in a figure: `choose(layer=3, expert=5)`.

    A list is a choice of several; None takes the choice back. Follow with `st.rerun()` where widgets that are
    already drawn must show it.
    """
    for name, value in choices.items():
        _check(name)
        st.session_state.get(_SHOWN, {}).pop(name, None)  # fitted to what was wanted until now
        if value is None:
            _wanted().pop(name, None)
        else:
            _wanted()[name] = _as_texts(value)
    _write_from_fragment()


def pick_option(
    name: str,
    label: str,
    options: Sequence[T],
    *,
    default: T | None = None,
    format_func: Callable[[Any], str] = str,
    help: str | None = None,
    as_list: bool = False,
) -> T:
    """Draw a choice of one of `options` and return it: buttons for a few, a drop-down list for many.

    One option alone draws nothing and is returned. Text in the URL that is no option means the default.

    name     one of NAMES: the URL parameter and the widget's key
    default  the option shown where nothing (or nonsense) was chosen; the first by default
    as_list  always draw, and always a drop-down list
    Raises ValueError where there are no options.
    """
    _check(name)
    if not options:
        raise ValueError(f"no options for {name!r}")
    by_text = {str(option): option for option in options}
    fallback = options[0] if default is None else default
    value = by_text.get(wanted(name) or "", fallback)
    show(name, value)
    if len(options) == 1 and not as_list:
        return value
    _fill(name, value, _labelled(options, format_func))
    common: dict[str, Any] = {
        "format_func": format_func,
        "key": name,
        "help": help,
        "on_change": _store_options,
        "args": (name,),
    }
    if len(options) <= MAX_BUTTONS and not as_list:
        chosen = st.segmented_control(label, list(options), required=True, **common)
    else:
        chosen = st.selectbox(label, list(options), **common)
    return value if chosen is None else chosen


def pick_options(
    name: str,
    label: str,
    options: Sequence[str],
    *,
    default: Sequence[str] = (),
    format_func: Callable[[Any], str] = str,
    max_selections: int | None = None,
    help: str | None = None,
    placeholder: str | None = None,
) -> list[str]:
    """Draw a choice of several of `options` and return those chosen, in the order they were chosen.

    Text in the URL that is no option is left out; where nothing is left, `default` is shown.
    """
    _check(name)
    known = [text for text in dict.fromkeys(wanted_list(name)) if text in options][:max_selections]
    value = known or [text for text in default if text in options]
    show(name, value)
    _fill(name, value, _labelled(options, format_func))
    return st.multiselect(
        label,
        list(options),
        format_func=format_func,
        key=name,
        help=help,
        placeholder=placeholder,
        max_selections=max_selections,
        on_change=_store_several,
        args=(name,),
    )


def pick_text(name: str, label: str, *, placeholder: str = "", help: str | None = None) -> str:
    """Draw a field for a line of text and return what it holds; "" for nothing."""
    _check(name)
    value = wanted(name) or ""
    if value:
        show(name, value)
    _fill(name, value, ())
    return st.text_input(
        label, key=name, placeholder=placeholder, help=help, on_change=_store_text, args=(name,), max_chars=80
    )


def pick_layer(run: Any, keys: Sequence[int] | None = None, *, label: str = "MoE layer") -> int:
    """Draw the choice of a MoE layer of `run` (of these keys alone, where given) and return its key.

    Keys are those of `app.layer_keys`. Raises ValueError where the run has no MoE layer.
    """
    shown = {key: name for key, name in layer_keys.labels(run).items() if keys is None or key in keys}
    if not shown:
        raise ValueError(f"run {run.run_id} has no MoE layer")
    return pick_option(
        "layer",
        label,
        list(shown),
        format_func=lambda key: str(shown[key]),
        as_list=any(isinstance(name, str) for name in shown.values()),  # buttons with words do not fit side by side
    )


def pick_step(steps: Iterable[int], *, label: str = "Step", default: int | None = None, help: str | None = None) -> int:
    """Draw a slider over the recorded `steps` and return the one chosen, always one of them.

    One step alone draws nothing and is returned. A wanted step that was not recorded means the nearest one
    (the earlier of two). Evenly spaced steps get a plain slider, others one that stops at each of them.

    steps    recorded steps in ascending order, without repetition
    default  where nothing (or nonsense) was chosen; the last step by default
    Raises ValueError where there are no steps.
    """
    steps_S = np.asarray(list(steps), dtype=np.int64)
    if steps_S.size == 0:
        raise ValueError("no recorded steps to choose from")
    value = nearest_step(steps_S, wanted("step"), default=default)
    show("step", value)
    if steps_S.size == 1:
        return value
    gaps = np.diff(steps_S)
    _fill("step", value, (int(steps_S[0]), int(steps_S[-1]), steps_S.size))
    if (gaps == gaps[0]).all():
        return int(
            st.slider(
                label,
                int(steps_S[0]),
                int(steps_S[-1]),
                step=int(gaps[0]),
                key="step",
                help=help,
                on_change=_store,
                args=("step",),
            )
        )
    return int(st.select_slider(label, steps_S.tolist(), key="step", help=help, on_change=_store, args=("step",)))


def pick_sequence(sequences: Iterable[int], *, label: str = "Sequence") -> int:
    """Draw the choice of a sequence of a batch (numbers as recorded) and return it."""
    return pick_option("sequence", label, [int(sequence) for sequence in sequences])


def pick_expert(num_experts: int, *, label: str = "Expert") -> int | None:
    """Draw the choice of one expert, or of all of them (None, the default), and return it."""
    chosen = pick_option(
        "expert",
        label,
        ["all", *map(str, range(num_experts))],
        format_func=lambda text: "All experts" if text == "all" else f"Expert {text}",
    )
    return None if chosen == "all" else int(chosen)


def pick_phase(phases: Sequence[str], *, label: str = "Phase") -> str:
    """Draw the choice of a recorded phase (train, probe, ...) and return it."""
    return pick_option("phase", label, list(phases))


def pick_window(*, default: int = WINDOW, label: str = "Window (steps)") -> int:
    """Draw the choice of how many trailing steps to sum, and return it."""
    return pick_option("window", label, sorted({1, 10, 50, 200, default}), default=default)


def show(name: str, value: Any) -> None:
    """Say what is shown on this page for `name`, so that the URL carries it: for choices with widgets of their own."""
    st.session_state.setdefault(_SHOWN, {})[name] = _as_texts(value)
    _write_from_fragment()


def nearest_step(steps_S: np.ndarray, text: str | None, *, default: int | None = None) -> int:
    """The recorded step nearest to the one that `text` names, or the default for text that is no number.

    steps_S  int64 (S,), ascending, not empty
    """
    fallback = int(steps_S[-1]) if default is None else default
    try:
        target = fallback if text is None else int(text)
    except ValueError:
        target = fallback
    right = int(np.searchsorted(steps_S, min(max(target, int(steps_S[0])), int(steps_S[-1]))))
    left = max(right - 1, 0)
    return int(min(steps_S[left], steps_S[right], key=lambda step: (abs(int(step) - target), int(step))))


def _as_texts(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list | tuple) else [value])]


def _wanted() -> dict[str, list[str]]:
    return st.session_state.setdefault(_WANTED, {})


def _check(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"unknown choice {name!r}; known are {', '.join(NAMES)}")


def _labelled(options: Sequence[Any], format_func: Callable[[Any], str]) -> tuple[Any, ...]:
    # The browser knows an option by its label alone: after a rename, or when "(running)" goes, it would send back one
    # that means nothing any more, unless it is told again.
    return tuple((option, format_func(option)) for option in options)


def _fill(key: str, value: Any, range_: tuple[Any, ...]) -> None:
    # Not on every run: that would make a slider jump back under the hand of someone who drags it faster than
    # the page is drawn. But the session can still hold the value of the widget of this key on the page just
    # left, or over another range of values, which the new widget will not take over.
    drawn = st.session_state.setdefault(_DRAWN, {})
    told = st.session_state.get(key) == value and drawn.get(key) == range_
    if not told or st.session_state.get(_TELL_AGAIN):
        st.session_state[key] = value
    drawn[key] = range_


# A page that draws itself again (a replay that plays, a run that grows) is asked to while the browser has not yet taken
# in what the draw before has set. The browser then sends what widgets showed until then, and Streamlit calls that a
# change: of a slider whose range has grown, of an option that has another label. Nobody has chosen anything.


def _store(name: str) -> None:
    """Widget callback: what the widget shows is now wanted, if it is not what the page shows in any case."""
    value = st.session_state[name]
    if _as_texts(value) != st.session_state.get(_SHOWN, {}).get(name):
        choose(**{name: value})


def _store_options(name: str) -> None:
    """Widget callback: the same, and what is no option (any more) is no choice."""
    options = {str(option) for option, _ in st.session_state.get(_DRAWN, {}).get(name, ())}
    if options.issuperset(_as_texts(st.session_state[name])):
        _store(name)


def _store_several(name: str) -> None:
    """Widget callback: the same of a choice of several, which stands in no fragment: what comes with one is late."""
    if not in_fragment():
        _store_options(name)


def _store_text(name: str) -> None:
    """Widget callback: an empty field is no choice."""
    choose(**{name: st.session_state[name] or None})


def _write_from_fragment() -> None:
    # A fragment run has no `finish`. While replay plays, the URL waits for the pause: each write is an entry
    # in the browser's history.
    if in_fragment() and not st.session_state.get("playing"):
        finish()


def in_fragment() -> bool:
    """Whether a fragment alone is drawn again, not the whole page."""
    context = get_script_run_ctx()
    return context is not None and bool(context.fragment_ids_this_run)
