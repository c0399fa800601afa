"""Numbers and lists as pages write them: one way for all of them."""

import math
from collections.abc import Sequence

NONE = "-"  # no value: never a number, and never 0


def value(number: float | int | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, counts in full: "0.0832", "2.95", "1,024"; "-" for None and NaN."""
    if number is None or (isinstance(number, float) and math.isnan(number)):
        return NONE
    if float(number).is_integer() and abs(number) < 1e15:
        return f"{int(number):,}"
    if abs(number) >= 10**digits:
        return f"{number:,.0f}"
    return f"{number:.{digits}g}"


def percent(share: float | None, decimals: int = 0) -> str:
    """A share of 1 in per cent: "51%", "0.4%", "99.7%" (a decimal more near 0 and 1), "<0.1%"; "-" for None and NaN.

    "0%" is none and "100%" is all.
    """
    if share is None or math.isnan(share):
        return NONE
    decimals = max(decimals, 1 if 0 < share < 0.01 or 0.99 < share < 1 else 0)
    smallest = 10.0**-decimals
    if 0 < 100 * share < smallest / 2:
        return f"<{smallest:.{decimals}f}%"
    if share < 1 and 100 * (1 - share) <= smallest / 2:
        return f">{100 - smallest:.{decimals}f}%"
    return f"{100 * share:.{decimals}f}%"


def count(number: int, one: str, many: str | None = None) -> str:
    """A count with its word: "1 expert", "1,024 tokens", "no step" for 0."""
    word = one if number == 1 or number == 0 else (many or f"{one}s")
    return f"{number:,} {word}" if number else f"no {one}"


def size(number: int) -> str:
    """Bytes as a person says them: "0.4 MB", "134 MB", "2.1 GB"."""
    if number < 1e9:
        return f"{number / 1e6:.1f} MB" if number < 1e8 else f"{number / 1e6:,.0f} MB"
    return f"{number / 1e9:,.1f} GB"


def listed(names: Sequence[str], last: str = "and") -> str:
    """Names in a sentence: "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}" if names else ""


def in_phase(layer: int | str, phase: str) -> str:
    """A layer with the phase that a page shows of it, which goes without saying where it is train."""
    return str(layer) if phase == "train" else f"{layer}, phase {phase}"


def step_word(phase: str) -> str:
    """ "training step", or "generate step" and the like for the other phases."""
    return "training step" if phase == "train" else f"{phase} step"
