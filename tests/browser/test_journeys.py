"""What a person sees and clicks, in a real browser on the sample runs and on runs recorded here."""

import json
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


def test_a_link_opened_in_a_fresh_browser_shows_the_same(page, dashboard, browser):
    dashboard.open(page, "replay?run=quantile&layer=3&step=123")
    fresh = browser.new_context()
    other = fresh.new_page()
    other.goto(page.url)
    dashboard.settle(other)
    assert chosen(other) == chosen(page) == ("3", "123", "quantile")
    fresh.close()


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
    field.click()
    page.get_by_role("option", name=option).click()


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
    expect(page.get_by_text("Waiting for its turn: Next one")).to_be_visible()
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
