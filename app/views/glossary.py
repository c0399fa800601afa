"""The words of all pages: what each means, its formula, bound and source."""

from collections.abc import Sequence

import streamlit as st

from app import glossary, state
from app.glossary_entry import Entry
from app.text import plain
from app.words import count

MAX_NEIGHBOURS = 12  # more entries than this are a list to read: no buttons to words close by

_READABLE = 860  # pixels: lines of more letters are hard to follow on a wide screen


def render() -> None:
    """Draw the page."""
    head = st.container()
    text = _search_box()
    found = glossary.search(text)
    head.title(_title(text, found))
    head.caption(f"Letters: {glossary.LETTERS}.")
    if not found:
        st.info("No entry has all of these words. Try one word alone, or a part of it.")
    if text.strip():
        _entries(found)
        return
    for chapter, entries in glossary.CHAPTERS.items():
        st.header(chapter, anchor=False)
        _entries(entries)


def _search_box() -> str:
    text = state.wanted("term") or ""
    if st.session_state.get("term") != text:
        st.session_state["term"] = text
    state.show("term", text)
    return st.text_input(
        "Find a word",
        key="term",
        placeholder="entropy, max_violation, dropped ...",
        on_change=_store,
        width=420,
    )


def _store() -> None:
    state.choose(term=st.session_state["term"].strip() or None)


def _title(text: str, found: Sequence[Entry]) -> str:
    if not text.strip():
        return f"{count(len(glossary.ENTRIES), 'word')}: what each means, how it is computed, and what it can be"
    named = glossary.find(text)
    if named is not None:
        return named.name
    return f"{count(len(found), 'entry', 'entries').capitalize()} with {plain(text.strip()[:60])}"


def _entries(entries: Sequence[Entry]) -> None:
    for entry in entries:
        with st.container(gap="small", key=f"word_{entry.key}", width=_READABLE):
            st.subheader(entry.name, anchor=entry.key)
            st.markdown("  \n".join(_lines(entry)))
            if len(entries) <= MAX_NEIGHBOURS and entry.see:
                _neighbours(entry)


def _lines(entry: Entry) -> list[str]:
    lines = [entry.meaning]
    if entry.formula:
        lines.append(f"**Formula:** `{entry.formula}`")
    if entry.bound:
        lines.append(f"**Values:** {plain(entry.bound)}")
    if entry.example:
        given, _, worked = entry.example.rpartition(": ")
        lines.append(f"**Example:** {plain(given)}: `{worked}`")
    if entry.source:
        lines.append(f"**Source:** {plain(entry.source)}")
    other = [f"`{name}`" for name in (entry.key, *entry.also) if name.lower() != entry.name.lower()]
    if other:
        lines.append(f"**Also written:** {', '.join(other)}")
    return lines


def _neighbours(entry: Entry) -> None:
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown("**See also:**", width="content")
        for key in entry.see:
            st.button(
                glossary.ENTRIES[key].name,
                key=f"see_{entry.key}_{key}",
                type="tertiary",
                on_click=state.choose,
                kwargs={"term": key},
            )
