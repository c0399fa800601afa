"""The text itself: tokens on grounds coloured by their expert, as one HTML string.

Shape legend: T tokens shown, K top-k. Text is untrusted: whatever comes out of a token is escaped.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from app.figures.theme import OKABE_ITO, Theme, mix, palette

MAX_TOKENS = 2048
#: How white space is shown in a token's text.
MARKS = {"\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Tokens of one step and layer with where they went, in the order of the text.

    text_T: strings, None where no text was recorded. sequence_T, position_T: int. domain_T: strings or None, or None
    as a whole. experts_TK: int ids, best first, -1 = no choice. weights_TK: gate values.
    kept_TK: False where capacity dropped the assignment, or None. token_id_T: shown in place of a missing text.
    Raises ValueError where lengths differ.
    """

    text_T: Sequence[str | None]
    sequence_T: NDArray[np.int64]
    position_T: NDArray[np.int64]
    experts_TK: NDArray[np.int64]
    weights_TK: NDArray[np.float32]
    domain_T: Sequence[str | None] | None = None
    kept_TK: NDArray[np.bool_] | None = None
    token_id_T: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        experts = np.asarray(self.experts_TK)
        weights = np.asarray(self.weights_TK)
        if experts.ndim != 2 or weights.shape != experts.shape:
            raise ValueError(f"experts_TK {experts.shape} and weights_TK {weights.shape} must both be (tokens, k)")
        if self.kept_TK is not None and np.shape(self.kept_TK) != experts.shape:
            raise ValueError(f"kept_TK has shape {np.shape(self.kept_TK)}, experts_TK {experts.shape}")
        for name in ("text_T", "sequence_T", "position_T", "domain_T", "token_id_T"):
            values = getattr(self, name)
            if values is not None and len(values) != len(experts):
                raise ValueError(f"{name} has {len(values)} entries for {len(experts)} tokens")

    def __len__(self) -> int:
        return len(np.asarray(self.experts_TK))

    def visible(self, index: int) -> str:
        """The token's text with its white space made visible, or its id where there is no text; not escaped."""
        text = self.text_T[index]
        if _missing(text):
            token_id = None if self.token_id_T is None else self.token_id_T[index]
            return "[no text]" if _missing(token_id) else f"[id {int(token_id)}]"  # type: ignore[arg-type]
        return visible_text(str(text))

    def domain(self, index: int) -> str | None:
        value = None if self.domain_T is None else self.domain_T[index]
        return None if _missing(value) else str(value)

    def kept(self, index: int, slot: int) -> bool:
        return True if self.kept_TK is None else bool(self.kept_TK[index][slot])


def _missing(value: Any) -> bool:
    """True for None, NaN and pandas' NA: what a nullable column gives where there is no value."""
    return not isinstance(value, str) and bool(pd.isna(value))


@lru_cache(maxsize=4096)  # texts repeat
def visible_text(text: str) -> str:
    """Make white space and control characters of a token visible.

    Line feeds become ⏎, tabs ⇥; a single leading space stays a space (words read as words), every other space
    becomes a middle dot. Invisible and direction-changing characters are written as their code point, so that no text
    can disguise itself. The result is not escaped for HTML.
    """
    if text == "":
        return "∅"
    shown = []
    for i, char in enumerate(text):
        if char == " ":
            lone_lead = i == 0 and len(text) > 1 and not text[1].isspace()
            between = 0 < i < len(text) - 1 and not text[i - 1].isspace() and not text[i + 1].isspace()
            shown.append(" " if lone_lead or between else "·")
        elif char in MARKS:
            shown.append(MARKS[char])
        elif unicodedata.category(char) in _INVISIBLE:
            shown.append(f"⟨U+{ord(char):04X}⟩")
        else:
            shown.append(char)
    return "".join(shown)


def busiest_experts(experts_TK: ArrayLike, count: int = len(OKABE_ITO)) -> list[tuple[int, float]]:
    """The most used experts of these decisions with their shares of all assignments (0..1), busiest first.

    experts_TK: int ids, -1 = no choice (not counted). Ties go to the lower id.
    """
    ids = np.asarray(experts_TK).ravel()
    ids = ids[ids >= 0]
    experts, counts = np.unique(ids, return_counts=True)
    order = sorted(range(len(experts)), key=lambda i: (-counts[i], experts[i]))[:count]
    return [(int(experts[i]), float(counts[i] / len(ids))) for i in order]


