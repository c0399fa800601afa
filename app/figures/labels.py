"""Words and numbers as the figures write them."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

import numpy as np


def plain(text: object) -> str:
    """Text that plotly shows as it is: no markup and no hover template field of a run's name gets through."""
    return html.escape(str(text), quote=False).replace("%{", "%&#123;")


def number(value: float) -> str:
    """A number short enough for a label: 8, 1.5, 0.031, 12,400; "no value" for NaN."""
    if not np.isfinite(value):
        return "no value" if np.isnan(value) else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def si(value: float) -> str:
    """A count with a unit prefix: 950, 12.4k, 3.21M, 671B."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.0f}"


def wrap(text: str, width: int) -> str:
    """Escaped text broken into lines of at most `width` characters, joined by <br>."""
    lines = textwrap.wrap(text, width=width, break_long_words=True) or [""]
    return "<br>".join(plain(line) for line in lines)


def category_ticks(labels: Sequence[str], most: int) -> list[str]:
    """At most about `most` of the labels, evenly spaced from the first, for an axis that cannot show all."""
    every = next_step(len(labels) / max(most, 1))
    return list(labels[::every])


def next_step(at_least: float) -> int:
    """The smallest of 1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128 (or a multiple of 100) that suffices."""
    for step in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128):
        if step >= at_least:
            return step
    return int(np.ceil(at_least / 100) * 100)
