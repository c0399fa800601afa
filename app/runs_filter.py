"""Which runs the page of runs shows and in what order: by words, status, balancer and tag. All of it in the URL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import streamlit as st

from app import data, state

Pair = tuple[data.Listed, dict[str, Any]]

NO_BALANCER = "not told"
#: Orders by name: what the list calls them, the value they go by, whether the greatest comes first.
_BY_VALUE: dict[str, tuple[str, str, bool]] = {
    "ce": ("Lowest CE", "ce_loss", False),
    "loss": ("Lowest loss", "loss", False),
    "violation": ("Highest max_violation", "max_violation_window", True),
    "idle": ("Most idle experts", "idle_experts", True),
    "steps": ("Most steps", "num_steps", True),
}
_NEWEST, _OLDEST, _NAME = "newest", "oldest", "name"
_ORDERS = {_NEWEST: "Newest first", _OLDEST: "Oldest first", _NAME: "Name"} | {
    name: label for name, (label, _, _) in _BY_VALUE.items()
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a person asked for. Empty means any; of several statuses, balancers or tags one is enough.

    words  all of them must stand in the name, id, notes, tags or balancer; case does not count
    """

    words: str = ""
    statuses: Sequence[str] = ()
    balancers: Sequence[str] = ()
    tags: Sequence[str] = ()
    order: str = _NEWEST

    @property
    def leaves_out(self) -> bool:
        """Whether any run could be left out."""
        return bool(self.words.strip() or self.statuses or self.balancers or self.tags)


def pick(pairs: Sequence[Pair]) -> Choice:
    """Draw the controls in one row and return what is chosen. A choice that all runs share is not offered."""
    offered = {name: options for name in _VALUES if (options := _options(name, pairs))}
    find, *several, order = st.columns([3, *[2] * len(offered), 2])
    with find:
        words = _pick_words()
    chosen: dict[str, list[str]] = {}
    for place, (name, options) in zip(several, offered.items(), strict=True):
        with place:
            chosen[name] = state.pick_options(name, name.capitalize(), options, placeholder="any")
    with order:
        by = state.pick_option("sort", "Order", list(_ORDERS), format_func=lambda name: _ORDERS[name], as_list=True)
    return Choice(
        words=words,
        statuses=chosen.get("status", ()),
        balancers=chosen.get("balancer", ()),
        tags=chosen.get("tag", ()),
        order=by,
    )


def apply(choice: Choice, pairs: Sequence[Pair]) -> list[Pair]:
    """The runs with their rows that the choice leaves, in its order; those without the value it goes by at the end.

    pairs  the runs as `pickers.in_order` puts them, each with its `data.row`
    """
    found = [pair for pair in pairs if _matches(choice, pair)]
    if choice.order == _OLDEST:
        return sorted(found, key=lambda pair: str((pair[0].info.manifest or {}).get("created_at") or ""))
    if choice.order == _NAME:
        return sorted(found, key=lambda pair: pair[0].label.casefold())
    if choice.order in _BY_VALUE:
        _, name, greatest_first = _BY_VALUE[choice.order]
        with_value = [pair for pair in found if pair[1][name] is not None]
        without = [pair for pair in found if pair[1][name] is None]
        return sorted(with_value, key=lambda pair: pair[1][name], reverse=greatest_first) + without
    return found


def clear() -> None:
    """Show all runs again."""
    state.choose(filter=None, status=None, balancer=None, tag=None)


def _matches(choice: Choice, pair: Pair) -> bool:
    run, row = pair
    about = run.info.about
    texts = (run.label, run.reference, run.info.run_id, about.notes, *about.tags, _balancer(pair))
    text = "\n".join(texts).casefold()
    return (
        all(word in text for word in choice.words.casefold().split())
        and (not choice.statuses or row["status"] in choice.statuses)
        and (not choice.balancers or _balancer(pair) in choice.balancers)
        and (not choice.tags or any(tag in choice.tags for tag in about.tags))
    )


def _balancer(pair: Pair) -> str:
    return str(pair[1]["balancer"] or NO_BALANCER)


def _pick_words() -> str:
    wanted = state.wanted("filter") or ""
    st.session_state["filter"] = wanted
    state.show("filter", wanted)
    st.text_input(
        "Find",
        key="filter",
        type="search",
        placeholder="name, notes, tag, balancer",
        on_change=lambda: state.choose(filter=st.session_state["filter"].strip() or None),
    )
    return wanted


def _options(name: str, pairs: Sequence[Pair]) -> list[str]:
    """The values there are; none where every run has the same one, unless a link asks for one."""
    found = [tuple(_VALUES[name](pair)) for pair in pairs]
    return sorted({value for values in found for value in values}) if len(set(found)) > 1 or state.wanted(name) else []


_VALUES: dict[str, Callable[[Pair], Sequence[str]]] = {
    "status": lambda pair: [pair[1]["status"]],
    "balancer": lambda pair: [_balancer(pair)],
    "tag": lambda pair: pair[0].info.about.tags,
}
