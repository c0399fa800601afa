"""The load scale and the layout: values against hand-computed ones."""

import itertools
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest

from app.figures import theme
from app.figures.labels import number, plain, si, wrap
from app.figures.sheet import Sheet
from app.figures.token_text import INK, token_ground

CONFIG = Path(__file__).resolve().parents[2] / ".streamlit" / "config.toml"


def test_x10_load_scale_by_hand():
    # loads [40, 20, 20, 0] have ratios [2, 1, 1, 0]
    assert theme.load_z([2.0, 1.0, 1.0, 0.0]).tolist() == [1.0, 0.0, 0.0, theme.IDLE_Z]


@pytest.mark.parametrize(
    ("ratio", "z"),
    [
        (1.0, 0.0),
        (0.5, -1.0),
        (4.0, 2.0),
        (16.0, 4.0),
        (1 / 16, -4.0),
        (16.0 * (1 + 1e-12), 4.0),  # rounding of a quotient is not "beyond"
        (16.1, theme.BEYOND_Z),
        (112.0, theme.BEYOND_Z),
        (0.0624, theme.IDLE_Z),
        (0.0, theme.IDLE_Z),
    ],
)
def test_load_z(ratio, z):
    assert theme.load_z(ratio) == pytest.approx(z)


def test_no_data_idle_and_beyond_are_distinct():
    z = theme.load_z([math.nan, 0.0, 1 / 16, 16.0, 17.0])
    assert math.isnan(z[0])
    assert len(set(z[1:].tolist())) == 4
    colours = theme.load_colours([math.nan, 0.0, 1 / 16, 1.0, 16.0, 17.0])
    assert len(set(colours)) == 6
    assert colours[3] == "#ffffff"
    assert colours[1] == theme.IDLE_COLOUR


def test_negative_load_is_refused():
    with pytest.raises(ValueError, match="negative"):
        theme.load_z([-0.5])


def _colour_at(scale, fraction):
    """Colour of a plotly colorscale: the segment that holds `fraction`, both ends of one colour in a band."""
    for (a, colour_a), (b, colour_b) in itertools.pairwise(scale):
        if a <= fraction <= b and a < b:
            return colour_a, colour_b
    raise AssertionError


def test_colorscale_bands_and_centre():
    scale = theme.load_colorscale()
    low, high = theme.Z_RANGE
    assert scale[0][0] == 0.0
    assert scale[-1][0] == 1.0
    positions = [position for position, _ in scale]
    assert positions == sorted(positions)
    assert _colour_at(scale, (-4.9 - low) / (high - low)) == (theme.IDLE_COLOUR,) * 2
    assert _colour_at(scale, (4.9 - low) / (high - low)) == (theme.BEYOND_COLOUR,) * 2
    assert "#ffffff" in _colour_at(scale, (0 - low) / (high - low))


def test_a5_scale_is_the_same_in_both_themes_and_for_any_bound():
    axes = [theme.load_coloraxis(t, bound=b) for t in ("light", "dark") for b in (None, 4.0, 112.0)]
    assert {(a["cmin"], a["cmax"]) for a in axes} == {(-5.0, 5.0)}
    assert all(a["colorscale"] == axes[0]["colorscale"] for a in axes)


def test_ticks_name_idle_uniform_beyond_and_the_bound():
    values, texts = theme.load_ticks(bound=4.0)
    named = dict(zip(texts, values, strict=True))
    assert named["1 (uniform)"] == 0.0
    assert named["4x (all tokens)"] == 2.0
    assert "4x" not in named
    assert "below 1/16" in named
    assert "beyond 16x" not in named, "all tokens on one expert are 4x"
    assert "beyond 16x" in theme.load_ticks()[1]
    assert dict(zip(*reversed(theme.load_ticks(bound=112.0)), strict=True)).keys() >= {"16x", "beyond 16x"}


def _luminance(colour):
    parts = []
    for value in theme.hex_to_rgb(colour):
        c = value / 255
        parts.append(c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4)
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(a, b):
    """WCAG 2 contrast ratio of two colours."""
    hi, lo = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (hi + 0.05) / (lo + 0.05)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_text_and_special_cells_stand_out(name):
    p = theme.palette(name)
    assert contrast(p.text, p.ground) > 10
    assert contrast(p.muted, p.ground) >= 4.5
    assert contrast(p.text, p.hover) > 10
    assert contrast(p.muted, p.hover) >= 4.5
    assert contrast(theme.IDLE_COLOUR, p.ground) > 2.4
    for i in range(7):
        assert contrast(theme.categorical_colour(i, theme=name), p.ground) >= 3  # lines, not letters


@pytest.mark.parametrize("name", ["light", "dark"])
def test_letters_on_grounds_of_any_colour_read(name):
    ratios = [0, *np.logspace(-4.5, 4.5, 91, base=2), np.nan]
    for ground in theme.load_colours(ratios, theme=name):
        assert contrast(theme.ink_on(ground), ground) >= 4.5, ground
    for colour in theme.OKABE_ITO:
        assert contrast(INK, token_ground(colour, name)) >= 4.5, colour


def test_the_pages_own_colours_read():
    """Of .streamlit/config.toml: captions are 60% of the text, buttons have white letters on the accent colour."""
    for name, colours in tomllib.loads(CONFIG.read_text())["theme"].items():
        if name not in ("light", "dark"):
            continue
        assert contrast("#ffffff", colours["primaryColor"]) >= 4.5, name
        for ground in (colours["backgroundColor"], colours["secondaryBackgroundColor"]):
            assert contrast(theme.mix(colours["textColor"], ground, 0.6), ground) >= 4.5, (name, ground)
        assert colours["backgroundColor"] == theme.palette(name).ground


def test_colours_are_stable_by_order():
    first = theme.colour_map(["none", "aux", "quantile"])
    assert theme.colour_map(["none", "aux"]) == {k: first[k] for k in ("none", "aux")}
    assert len(set(first.values())) == 3
    assert theme.colour_map(["a", "a", "b"]) == theme.colour_map(["a", "b"])
    # the eighth repeats a colour, but not its dash
    assert theme.categorical_colour(7) == theme.categorical_colour(0)
    assert theme.line_dash(7) != theme.line_dash(0)
    with pytest.raises(ValueError, match="-1"):
        theme.categorical_colour(-1)


def test_unknown_theme():
    with pytest.raises(ValueError, match="sepia"):
        theme.palette("sepia")


@pytest.mark.parametrize("words", [1, 12, 60])
def test_long_titles_get_their_room(words):
    title = " ".join(["expert"] * words)
    sheet = Sheet()
    theme.figure_layout(sheet, title=title, note="note " * words, height=300, wrap_at=60)
    fig = sheet.figure()
    text = fig.layout.title.text
    lines = text.count("<br>") + 1
    assert text.count("expert") == words
    assert fig.layout.margin.t >= 18 * lines
    # the plot keeps its height, whatever the title
    assert fig.layout.height - fig.layout.margin.t == 300
    assert fig.layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"


def test_words():
    assert wrap("aa bb cc", 5) == "aa bb<br>cc"
    assert plain("<b>%{x}</b>") == "&lt;b&gt;%&#123;x}&lt;/b&gt;"
    assert [si(v) for v in (950, 12_400, 3_210_000, 671e9)] == ["950", "12.4k", "3.21M", "671B"]
    assert [number(v) for v in (8.0, 1.5, 0.0314, 12_400, math.nan)] == ["8", "1.5", "0.0314", "12,400", "no value"]
    assert np.isfinite(theme.mix("#000000", "#ffffff", 0.5) == "#808080")
