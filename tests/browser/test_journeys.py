"""What a person sees and clicks, in a real browser on the sample runs and on runs recorded here."""

import re
import shutil
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import expect

from recorder.about import make_about, write_about

SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"
RECORDING_MS = 120_000
pytestmark = pytest.mark.browser


def step_slider(page):
    return page.locator(".st-key-step input[type=range]")


def choose_layer(page, dashboard, layer):
    page.locator(".st-key-layer button", has_text=re.compile(f"^{layer}$")).click()
    dashboard.settle(page)


def chosen(page):
    """Run, layer and step as the page shows them."""
    layer = page.locator(".st-key-layer button[aria-checked=true]").inner_text()
    return layer.strip(), step_slider(page).input_value(), parameters(page)["run"]


def parameters(page):
    query = page.url.partition("?")[2]
    return dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair)


@pytest.mark.slow
def test_a10_run_layer_and_step_survive_a_page_change_and_a_reload(page, dashboard):
    dashboard.open(page, "replay?run=sign-bias&layer=1&step=10")
    choose_layer(page, dashboard, 3)
    slider = step_slider(page)
    slider.focus()
    for _ in range(47):
        slider.press("ArrowRight")
    expect(slider).to_have_value("57")
    dashboard.settle(page)
    page.wait_for_url(re.compile("step=57"))
    assert chosen(page) == ("3", "57", "sign-bias")
    dashboard.go(page, "Compare")
    dashboard.go(page, "Replay")
    assert chosen(page) == ("3", "57", "sign-bias")
    page.reload()
    dashboard.settle(page)
    assert chosen(page) == ("3", "57", "sign-bias")


@pytest.mark.slow
def test_a_link_opened_in_a_fresh_browser_shows_the_same(page, dashboard, browser):
    dashboard.open(page, "replay?run=quantile&layer=3&step=123")
    fresh = browser.new_context()
    other = fresh.new_page()
    other.goto(page.url)
    dashboard.settle(other)
    assert chosen(other) == chosen(page) == ("3", "123", "quantile")
    fresh.close()


@pytest.mark.slow
def test_garbage_in_the_url_falls_back(page, dashboard):
    dashboard.open(page, "replay?run=../../etc/passwd&layer=abc&step=1e9&expert=-5")
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    assert parameters(page)["run"] in ("none", "aux-loss", "sign-bias", "quantile", "top2-shared")


def tick(page, dashboard, *names):
    """Tick runs in the table of the runs page: it is a canvas, with a hidden table of the same rows."""
    table = page.get_by_test_id("stDataFrame").first
    rows = table.locator("canvas tbody tr")
    expect(rows.filter(has_text=names[0]).first).to_be_attached()
    listed = [row.locator("td").first.inner_text() for row in rows.all()]
    area = table.locator("canvas").first.bounding_box()
    height = area["height"] / (len(listed) + 1)
    for name in names:
        y = area["y"] + height * (listed.index(name) + 1.5)
        page.mouse.click(area["x"] + 18, y)
        dashboard.settle(page)


def first_choices(run, step, layer, phase):
    """First choice of every token of a step, in order of sequence and position, from the files."""
    where = [("step", "=", step), ("phase", "=", phase)]
    decisions = pq.read_table(SAMPLES / run / "decisions", filters=[*where, ("layer", "=", layer)]).to_pandas()
    tokens = pq.read_table(SAMPLES / run / "tokens", filters=where).to_pandas()
    joined = tokens.merge(decisions, on=["token", "rank", "segment"]).sort_values(["sequence", "position"])
    return joined.assign(first=[experts[0] for experts in joined["experts"]])


def test_a_collapse_is_followed_from_the_list_of_runs_to_its_tokens(page, dashboard):
    dashboard.open(page, "runs")
    expect(page.locator("h1")).to_contain_text("idle")
    tick(page, dashboard, "No balancer")
    page.locator(".st-key-open_overview button").click()
    page.wait_for_url(re.compile("/overview"))
    dashboard.settle(page)
    collapse = page.get_by_text(re.compile(r"^.*Layer \d+ .*\d+ of \d+ experts")).first
    expect(collapse).to_be_visible()
    page.get_by_role("button", name=re.compile(r"Replay layer \d+ at step")).first.click()
    page.wait_for_url(re.compile("/replay"))
    dashboard.settle(page)
    layer, step = parameters(page)["layer"], int(parameters(page)["step"])
    expect(page.locator("h1")).to_contain_text(f"layer {layer}")
    dashboard.go(page, "Tokens")
    expect(page.locator("span.rs-t").first).to_be_visible()
    shown = parameters(page)
    assert (shown["run"], shown["layer"]) == ("none", layer)
    assert abs(int(shown["step"]) - step) <= 10  # decisions of every tenth step were recorded
    phase = page.locator(".st-key-phase [aria-checked=true]").inner_text().strip()
    expected = first_choices("none", int(shown["step"]), int(layer), phase)
    head = page.locator(".rs-seq .rs-head").first.inner_text()
    sequence = int(re.search(r"sequence (\d+)", head).group(1))
    spans = page.locator(".rs-seq").first.locator("span.rs-t")
    seen = [int(expert) for expert in spans.evaluate_all("spans => spans.map(span => span.dataset.e)")]
    assert seen == expected[expected["sequence"] == sequence]["first"].tolist()[: len(seen)]
    assert len(seen) > 20


