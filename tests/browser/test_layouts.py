"""The Layouts page in a real browser: models side by side, and a design whose numbers follow the editor."""

import json
import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


@pytest.mark.slow
def test_models_side_by_side_and_their_export(page, dashboard):
    dashboard.open(page, "layouts")
    page.locator(".st-key-show button", has_text="Published models").click()
    dashboard.settle(page)
    expect(page.locator("h1")).to_contain_text("27.6% of Mixtral-8x7B")
    expect(page.locator(".js-plotly-plot")).to_have_count(3)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as JSON").click()
    told = json.loads(download.value.path().read_text())
    assert [model["name"] for model in told] == ["Mixtral-8x7B", "DeepSeek-V3"]
    assert told[0]["total_parameters"] == 46_702_792_704


@pytest.mark.slow
def test_a_design_follows_the_editor_and_survives_a_reload(page, dashboard):
    dashboard.open(page, "layouts?show=design&design=tiny")
    expect(page.locator("h1")).to_contain_text("1.01M parameters")
    experts = page.locator(".st-key-design_num_experts input")
    experts.fill("32")
    experts.press("Enter")
    expect(page.locator("h1")).to_contain_text("1.6M parameters")
    page.wait_for_url(re.compile("num_experts"))
    dashboard.settle(page)
    page.reload()
    dashboard.settle(page)
    expect(page.locator("h1")).to_contain_text("1.6M parameters")
    expect(page.locator(".st-key-design_num_experts input")).to_have_value("32")
    dashboard.go(page, "Overview")
    dashboard.go(page, "Layouts")
    expect(page.locator("h1")).to_contain_text("1.6M parameters")
