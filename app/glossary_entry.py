"""What the glossary says of one word."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A word of the pages or of the JSON reports.

    key      the name in code and in links: /glossary?term=<key>
    name     as pages write it
    meaning  two sentences: what it is, and what it tells
    formula  None for what is not computed. Letters are those of `app.glossary.LETTERS`
    bound    what values it can take, and which is which
    source   where the definition comes from; None where it is ours or everybody's
    example  "what is given: arithmetic = value", the arithmetic with numbers alone
    also     other names of it: of columns, of papers
    see      keys of words close by
    """

    key: str
    name: str
    meaning: str
    formula: str | None = None
    bound: str | None = None
    source: str | None = None
    example: str | None = None
    also: tuple[str, ...] = ()
    see: tuple[str, ...] = ()
