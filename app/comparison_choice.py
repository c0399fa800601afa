"""Which runs a comparison starts with, and the colour that each keeps while others come and go."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import streamlit as st

from app import data, state
from app.comparison_settings import settings
from app.figures.theme import ALIKE, OKABE_ITO

COLOURS = 4 * len(OKABE_ITO)  # every hue solid, then dashed in three ways: see `app.figures.theme.line_dash`
_HELD = "_run_colours"
_WRITTEN = "_run_colours_in_url"


def default_pair(runs: Sequence[data.Listed], shown: str | None = None) -> list[str]:
    """References of the two runs to start with. Runs that cannot be read do not count.

    With `shown`, the reference of a run: that one and the other whose model and settings differ least from its, with
    another balancer if possible. Else aux loss and quantile where there are both, of several such pairs the one that
    differs least; else the first run and the one most like it.
    """
    readable = [run for run in runs if run.info.status != "unreadable"]
    first = [run for run in readable if run.reference == shown]
    pairs = [] if first else list(itertools.product(*(_with_balancer(readable, name) for name in ("aux", "quantile"))))
    first = first or readable[:1]
    pairs = pairs or [(one, other) for one in first for other in readable if other is not one]
    best = min(
        pairs,
        key=lambda pair: (_differences(*pair), _balancer(pair[0]) == _balancer(pair[1])),
        default=tuple(first),
    )
    return [run.reference for run in best]


def colours(chosen: Sequence[str], known: Iterable[str]) -> dict[str, int]:
    """A place in the order of colours for each chosen run, by reference; see `assign`.

    It stays with the run in this session whatever is chosen, recorded or deleted, and the URL carries it, so that a
    link shows the same colours elsewhere.

    known  the references of all runs, in the order they were recorded
    """
    session = st.session_state
    in_url = state.wanted_list("colours")
    held: dict[str, int] = session.setdefault(_HELD, {})
    if in_url != session.get(_WRITTEN, []):  # a link, or back and forward
        pairs = zip(state.wanted_list("runs"), in_url, strict=False)
        held |= {reference: int(text) for reference, text in pairs if text.isdecimal() and int(text) < COLOURS}
    found = assign(chosen, held, {reference: place for place, reference in enumerate(known)})
    held |= found
    session[_WRITTEN] = [str(found[reference]) for reference in chosen]
    state.choose(colours=session[_WRITTEN] or None)
    return found


def assign(chosen: Sequence[str], held: Mapping[str, int], places: Mapping[str, int]) -> dict[str, int]:
    """A colour for each chosen run, no two alike (of at most COLOURS): its own where it holds one.

    A run that holds none takes the hue of its place among all runs where that is free, else the next free hue, those
    that are much like one taken last; dashed ones only when every hue is taken.
    """
    taken: dict[str, int] = {}
    for reference in chosen:
        if reference in held and held[reference] not in taken.values():
            taken[reference] = held[reference]
    hues = len(OKABE_ITO)
    for reference in chosen:
        if reference in taken:
            continue
        own = places.get(reference, 0) % hues
        order = [dash + (own + more) % hues for dash in range(0, COLOURS, hues) for more in range(hues)]
        order.sort(
            key=lambda colour: (colour // hues, any({colour % hues, one % hues} in ALIKE for one in taken.values()))
        )
        taken[reference] = next((colour for colour in order if colour not in taken.values()), own)
    return taken


def _with_balancer(runs: Sequence[data.Listed], balancer: str) -> list[data.Listed]:
    return [run for run in runs if _balancer(run) == balancer]


def _balancer(run: data.Listed) -> Any:
    return settings(run.info.manifest or {}).get("balancer")


def _differences(one: data.Listed, other: data.Listed) -> int:
    a, b = settings(one.info.manifest or {}), settings(other.info.manifest or {})
    return sum(a.get(key) != b.get(key) for key in {*a, *b} - {"balancer"})
