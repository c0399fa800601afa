"""Each word of the pages and of the JSON reports: what it means, its formula and its bound. No Streamlit here.

Pages take their help texts from here, so that a word means the same everywhere; the Glossary page shows all of them.
"""

from app import glossary_of_decisions, glossary_of_loads, glossary_of_routing
from app.glossary_entry import Entry

LETTERS = (
    "T tokens, E experts, k experts each token uses, c assignments per expert, f = c / (T k) their shares, "
    "x router logits, p router probabilities, P their mean over tokens, s scores, b biases, R ranks; "
    "ln is the natural logarithm, with 0 ln 0 = 0"
)
CHAPTERS: dict[str, tuple[Entry, ...]] = {
    "Load and balance": glossary_of_loads.ENTRIES,
    "Routers, balancers and models": glossary_of_routing.ENTRIES,
    "Decisions and runs": glossary_of_decisions.ENTRIES,
}
ENTRIES: dict[str, Entry] = {entry.key: entry for entries in CHAPTERS.values() for entry in entries}

_BY_OTHER_NAME = {
    name.lower(): entry for entry in reversed(ENTRIES.values()) for name in (*entry.also, entry.name, entry.key)
}


def find(word: str) -> Entry | None:
    """The entry of a key, a name or another name of it, in whatever case; None where there is none."""
    return ENTRIES.get(word) or _BY_OTHER_NAME.get(word.strip().lower())


def search(text: str) -> list[Entry]:
    """The entries that have every word of `text` somewhere, best first: the one of that name, those with the words in
    their names, then those that only speak of them. All of them for no text.
    """
    wanted = text.lower().split()
    named = find(text)

    def rank(entry: Entry) -> int | None:
        if entry is named:
            return 0
        names = " ".join((entry.key, entry.name, *entry.also)).lower()
        if all(word in names for word in wanted):
            return 1
        said = " ".join((names, entry.meaning, entry.formula or "", entry.source or "")).lower()
        return 2 if all(word in said for word in wanted) else None

    ranked = [(place, entry) for entry in ENTRIES.values() if (place := rank(entry)) is not None]
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


def explain(key: str, context: str = "") -> str:
    """The help text of a word, in Markdown: its meaning, formula, bound and source, and what `context` adds.

    context  a sentence of the page's own, such as the steps that its number covers
    Raises KeyError where there is no such entry.
    """
    entry = ENTRIES[key]
    parts = [entry.meaning]
    if entry.formula:
        parts.append(f"Formula: `{entry.formula}`.")
    if entry.bound:
        parts.append(f"Values: {entry.bound}.")
    if entry.source:
        parts.append(f"Source: {entry.source}.")
    return " ".join((*parts, context)).strip()
