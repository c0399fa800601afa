"""Figures, tables and reports saved in a real browser, and the files opened."""

import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from PIL import Image
from playwright.sync_api import expect

pytestmark = pytest.mark.browser
SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"
GROUND = {"light": (255, 255, 255), "dark": (20, 23, 26)}


def save(page, button):
    with page.expect_download() as download:
        button.click()
    return download.value.suggested_filename, download.value.path()


def save_figure(page, key, name):
    """Press a button behind a figure's Save, which stays open until it is pressed again."""
    button = page.get_by_role("button", name=name, exact=True)
    if not button.is_visible():
        page.locator(f".st-key-{key}_save button").first.click()
    return save(page, button)


def opened_offline(browser, path, **settings):
    """The file in a window without a network, and what it asked for beside itself."""
    window = browser.new_context(offline=True, **settings)
    page = window.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: asked.append(str(error)))
    page.goto(path.as_uri())
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    outside = [url for url in asked if url != path.as_uri() and not url.startswith(("data:", "blob:"))]
    return window, page, outside


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_a_figure_as_png_svg_and_html(page, dashboard, browser, theme, tmp_path):
    page.emulate_media(color_scheme=theme)
    dashboard.open(page, "overview?run=none")
    expect(page.locator(".st-key-load .js-plotly-plot")).to_be_visible()

    name, path = save_figure(page, "load", "PNG")
    assert name == "none-load.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    image = Image.open(path).convert("RGB")
    shown = page.locator(".st-key-load .js-plotly-plot").bounding_box()
    assert image.height == 2 * round(shown["height"])
    assert image.width >= 2 * round(shown["width"])
    assert image.getpixel((2, image.height - 2)) == GROUND[theme]
    right_edge = np.asarray(image)[:, -8:]  # nothing, the title least of all, is cut off
    assert np.all(right_edge == GROUND[theme])

    name, path = save_figure(page, "load", "SVG")
    assert name == "none-load.svg"
    drawn = ET.parse(path).getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    said = " ".join("".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text"))
    assert "layer 3: 12 of 16 experts idle" in said
    assert "Load over the uniform share" in drawn.find("{http://www.w3.org/2000/svg}title").text

    name, path = save_figure(page, "load", "HTML")
    assert name == "none-load.html"
    kept = tmp_path / name
    kept.write_bytes(path.read_bytes())
    window, other, outside = opened_offline(browser, kept)
    assert outside == []
    expect(other.locator(".gtitle")).to_contain_text("12 of 16 experts idle")
    ground = other.evaluate("getComputedStyle(document.body).backgroundColor")
    assert tuple(map(int, re.findall(r"\d+", ground))) == GROUND[theme]
    window.close()


def test_the_numbers_as_csv_and_parquet(page, dashboard):
    dashboard.open(page, "overview?run=none")
    page.locator("summary", has_text="Numbers").first.click()
    name, path = save(page, page.locator(".st-key-load_numbers_csv button"))
    assert name == "none-load_numbers.csv"
    csv = pd.read_csv(path)
    name, path = save(page, page.locator(".st-key-load_numbers_parquet button"))
    assert name == "none-load_numbers.parquet"
    parquet = pd.read_parquet(io.BytesIO(path.read_bytes()))
    pd.testing.assert_frame_equal(csv, parquet, check_dtype=False)
    recorded = pq.read_table(SAMPLES / "none" / "layer_stats", filters=[("phase", "=", "train"), ("layer", "=", 3)])
    load_SE = np.stack(recorded.to_pandas().sort_values("step")["load"].to_list())
    np.testing.assert_array_equal(parquet[parquet["layer"] == 3].filter(like="expert").to_numpy(), load_SE)


@pytest.mark.slow
def test_the_picture_of_a_replay_is_the_step_shown(page, dashboard):
    dashboard.open(page, "replay?run=none&layer=3&step=57")
    _, first = save_figure(page, "replay_bars", "SVG")
    before = first.read_text()
    page.keyboard.press("Escape")
    page.locator(".st-key-step input[type=range]").press("ArrowRight")
    page.wait_for_url(re.compile("step=58"))
    dashboard.settle(page)
    _, second = save_figure(page, "replay_bars", "SVG")
    assert second.read_text() != before


@pytest.mark.slow
def test_a_report_opens_offline_in_both_themes(browser, tmp_path):
    out = tmp_path / "report.html"
    runs = [str(SAMPLES / name) for name in ("none", "quantile")]
    subprocess.run([sys.executable, "-m", "recorder.cli", "report", *runs, "--out", str(out)], check=True)
    grounds = {}
    for theme, ground in GROUND.items():
        window, page, outside = opened_offline(browser, out, color_scheme=theme)
        assert outside == []
        expect(page.locator("h1")).to_have_text(re.compile("12 of 16 experts sit idle in layer 3"))
        assert page.locator(".js-plotly-plot .gtitle").count() == page.locator("figure").count() == 6
        text = page.locator(".gtitle").first.evaluate("one => getComputedStyle(one).fill")
        grounds[theme] = text
        shown = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert tuple(map(int, re.findall(r"\d+", shown))) == ground
        window.close()
    assert grounds["light"] != grounds["dark"]  # the figures follow too
