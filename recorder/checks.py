"""What callers give, checked: a ValueError in one line that names the value and what is allowed."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

_INT64_MAX = 2**63 - 1
_SHOWN = 200


def whole(name: str, value: Any, *, least: int = 0, most: int = _INT64_MAX) -> int:
    """`value` as an int. Of numpy's types too; True, 4.0 and arrays are no whole numbers here."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {shown(value)}")
    if int(value) > most:
        raise ValueError(f"{name} must be a whole number, at most {most}, got {shown(value)}")
    return int(value)


def number(name: str, value: Any, *, least: float = 0.0, above: bool = False, finite: bool = False) -> float:
    """`value` as a float, at least `least` (above: not equal to it either); infinite only where `finite` is off."""
    good = isinstance(value, Real) and not isinstance(value, bool)
    good = good and (value > least if above else value >= least) and not (finite and value == math.inf)
    if not good:
        kind = "a finite number" if finite else "a number"
        raise ValueError(f"{name} must be {kind}, {'above' if above else 'at least'} {least:g}, got {shown(value)}")
    return float(value)


def names(name: str, values: Any) -> list[str]:
    """`values` as a list of str; a str alone would pass for a list of its letters."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
    if listed is None or not all(isinstance(one, str) for one in listed):
        raise ValueError(f"{name} must be a list of names, got {shown(values)}")
    return listed


def shown(value: Any, form: Any = repr) -> str:
    """`value` in a line that is not too long, whatever it is."""
    try:
        text = " ".join(form(value).split())
    except Exception:  # an int of 5000 digits, a class of the caller's
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def encodable(text: str) -> str:
    """`text` with a question mark for what UTF-8 has no form of: half a surrogate pair, of a foreign decoder."""
    return text.encode("utf-8", "replace").decode("utf-8")
