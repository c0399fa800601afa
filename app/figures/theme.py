"""Colours, the load scale and the common layout of every figure: the one place where they are decided.

Load is drawn as load over the uniform share, on a log2 scale that is the same in every view, in both themes and
over a whole run: white at 1, blue below, red above, ends at 1/16 and 16. Three things are outside the scale and
have colours of their own: idle (below 1/16, or no assignment at all), beyond 16, and no data.

Streamlit's own plotly theme would replace these colours: show the figures with `st.plotly_chart(fig, theme=None)`
and pass `theme` ("light" or "dark") to the functions that build them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

from app.figures.labels import number, wrap
from app.figures.sheet import Sheet

Theme = Literal["light", "dark"]

FONT_FAMILY = '"Source Sans", "Source Sans 3", "Source Sans Pro", "Segoe UI", "DejaVu Sans", sans-serif'
MONO_FAMILY = '"Source Code Pro", "DejaVu Sans Mono", Consolas, monospace'


@dataclass(frozen=True, kw_only=True)
class Palette:
    """Colours of one theme that carry no data: text, lines, grounds. CSS colours."""

    text: str
    muted: str
    grid: str
    ground: str  # the page behind the transparent figure
    no_data: str  # a cell without a value
    block: str  # things drawn without a value: dense layers, experts without load, weights of a shared part
    block_line: str
    hover: str


PALETTES: Mapping[Theme, Palette] = {
    "light": Palette(
        text="#13171b",
        muted="#57606a",
        grid="#e2e5e9",
        ground="#ffffff",
        no_data="#c9ced5",
        block="#b4bdc8",
        block_line="#6b7682",
        hover="#ffffff",
    ),
    "dark": Palette(
        text="#f0f2f5",
        muted="#a9b1bd",
        grid="#2c323d",
        ground="#14171a",
        no_data="#464c57",
        block="#5b6674",
        block_line="#98a2b0",
        hover="#1b2029",
    ),
}

# Okabe and Ito, "Color Universal Design" (2008), in an order that keeps neighbours apart on both grounds. Their
# black is left out: it vanishes on a dark page.
OKABE_ITO: tuple[str, ...] = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#F0E442")
# Places of hues that a thin line does not tell apart at a glance: orange and vermilion, orange and yellow, the blues.
ALIKE: tuple[set[int], ...] = ({0, 4}, {0, 6}, {1, 5})
# The same hues as lines and letters: yellow is too pale for a thin line on white, dark blue too dark on black.
_LINE_COLOURS: Mapping[Theme, tuple[str, ...]] = {
    "light": ("#C98300", "#3A9BD9", "#009E73", "#C2609A", "#D55E00", "#0072B2", "#A09200"),
    "dark": ("#E69F00", "#56B4E9", "#1FBF92", "#DB93B9", "#F0762B", "#3D9BDB", "#F0E442"),
}
_DASHES: tuple[str, ...] = ("solid", "dash", "dot", "dashdot")


def palette(theme: Theme) -> Palette:
    """The palette of a theme. Raises ValueError for any other name."""
    if theme not in PALETTES:
        raise ValueError(f"theme must be 'light' or 'dark', got {theme!r}")
    return PALETTES[theme]


def categorical_colour(index: int, *, theme: Theme = "light", fill: bool = False) -> str:
    """Colour of the run, domain or expert that stands at `index` (0, 1, ...) in a fixed order.

    Colour-blind-safe (Okabe-Ito); from the eighth on the colours repeat, so use `line_dash` beside it.
    `fill=True` gives the plain Okabe-Ito colour for areas, otherwise the shade that reads as a line on the theme.
    """
    palette(theme)
    if index < 0:
        raise ValueError(f"index must be at least 0, got {index}")
    colours = OKABE_ITO if fill else _LINE_COLOURS[theme]
    return colours[index % len(colours)]


def line_dash(index: int) -> str:
    """Dash pattern that tells apart the entries whose categorical colours repeat (0-6 solid, 7-13 dashed ...)."""
    return _DASHES[(index // len(OKABE_ITO)) % len(_DASHES)]


def colour_map(names: Sequence[str], *, theme: Theme = "light", fill: bool = False) -> dict[str, str]:
    """Colours of runs or domains by their place in `names`: pass the same order everywhere to keep them."""
    unique = list(dict.fromkeys(names))
    return {name: categorical_colour(i, theme=theme, fill=fill) for i, name in enumerate(unique)}


#: Gate weights: the least of them still stands out from the ground, on which there is no weight at all.
INTENSITY: dict[Theme, list[list[float | str]]] = {
    "light": [[0.0, "#dcefe7"], [0.5, "#58ab8c"], [1.0, "#00432f"]],
    "dark": [[0.0, "#1c3a31"], [0.5, "#2f9673"], [1.0, "#b9f5dd"]],
}
#: Shares, in the same hue, from 0, which is almost the ground.
SHARE_SCALE: dict[Theme, list[list[float | str]]] = {
    "light": [[0.0, "#f2f8f5"], [0.5, "#58ab8c"], [1.0, "#00432f"]],
    "dark": [[0.0, "#16211d"], [0.5, "#2f9673"], [1.0, "#b9f5dd"]],
}

# ---------------------------------------------------------------------------------------------- the load scale

LOAD_FLOOR = 1 / 16
LOAD_CEILING = 16.0
# Positions on the scale, in log2 units. Idle and beyond lie one unit past the ends, in bands of their own.
IDLE_Z = -5.0
BEYOND_Z = 5.0
Z_RANGE = (-5.0, 5.0)

IDLE_COLOUR = "#7b3fb0"
BEYOND_COLOUR = "#4a0010"
# log2(load / uniform share) -> colour. The blue end stays lighter than the idle purple, so that the two differ in
# lightness too: purple and blue look alike to a red-blind reader.
_LOAD_STOPS: tuple[tuple[float, str], ...] = (
    (-4.0, "#3b8bc4"),
    (-3.0, "#6aaad5"),
    (-2.0, "#9dc8e3"),
    (-1.0, "#cfe3f0"),
    (0.0, "#ffffff"),
    (1.0, "#fbd3bf"),
    (2.0, "#f29b75"),
    (3.0, "#d95847"),
    (4.0, "#ab1226"),
)
_BAND = 4.5  # idle fills -5 .. -4.5 of the axis, beyond fills 4.5 .. 5
_TICKS: tuple[tuple[float, str], ...] = (
    (-4.0, "1/16"),
    (-3.0, "1/8"),
    (-2.0, "1/4"),
    (-1.0, "1/2"),
    (0.0, "1 (uniform)"),
    (1.0, "2x"),
    (2.0, "4x"),
    (3.0, "8x"),
    (4.0, "16x"),
)


def load_z(ratio: ArrayLike) -> NDArray[np.float64]:
    """Place of load / uniform share on the load scale.

    ratio: any shape, load over the uniform share (`moe_core.metrics.load_ratio`), NaN where there is no data.
    Returns the same shape: log2(ratio) within [-4, 4], IDLE_Z below 1/16 (zero included), BEYOND_Z above 16, NaN
    where there is no data. Raises ValueError for a negative ratio.
    """
    r = np.asarray(ratio, dtype=np.float64)
    if np.any(r < 0):
        raise ValueError(f"a load cannot be negative, got ratio {np.nanmin(r)}")
    # A ratio is a quotient of counts: leave rounding in the last bits on the inner side of both ends.
    slack = 1e-9
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.clip(np.log2(r), -4.0, 4.0)
        z = np.where(r < LOAD_FLOOR * (1 - slack), IDLE_Z, z)
        z = np.where(r > LOAD_CEILING * (1 + slack), BEYOND_Z, z)
    return np.where(np.isnan(r), np.nan, z)


def load_colorscale() -> list[list[float | str]]:
    """The load scale as a plotly colorscale over Z_RANGE."""
    low, high = Z_RANGE

    def at(z: float) -> float:
        return (z - low) / (high - low)

    scale: list[list[float | str]] = [[0.0, IDLE_COLOUR], [at(-_BAND), IDLE_COLOUR]]
    scale.append([at(-_BAND), _LOAD_STOPS[0][1]])
    scale.extend([at(z), colour] for z, colour in _LOAD_STOPS)
    scale.append([at(_BAND), _LOAD_STOPS[-1][1]])
    scale.extend([[at(_BAND), BEYOND_COLOUR], [1.0, BEYOND_COLOUR]])
    return scale


def load_colours(ratio: ArrayLike, *, theme: Theme = "light") -> list[str]:
    """CSS colours on the load scale for a flat sequence of load / uniform share (NaN: the no-data grey)."""
    stops_z = np.array([z for z, _ in _LOAD_STOPS])
    stops_rgb = np.array([hex_to_rgb(colour) for _, colour in _LOAD_STOPS], dtype=np.float64)
    z_N = load_z(ratio).ravel()
    rgb_N3 = np.stack([np.interp(z_N, stops_z, stops_rgb[:, channel]) for channel in range(3)], axis=1)
    others = {IDLE_Z: IDLE_COLOUR, BEYOND_Z: BEYOND_COLOUR}
    return [
        palette(theme).no_data if z != z else others.get(z) or "#{:02x}{:02x}{:02x}".format(*map(round, rgb))
        for z, rgb in zip(z_N.tolist(), rgb_N3.tolist(), strict=True)
    ]


def load_ticks(bound: float | None = None) -> tuple[list[float], list[str]]:
    """Tick positions and labels of the load scale's colour bar.

    bound: the largest possible load / uniform share, E / k; its tick then says that all tokens are there, and nothing
    is said of loads beyond the scale where there can be none.
    """
    ticks = dict(_TICKS) | {-4.78: "below 1/16", 4.78: "beyond 16x"}
    if bound is not None and 1 < bound <= LOAD_CEILING:
        z = float(np.log2(bound))
        near = [t for t in ticks if abs(t - z) < 0.35]
        for t in near:
            del ticks[t]
        ticks[z] = f"{number(bound)}x (all tokens)"
        ticks.pop(4.78, None)
    positions = sorted(ticks)
    return positions, [ticks[z] for z in positions]


def load_coloraxis(theme: Theme, *, bound: float | None = None, length: int = 330) -> dict[str, Any]:
    """The `layout.coloraxis` of every load picture: fixed ends, whatever the data.

    bound: E / k where all panels have the same. length: pixels of the bar with its title; below about 200 the labels
    would run into each other.
    """
    values, texts = load_ticks(bound)
    p = palette(theme)
    return {
        "cmin": Z_RANGE[0],
        "cmax": Z_RANGE[1],
        "colorscale": load_colorscale(),
        "colorbar": {
            "title": {"text": "load /<br>uniform share", "side": "top", "font": {"size": 13, "color": p.text}},
            "tickmode": "array",
            "tickvals": values,
            "ticktext": texts,
            "tickfont": {"size": 12, "color": p.text},
            "thickness": 14,
            "lenmode": "pixels",
            "len": length,
            "y": 1,
            "yanchor": "top",
            "ypad": 0,
            "outlinewidth": 0,
            "ticks": "outside",
            "ticklen": 4,
            "tickcolor": p.muted,
            "x": 1.02,
            "xpad": 6,
        },
    }


# ---------------------------------------------------------------------------------------------- mixing


def hex_to_rgb(colour: str) -> tuple[int, int, int]:
    """(red, green, blue), 0 to 255, of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


