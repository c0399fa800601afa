"""What only a browser shows of pages that move: quick presses, a change of theme, figures on a narrow screen."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser
COUNTED = "() => document.querySelector('.st-key-presses [data-testid=stBidiComponentIsolated]')?.shadowRoot.counted"


def count_titles(page):
    page.evaluate(
        """() => {
          window.titles = new Set();
          const look = () => window.titles.add(document.querySelector("h1")?.innerText);
          new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
        }"""
    )


def test_ten_quick_presses_are_ten_steps_in_a_few_redraws(page, dashboard):
    dashboard.open(page, "replay?run=sign-bias&layer=1&step=100")
    page.wait_for_function(COUNTED)
    title = page.get_by_role("heading", level=1)
    count_titles(page)
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    expect(title).to_contain_text("Step 110,")
    page.wait_for_url(re.compile("step=110"))
    shown = {text for text in page.evaluate("() => [...window.titles]") if text and "Step 1" in text}
    assert len(shown) <= 5, shown
    page.evaluate("() => { for (let i = 0; i < 4; i++) document.querySelector('.st-key-step_back button').click() }")
    expect(title).to_contain_text("Step 106,")
    # Play, pause, play: the last of them counts, whatever was drawn in between.
    for _ in range(3):
        page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Play")).to_be_visible()


@pytest.mark.slow
def test_figures_follow_the_theme_and_the_width_of_the_browser(page, dashboard):
    def letters(colour):
        page.wait_for_function(
            f"() => document.querySelector('.js-plotly-plot')?._fullLayout?.font.color === '{colour}'"
        )

    page.emulate_media(color_scheme="light")
    dashboard.open(page, "replay?run=none&layer=1&step=100")
    letters("#13171b")
    text, drawn = page.locator(".rs-narrow-title").first, page.locator(".st-key-replay_strip .gtitle")
    expect(drawn).to_be_visible()
    expect(text).to_be_hidden()
    page.emulate_media(color_scheme="dark")
    letters("#f0f2f5")
    page.set_viewport_size({"width": 390, "height": 844})
    expect(text).to_contain_text("The whole run in layer 1; the line marks the step shown")
    expect(drawn).to_be_hidden()
    box = text.bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
    page.emulate_media(color_scheme="light")
    letters("#13171b")