def test_two_runs_are_compared_and_the_link_shows_the_same_elsewhere(page, dashboard, browser):
    dashboard.open(page, "runs")
    tick(page, dashboard, "Aux loss", "Quantile")
    page.get_by_role("button", name=re.compile("Compare these 2 runs")).click()
    page.wait_for_url(re.compile("/compare"))
    dashboard.settle(page)
    assert re.findall(r"runs=([\w-]+)", page.url) == ["aux-loss", "quantile"]
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    fresh = browser.new_context(viewport={"width": 1280, "height": 900})
    other = fresh.new_page()
    other.goto(page.url)
    dashboard.settle(other)
    expect(other.locator("h1")).to_have_text(page.locator("h1").inner_text())
    expect(other.locator(".js-plotly-plot")).to_have_count(page.locator(".js-plotly-plot").count())
    assert other.url == page.url
    fresh.close()


@pytest.mark.slow
def test_a_run_is_renamed_stays_the_one_shown_and_is_put_back_after_it_was_deleted(page, dashboard):
    for name in ("none", "quantile"):  # the second is the newer one, which is shown where none is chosen
        shutil.copytree(SAMPLES / name, dashboard.runs / f"own-{name}")
    write_about(dashboard.runs / "own-none", make_about(name="First"))
    write_about(dashboard.runs / "own-quantile", make_about(name="Second"))
    try:
        dashboard.open(page, "runs?run=own-none")
        tick(page, dashboard, "First")
        page.locator(".st-key-panel_edit button").first.click()
        field = page.get_by_label("Name", exact=True).last
        field.fill("Renamed")
        field.press("Tab")
        page.get_by_role("button", name="Save", exact=True).click()
        page.get_by_role("button", name="Save", exact=True).wait_for(state="detached")
        dashboard.settle(page)
        dashboard.go(page, "Overview")
        assert parameters(page)["run"] == "own-none"
        expect(page.get_by_text("not in the folders shown")).to_have_count(0)
        expect(page.locator("h1")).to_contain_text("12 of 16 experts")
        assert (dashboard.runs / "own-none" / "about.json").read_text().count("Renamed") == 1

        dashboard.open(page, "runs?run=own-none")
        tick(page, dashboard, "Renamed")
        page.locator(".st-key-panel_delete button").first.click()
        page.locator(".st-key-delete_now button").click()
        page.locator(".st-key-undo_delete button").wait_for()
        assert not (dashboard.runs / "own-none").exists()
        page.locator(".st-key-undo_delete button").click()
        page.locator(".st-key-undo_delete button").wait_for(state="detached")
        assert (dashboard.runs / "own-none" / "run.json").read_bytes() == (SAMPLES / "none" / "run.json").read_bytes()
    finally:
        for name in ("none", "quantile"):
            shutil.rmtree(dashboard.runs / f"own-{name}", ignore_errors=True)


@pytest.mark.slow
def test_the_keyboard_steps_and_plays_and_typing_does_not(page, dashboard):
    dashboard.open(page, "replay?run=sign-bias&layer=1&step=100")
    slider = step_slider(page)
    page.keyboard.press("ArrowRight")
    expect(slider).to_have_value("101")
    page.keyboard.press("ArrowLeft")
    expect(slider).to_have_value("100")
    dashboard.settle(page)
    page.locator(".st-key-play button").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(slider).not_to_have_value("100")
    # Another layer while it plays: it goes on playing, with the other layer's loads, at the step it was at.
    choose_layer(page, dashboard, "3")
    expect(page.get_by_role("heading", level=1)).to_contain_text("layer 3")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    dashboard.settle(page)
    time.sleep(1.5)  # a frame may have been on its way
    paused = slider.input_value()
    page.locator(".st-key-record_expander summary").first.click()
    field = page.locator(".st-key-record_name input").first
    field.fill("")
    field.press_sequentially("a b")
    field.press("ArrowLeft")
    time.sleep(1)
    assert field.input_value() == "a b"
    assert slider.input_value() == paused
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_a_token_is_followed_from_its_cell_to_its_step_and_back(page, dashboard):
    dashboard.open(page, "tokens?run=none&layer=1&step=399&sequence=5&find=the")
    expect(page.get_by_role("heading", name=re.compile("“the” goes to expert"))).to_be_visible()
    assert page.locator("span.rs-found").count() > 0
    picture = page.locator(".st-key-token_layers .nsewdrag").first
    picture.scroll_into_view_if_needed()
    area = picture.bounding_box()
    # 21 probes in equal columns; the upper of two rows is layer 3
    page.mouse.click(area["x"] + area["width"] * 10.5 / 21, area["y"] + area["height"] * 0.25)
    page.wait_for_url(re.compile("step=200"))
    dashboard.settle(page)
    assert (parameters(page)["layer"], parameters(page)["step"], parameters(page)["find"]) == ("3", "200", "the")
    page.get_by_role("button", name="Replay this step").click()
    page.wait_for_url(re.compile("/replay"))
    dashboard.settle(page)
    assert (parameters(page)["layer"], parameters(page)["step"]) == ("3", "200")
    page.go_back()
    page.wait_for_url(re.compile("/tokens"))
    dashboard.settle(page)
    assert (parameters(page)["layer"], parameters(page)["step"], parameters(page)["find"]) == ("3", "200", "the")