@lru_cache(maxsize=4096)
def ink_on(ground: str) -> str:
    """Letters for a ground "#rrggbb": black or white, whichever stands out more, so at least 4.58 to 1 on any."""
    shares = np.array(hex_to_rgb(ground)) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))
    # where the contrasts (1 + 0.05) / (L + 0.05) and (L + 0.05) / (0 + 0.05) are equal
    return "#000000" if luminance > 1.05**0.5 * 0.05**0.5 - 0.05 else "#ffffff"


def mix(colour: str, ground: str, share: float) -> str:
    """`share` of `colour` over `1 - share` of `ground`, both "#rrggbb"."""
    pairs = zip(hex_to_rgb(colour), hex_to_rgb(ground), strict=True)
    return "#" + "".join(f"{round(share * c + (1 - share) * g):02x}" for c, g in pairs)


# ---------------------------------------------------------------------------------------------- layout

TITLE_SIZE = 18
_TITLE_LINE = 24  # pixels
_NOTE_LINE = 18
_NOTE = '<br><span style="'


def figure_layout(
    fig: Sheet,
    *,
    title: str,
    theme: Theme = "light",
    note: str | None = None,
    height: int = 420,
    x_title: str | None = None,
    y_title: str | None = None,
    legend: bool = True,
    wrap_at: int = 88,
    right: int = 20,
    bottom: int = 56,
    left: int = 64,
    head: int = 12,
) -> None:
    """Give a figure the house layout, in place.

    title: the answer in words; broken into lines of `wrap_at` characters, and room is made for each line.
    note: a smaller line under the title, for what is drawn and how (pooled, smoothed, down-sampled).
    height: pixels of the plot and its bottom margin; the title's room comes on top, so panels keep their size.
    head: pixels between the title and the panels, for panel headings. right, bottom, left: margins in pixels.
    """
    p = palette(theme)
    title_text = wrap(title, wrap_at) if title else ""
    note_text = wrap(note, round(wrap_at * 1.6)) if note else ""
    top = 14 + head + _title_room(title_text, note_text)
    legend_room = _legend_height(fig, wrap_at) if legend else 0
    top += legend_room
    total = height + top
    text = f"<b>{title_text}</b>" if title_text else ""
    if note_text:
        # Not plotly's own subtitle: its distance ignores how many lines the title has.
        text += f'{_NOTE}font-size:13px;color:{p.muted};font-weight:normal">{note_text}</span>'
    # plotly places the top of a single line, but the baseline of the first of several lines, at y.
    from_top = 8 + (round(0.7 * TITLE_SIZE) if "<br>" in text else 0)
    # What is the same in every figure is its template's.
    fig.update_layout(
        template=_template(theme),
        title={"text": text, "y": 1 - from_top / total},
        height=total,
        margin={"l": left, "r": right, "t": top, "b": bottom, "pad": 0},
        showlegend=legend,
        legend={"y": 1 - (top - legend_room - head - 4) / total},
    )
    if x_title is not None:
        fig.update_xaxes(title={"text": x_title})
    if y_title is not None:
        fig.update_yaxes(title={"text": y_title})