def token_html(
    rows: TokenRows,
    *,
    title: str,
    theme: Theme = "light",
    highlight: Sequence[int] | None = None,
    colour_experts: Sequence[int] | None = None,
    numbers: int = 2,
    max_tokens: int = MAX_TOKENS,
    legend: bool = True,
    found_T: ArrayLike | None = None,
) -> str:
    """Sequences as HTML: each token on the ground of its expert, the expert's number small beside it.

    rows: the tokens to show; sequences stand in the order they first come.
    highlight: colour only tokens that went to one of these experts (their strongest such choice decides); None
    colours by first choice. colour_experts: experts in the order of their colours, at most seven have one; by
    default the busiest of what is shown. Pass the same list for every step and layer switch to keep colours.
    numbers: how many of a token's experts are written beside it. max_tokens: the rest is left out, and said so.
    legend: False where the page has a legend of its own, for instance over more tokens than are shown.
    found_T: bool, tokens that get a frame, for instance those searched for.
    Every token carries what hover shows (its text, position, domain, experts with weights) in `title`.
    """
    p = palette(theme)
    total = len(rows)
    count = min(total, max_tokens)
    experts_TK = np.asarray(rows.experts_TK)[:count]
    shares = dict(busiest_experts(experts_TK, count=max(experts_TK.max(initial=0) + 1, 1)))
    if colour_experts is None:
        colour_experts = highlight if highlight else [e for e, _ in busiest_experts(experts_TK)]
    colours = {int(e): OKABE_ITO[i] for i, e in enumerate(list(dict.fromkeys(colour_experts))[: len(OKABE_ITO)])}
    chosen = None if highlight is None else {int(e) for e in highlight}
    if chosen is not None:
        # An expert that is asked for is always shown, with a colour of its own while there are any.
        spare = [c for c in OKABE_ITO if c not in {colours[e] for e in chosen if e in colours}]
        for expert in sorted(chosen - colours.keys()):
            colours[expert] = spare.pop(0) if spare else p.block
        colours = {e: c for e, c in colours.items() if e in chosen}

    weights_TK = np.asarray(rows.weights_TK)[:count]
    kept_TK = np.ones(experts_TK.shape, bool) if rows.kept_TK is None else np.asarray(rows.kept_TK)[:count]
    choices = [
        [choice for choice in zip(*of_token, strict=True) if choice[0] >= 0]
        for of_token in zip(experts_TK.tolist(), weights_TK.tolist(), kept_TK.tolist(), strict=True)
    ]
    framed = set() if found_T is None else set(np.flatnonzero(np.asarray(found_T)[:count]).tolist())
    blocks: list[str] = []
    for sequence in dict.fromkeys(np.asarray(rows.sequence_T)[:count].tolist()):
        members = np.flatnonzero(np.asarray(rows.sequence_T)[:count] == sequence)
        domain = rows.domain(int(members[0]))
        heading = f"{html.escape(domain)} · " if domain else ""
        tokens = "".join(
            _token(rows, i, choices[i], colours, chosen, theme, numbers, i in framed) for i in members.tolist()
        )
        blocks.append(
            f'<div class="rs-seq"><div class="rs-head">{heading}sequence {sequence}</div>'
            f'<div class="rs-text">{tokens}</div></div>'
        )
    left_out = f'<p class="rs-note">Shown: the first {count:,} of {total:,} tokens.</p>' if total > count else ""
    body = "".join(blocks) or '<p class="rs-note">No tokens to show.</p>'
    chips = _legend(colours, shares, theme) if legend else ""
    return (
        f'{_style(theme)}<div class="rs-tokens rs-{theme}"><h4>{html.escape(title)}</h4>{chips}{body}{left_out}</div>'
    )


def _token(
    rows: TokenRows,
    index: int,
    choices: Sequence[tuple[int, float, bool]],
    colours: Mapping[int, str],
    chosen: set[int] | None,
    theme: Theme,
    numbers: int,
    framed: bool,
) -> str:
    """One token. choices: its experts with their weights, best first, and whether each was kept."""
    owner = next((expert for expert, *_ in choices if chosen is None or expert in chosen), None)
    colour = colours.get(owner) if owner is not None else None
    style = f' style="background:{token_ground(colour, theme)};color:{INK}"' if colour else ""
    classes = ("rs-t" if choices else "rs-t rs-none") + (" rs-found" if framed else "")
    label = ",".join(str(expert) if kept else f"<s>{expert}</s>" for expert, _, kept in choices[:numbers])
    if len(choices) > numbers > 0:
        label += "…"
    if not choices:
        label = "–"
    small = f"<sub>{label}</sub>" if numbers > 0 or not choices else ""
    used = " ".join(str(expert) for expert, *_ in choices)
    shown = rows.visible(index)
    tip = html.escape(_tip(rows, index, shown, choices), quote=True).replace("\n", "&#10;")
    text = html.escape(shown)
    return f'<span class="{classes}" data-e="{used}" title="{tip}"{style}>{text}{small}</span>'


