"""Numbers that come from outside: checked once, with one wording."""

from __future__ import annotations

import operator
from typing import Any


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value as an int.

    Raises ValueError that names it and what is allowed: no whole number (a text, a fraction, True), or out of range.
    """
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name}={said(value)} must be a whole number, {allowed}")
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name}={said(number)} must be {allowed}")
    return number


def said(value: Any) -> str:
    """A value as an error names it: in one short line, however long or deep it is."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:  # thousands of digits cannot even be written out
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