def _title_room(title: str, note: str) -> int:
    """Pixels that a title and its note take, broken into lines."""
    room = _TITLE_LINE * (title.count("<br>") + 1) if title else 0
    return room + (4 + _NOTE_LINE * (note.count("<br>") + 1) if note else 0)


def title_parts(fig: go.Figure) -> tuple[str, str, int]:
    """Title and note of a figure with the house layout, each as one line of HTML, and the pixels they take in it."""
    text = fig.to_dict()["layout"].get("title", {}).get("text", "")  # `fig.layout` would have plotly make all of it
    title, _, note = text.removeprefix("<b>").partition(_NOTE)
    title, note = title.removesuffix("</b>"), note.partition(">")[2].removesuffix("</span>")
    return title.replace("<br>", " "), note.replace("<br>", " "), _title_room(title, note)


def _legend_height(fig: Sheet, wrap_at: int) -> int:
    """Pixels that the legend above the panels takes, from the length of its entries: it wraps by itself."""
    names = {str(trace["name"]) for trace in fig.data if trace.get("showlegend") is not False and trace.get("name")}
    longest = max((len(name) for name in names), default=0)
    a_row = max(1, wrap_at * 10 // (56 + 8 * longest))  # plotly gives every entry the width of the longest
    return 2 + 29 * max(1, -(-len(names) // a_row))


def undimmed(text_colour: str, opacity: float = 1.0) -> dict[str, Any]:
    """Settings of a scatter trace that keep it as it is while points are selected: plotly fades the rest."""
    return {
        # A colour for selected text alone: without one plotly fades the text that is not selected.
        "selected": {"marker": {"opacity": opacity}, "textfont": {"color": text_colour}},
        "unselected": {"marker": {"opacity": opacity}},
    }


@cache
def _template(theme: Theme) -> dict[str, Any]:
    """What every figure of a theme shares: letters, grounds, axes, and where title and legend stand."""
    p = palette(theme)

    def letters(size: int) -> dict[str, Any]:
        return {"family": FONT_FAMILY, "size": size, "color": p.text}

    axis = {
        "gridcolor": p.grid,
        "zeroline": False,
        "linecolor": p.muted,
        "tickcolor": p.muted,
        "tickfont": {"size": 12, "color": p.text},
        "title": {"font": {"size": 14, "color": p.text}, "standoff": 8},
    }
    at_the_left = {"x": 0, "xanchor": "left", "yref": "container", "yanchor": "top"}
    return {
        "layout": {
            "title": {**at_the_left, "xref": "container", "pad": {"l": 8}, "font": letters(TITLE_SIZE)},
            "font": letters(14),
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hoverlabel": {
                "bgcolor": p.hover,
                "bordercolor": p.muted,
                "align": "left",
                "font": letters(13),
                "namelength": -1,
            },
            "legend": {
                **at_the_left,
                "orientation": "h",
                "font": {"size": 13, "color": p.text},
                "bgcolor": "rgba(0,0,0,0)",
            },
            "xaxis": axis,
            "yaxis": axis,
        }
    }