def _tip(rows: TokenRows, index: int, shown: str, choices: Sequence[tuple[int, float, bool]]) -> str:
    lines = [
        f"token “{shown}”",
        f"sequence {int(rows.sequence_T[index])}, position {int(rows.position_T[index])}",
    ]
    domain = rows.domain(index)
    if domain:
        lines.append(f"domain {visible_text(domain)}")
    for expert, weight, kept in choices:
        lines.append(f"expert {expert}: weight {weight:.4f}{'' if kept else ', dropped by capacity'}")
    if not choices:
        lines.append("no route: this token reached no expert")
    return "\n".join(lines)


INK = "#14181d"  # text on a coloured ground, in both themes


@cache
def token_ground(colour: str, theme: Theme) -> str:
    """The ground of a token: pale enough for dark text on it, dimmed a little on a dark page so as not to glare.

    Deep grounds with light text were tried for the dark theme: orange, yellow and vermilion all turn brown there.
    """
    pale = mix(colour, "#ffffff", 0.62)
    return pale if theme == "light" else mix(pale, palette(theme).ground, 0.82)


def _legend(colours: Mapping[int, str], shares: Mapping[int, float], theme: Theme) -> str:
    if not colours:
        return ""
    chips = "".join(
        f'<span class="rs-chip" data-e="{expert}" style="background:{token_ground(colour, theme)};color:{INK}">'
        f"expert {expert} · "
        f"{100 * shares.get(expert, 0.0):.0f}%</span>"
        for expert, colour in sorted(colours.items(), key=lambda item: (-shares.get(item[0], 0.0), item[0]))
    )
    rest = 1 - sum(shares.get(e, 0.0) for e in colours)
    others = f'<span class="rs-rest">other experts · {100 * rest:.0f}%</span>' if rest > 0.005 else ""
    # Pointing at an entry of the legend dims the tokens of all other experts.
    rules = "".join(
        f'.rs-tokens:has(.rs-chip[data-e="{e}"]:hover) .rs-t:not([data-e~="{e}"]){{opacity:.22}}' for e in colours
    )
    return f'<style>{rules}</style><div class="rs-legend">{chips}{others}</div>'


def _style(theme: Theme) -> str:
    p = palette(theme)
    return (
        "<style>"
        f".rs-{theme}{{color:{p.text};font-size:14px;line-height:1.4}}"
        f".rs-{theme} h4{{margin:0 0 .5rem;font-size:18px;font-weight:700;padding:0;color:{p.text}}}"
        ".rs-legend{display:flex;flex-wrap:wrap;gap:6px;align-items:center;margin-bottom:.6rem}"
        ".rs-chip{padding:2px 8px;border-radius:4px;cursor:default}"
        f".rs-{theme} .rs-rest,.rs-{theme} .rs-head,.rs-{theme} .rs-note{{color:{p.muted}}}"
        ".rs-head{font-size:13px;margin:.7rem 0 .15rem}"
        ".rs-text{font-family:'Source Code Pro','DejaVu Sans Mono',Consolas,monospace;font-size:15px;line-height:1.75}"
        ".rs-t{display:inline-block;white-space:pre-wrap;overflow-wrap:anywhere;border-radius:3px;line-height:1.4;"
        "margin:2px 1px 2px 0;padding:0 1px;cursor:help;transition:opacity .1s}"
        f".rs-{theme} .rs-t:hover{{outline:2px solid {p.text};outline-offset:0}}"
        f".rs-{theme} .rs-t sub{{font-size:11px;line-height:0;vertical-align:-2px;bottom:0;color:inherit;"
        "margin-left:1px}"
        f".rs-{theme} .rs-none{{outline:1px dashed {p.muted};outline-offset:-1px}}"
        f".rs-{theme} .rs-found{{outline:2.5px solid {p.text};outline-offset:0}}"
        ".rs-t s{text-decoration-thickness:2px}"
        "</style>"
    )
