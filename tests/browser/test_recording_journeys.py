"""Recording and measuring from a real browser: started, watched, cancelled, queued, continued, found again."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError, expect

SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"
RECORDING_MS = 120_000
pytestmark = pytest.mark.browser


def parameters(page):
    query = page.url.partition("?")[2]
    return dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair)


def open_form(page, *, details=False):
    form = page.locator(".st-key-record_expander")
    if not page.locator(".st-key-record_steps").is_visible():
        form.locator("summary").first.click()
    if details:
        page.locator(".st-key-record_advanced summary").click()
    return form


def fill(page, **fields):
    for key, value in fields.items():
        field = page.locator(f".st-key-record_{key} input").first
        field.fill(str(value))
        field.press("Tab")


def start_recording(page, **fields):
    open_form(page)
    fill(page, **fields)
    page.locator(".st-key-record_start button").click()
    page.wait_for_url(re.compile("/recording"))


def manifest_of(dashboard, name):
    for path in dashboard.runs.glob("*/run.json"):
        manifest = json.loads(path.read_text())
        if manifest["name"] == name:
            return manifest
    return None


@pytest.mark.slow
def test_a_run_is_recorded_from_the_sidebar_and_opens_when_done(page, dashboard):
    dashboard.open(page, "overview?run=none")
    start_recording(page, steps=40, name="From the sidebar")
    expect(page.get_by_text(re.compile(r"step \d+ of 40")).first).to_be_visible()
    page.wait_for_url(re.compile("/overview"), timeout=RECORDING_MS)
    dashboard.settle(page)
    # the form keeps what was started with, rather than starting something else the next time
    expect(page.locator(".st-key-record_steps input").first).to_have_value("40")
    manifest = manifest_of(dashboard, "From the sidebar")
    assert (manifest["status"], manifest["last_step"]) == ("finished", 39)
    assert parameters(page)["run"] == manifest["run_id"]
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    dashboard.go(page, "Tokens")
    expect(page.locator("span.rs-t").first).to_be_visible()


@pytest.mark.slow
def test_a_recording_survives_a_reload_is_cancelled_and_still_opens(page, dashboard):
    dashboard.open(page, "runs")
    start_recording(page, steps=5000, name="Cut short")
    progress = page.get_by_text(re.compile(r"step [1-9]\d* of 5000")).first
    expect(progress).to_be_visible(timeout=RECORDING_MS)
    page.reload()
    expect(progress).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text(re.compile(r"cancelled after \d+ of 5000 steps"))).to_be_visible()
    manifest = manifest_of(dashboard, "Cut short")
    assert manifest["status"] == "cancelled"
    assert manifest["last_step"] > 0
    page.get_by_role("button", name="Open the run").first.click()
    page.wait_for_url(re.compile("/overview"))
    dashboard.settle(page)
    assert parameters(page)["run"] == manifest["run_id"]
    expect(page.locator(".js-plotly-plot").first).to_be_visible()


def test_a_wrong_value_is_named_and_nothing_starts(page, dashboard):
    dashboard.open(page, "runs")
    before = set(dashboard.runs.iterdir())
    form = open_form(page, details=True)
    fill(page, num_experts=4, top_k=9)
    expect(form.get_by_text("Top-k 9 is more than Experts 4")).to_be_visible()
    page.locator(".st-key-record_start button").click()
    assert set(dashboard.runs.iterdir()) == before


def test_a1_a_click_on_the_heatmap_opens_that_layer_and_expert(page, dashboard):
    dashboard.open(page, "overview?run=none")
    panel = page.locator(".st-key-load .nsewdrag").first
    panel.scroll_into_view_if_needed()
    area = panel.bounding_box()
    page.mouse.click(area["x"] + area["width"] * 0.5, area["y"] + area["height"] * 0.5)
    page.wait_for_url(re.compile("/replay"))
    dashboard.settle(page)
    shown = parameters(page)
    assert shown["layer"] == "1"
    assert 150 <= int(shown["step"]) <= 250
    assert 5 <= int(shown["expert"]) <= 10


@pytest.mark.slow
def test_dispatchers_are_measured_cancelled_and_found_again_after_a_reload(page, dashboard):
    dashboard.open(page, "dispatch?dispatch=64_64_4_2_20000_swiglu_0_1000_1")
    page.locator(".st-key-dispatch_run button").click()
    expect(page.get_by_text(re.compile(r"^(Loading torch|Round \d+ of 1000)"))).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Cancelled; nothing of it is kept.")).to_be_visible()

    page.get_by_role("button", name="Set values").click()
    expect(page.locator(".st-key-dispatch_num_tokens input").first).to_have_value("20000")
    for name, value in {"d_model": 16, "d_ff": 8, "num_tokens": 30, "rounds": 2}.items():
        field = page.locator(f".st-key-dispatch_{name} input").first
        field.fill(str(value))
        field.press("Tab")
        dashboard.settle(page)
    page.keyboard.press("Escape")
    page.wait_for_url(re.compile("dispatch=16_8_4_2_30_swiglu_0_2_1"))
    page.locator(".st-key-dispatch_run button").click()
    answer = page.locator("h1", has_text="fastest here")
    expect(answer).to_be_visible(timeout=RECORDING_MS)
    expect(page.locator(".st-key-dispatch_times .js-plotly-plot")).to_be_visible()
    dashboard.settle(page)
    said = answer.inner_text()
    page.reload()
    dashboard.settle(page)
    assert answer.inner_text() == said
    # elsewhere and back: the choice is kept, as every other one
    dashboard.go(page, "Runs")
    dashboard.go(page, "Dispatch")
    assert answer.inner_text() == said


def choose_in_form(page, key, option):
    field = page.locator(f".st-key-record_{key} input").first
    field.scroll_into_view_if_needed()  # a list that is open closes when its page is scrolled
    for _ in range(5):  # or drawn anew, as after the field before it
        field.click()
        with contextlib.suppress(TimeoutError):
            page.get_by_role("option", name=option).click(timeout=5_000)
            return
    raise AssertionError(f"the list of {key} does not offer {option}")


@pytest.mark.slow
def test_a_preset_fills_the_form_and_leaves_what_it_is_not_about(page, dashboard):
    dashboard.open(page, "runs")
    open_form(page, details=True)
    fill(page, steps=7, num_experts=5)
    choose_in_form(page, "preset", "Latent experts")
    expect(page.locator(".st-key-record_latent_size input").first).to_have_value("32")
    expect(page.locator(".st-key-record_num_experts input").first).to_have_value("16")
    expect(page.locator(".st-key-record_steps input").first).to_have_value("7")
    choose_in_form(page, "preset", "Regression, in seconds")
    expect(page.locator(".st-key-record_num_layers")).to_have_count(0)
    expect(page.locator(".st-key-record_num_experts input").first).to_have_value("8")


@pytest.mark.slow
def test_of_two_recordings_one_waits_and_the_first_is_continued_after_it_was_cancelled(page, dashboard, tmp_path):
    dashboard.open(page, "recording")
    open_form(page)
    choose_in_form(page, "preset", "Regression, in seconds")
    expect(page.get_by_text("56 thousand parameters")).to_be_visible()
    start_recording(page, steps=5000, name="Long one")
    expect(page.get_by_text(re.compile(r"step [1-9]\d* of 5000")).first).to_be_visible(timeout=RECORDING_MS)
    mine = tmp_path / "mine.txt"
    mine.write_text("A text of my own, a few words a line.\n" * 200)
    choose_in_form(page, "preset", "Aux loss")
    expect(page.get_by_text("1.03 million parameters")).to_be_visible()
    page.locator(".st-key-record_text summary").click()
    page.locator(".st-key-record_uploads input[type=file]").set_input_files(mine)
    expect(page.get_by_text("mine.txt").first).to_be_visible()
    start_recording(page, steps=3, name="Next one")
    expect(page.get_by_text("Waiting for their turn", exact=True)).to_be_visible()
    page.reload()
    expect(page.get_by_text("Next one, 3 steps")).to_be_visible()
    page.locator("[class*=st-key-cancel_long-one]").get_by_role("button", name="Cancel").click()
    page.wait_for_url(re.compile("/overview"), timeout=RECORDING_MS)  # the last to end, it opens by itself
    assert "mine" in manifest_of(dashboard, "Next one")["domains"]
    dashboard.go(page, "Recording")
    first = page.locator("[class*=st-key-ended_]").filter(has_text="Long one")
    first.get_by_role("button", name="Continue").click()
    expect(page.locator("h1", has_text="Recording Long one")).to_be_visible(timeout=RECORDING_MS)
    expect(page.get_by_text(re.compile(r"step [1-9]\d* of 5000")).first).to_be_visible(timeout=RECORDING_MS)
    page.locator("[class*=st-key-cancel_long-one]").get_by_role("button", name="Cancel").click()
    expect(first.get_by_text(re.compile(r"cancelled after \d+ of 5000"))).to_be_visible(timeout=RECORDING_MS)
    assert manifest_of(dashboard, "Long one")["segment"] == 1
