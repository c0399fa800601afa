"""A page of HTML that needs nothing but itself: plotly.js inside, once, and no request to any host.

Each figure is given in both themes. What differs is kept as a short list, so that the page follows the reader's theme
without a second copy of the numbers, and prints on white.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from app.figures.theme import FONT_FAMILY, PALETTES, Theme

# Nothing is loaded, whatever a run's name holds: only what stands in the page itself, and images that plotly makes.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 FONTS; margin: 0 auto; padding: 2rem 1.5rem 3rem; max-width: 72rem; background: var(--ground);
  color: var(--text); }
body { --ground: LIGHT_GROUND; --text: LIGHT_TEXT; --muted: LIGHT_MUTED; --grid: LIGHT_GRID; }
@media screen and (prefers-color-scheme: dark) {
  :root:not([data-theme=light]) body { --ground: DARK_GROUND; --text: DARK_TEXT; --muted: DARK_MUTED;
    --grid: DARK_GRID; }
}
:root[data-theme=dark] body { --ground: DARK_GROUND; --text: DARK_TEXT; --muted: DARK_MUTED; --grid: DARK_GRID; }
:root[data-theme=light] { color-scheme: light; }
:root[data-theme=dark] { color-scheme: dark; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0; }
.muted, figcaption, .meaning { color: var(--muted); font-size: .9rem; }
figure { margin: 1.4rem 0 0; break-inside: avoid; }
ul { margin: .4rem 0; padding-left: 1.2rem; }
.level { display: inline-block; min-width: 3.2rem; font-size: .85rem; color: var(--muted); }
.alarm .level { color: inherit; font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; margin: .6rem 0; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--grid); text-align: right; vertical-align: top; }
th:first-child, td:first-child, .words { text-align: left; }
.words { min-width: 6rem; }
td.words:last-child { min-width: 16rem; }
th { font-weight: 600; }
@media print {
  body { max-width: none; padding: 0; zoom: 0.65; }
  .modebar { display: none; }
  h2, h3 { break-after: avoid; }
  .wide { overflow: visible; }
}
"""
_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const fixed = document.documentElement.dataset.theme;
const PAPER_WIDTH = 1090;  // the width of A4 at the zoom that the styles give it
let onPaper = false;
function draw(figure) {
  const copy = structuredClone(figure.light);
  const isDark = fixed ? fixed === "dark" : dark.matches && !onPaper;
  for (const [path, value] of isDark ? figure.dark : []) {
    const last = path.at(-1);
    const holder = path.slice(0, -1).reduce((at, name) => at[name], copy);
    if (value === null) delete holder[last]; else holder[last] = value;
  }
  if (onPaper) copy.layout.width = PAPER_WIDTH;
  Plotly.react(figure.id, copy.data, copy.layout, CONFIG);
}
const drawAll = () => figures.forEach(draw);
drawAll();
dark.addEventListener("change", drawAll);
// Before the zoom of the print styles: plotly measures its text on the page.
addEventListener("beforeprint", () => { onPaper = true; drawAll(); });
addEventListener("afterprint", () => { onPaper = false; drawAll(); });
"""


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """A figure of a page, in both themes or in one that stays.

    alt: what it shows, for those who cannot see it. dark: the same figure in dark colours. caption: plain text below.
    """

    light: go.Figure
    alt: str
    dark: go.Figure | None = None
    caption: str = ""


def page(title: str, parts: Sequence[str | PageFigure], *, theme: Theme | None = None) -> str:
    """The page as HTML.

    title: plain text, of the browser's tab. parts: in their order, HTML or figures. theme: the only one; None follows
    the reader's and gives figures in both.
    """
    body: list[str] = []
    figures: list[str] = []
    for part in parts:
        if isinstance(part, str):
            body.append(part)
            continue
        name = f"figure-{len(figures) + 1}"
        height = part.light.layout.height or 420
        caption = f"<figcaption>{html.escape(part.caption)}</figcaption>" if part.caption else ""
        body.append(
            f'<figure aria-label="{html.escape(part.alt)}"><div id="{name}" style="height: {height}px"></div>'
            f"{caption}</figure>"
        )
        figures.append(_figure_json(name, part))
    fixed = "" if theme is None else f' data-theme="{theme}"'
    return (
        f'<!DOCTYPE html>\n<html lang="en"{fixed}>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{get_plotlyjs()}</script>\n<script>\nconst CONFIG = {json.dumps(_CONFIG)};\n"
        f"const figures = [\n{(',' + chr(10)).join(figures)}\n];\n{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _style() -> str:
    css = _STYLE.replace("FONTS", FONT_FAMILY)
    for theme, palette in PALETTES.items():
        for name in ("ground", "text", "muted", "grid"):
            css = css.replace(f"{theme}_{name}".upper(), getattr(palette, name))
    return css


def _figure_json(name: str, part: PageFigure) -> str:
    light = _plain(part.light)
    dark = [] if part.dark is None else list(_differences(light, _plain(part.dark)))
    text = json.dumps({"id": name, "light": light, "dark": dark}, separators=(",", ":"), allow_nan=False)
    return text.replace("</", "<\\/")  # a run's name must not end the script


def _plain(figure: go.Figure) -> dict[str, Any]:
    found = json.loads(plotly.io.to_json(figure, validate=False))
    return {"data": found["data"], "layout": found["layout"]}


def _differences(one: Any, other: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[list[str | int], Any]]:
    """Where `other` differs from `one`: the path to each difference, and what stands there (None: nothing)."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _differences(one.get(key), other.get(key), (*path, key))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from _differences(*pair, (*path, place))
    elif one != other:
        yield list(path), other
