"""Every page in both themes: it renders without an error, axe-core finds nothing serious, and it fits each width."""

import contextlib
from dataclasses import dataclass

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import TimeoutError, expect

from app.navigation import VIEWS

pytestmark = pytest.mark.browser
ALWAYS = ("overview", "compare")
PAGES = [
    view.name if view.name in ALWAYS else pytest.param(view.name, marks=pytest.mark.slow, id=view.name)
    for view in VIEWS
]
WITHOUT_FIGURES = ("runs", "dispatch", "recording", "glossary")
WIDTHS = (390, 1280, 1920)


@dataclass(frozen=True)
class Theirs:
    """A finding in Streamlit's own elements: the rule, a selector that the element matches, and why it stays."""

    rule: str
    selector: str
    why: str


# Streamlit's own findings, one by one. Empty: Streamlit 1.67 has none on our pages that a setting does not mend.
THEIRS: tuple[Theirs, ...] = ()


def ours(page, violations):
    """Serious and critical findings, one line each, those of THEIRS left out."""
    lines = []
    for violation in violations:
        if violation["impact"] not in ("serious", "critical"):
            continue
        for node in violation["nodes"]:
            element = page.locator(str(node["target"][-1])).first
            known = [one for one in THEIRS if one.rule == violation["id"]]
            if not any(element.evaluate("(e, selector) => e.matches(selector)", one.selector) for one in known):
                lines.append(f"{violation['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:240]}")
    return lines


def check_that_nothing_scrolls_sideways(page, name):
    too_wide = """() => {
        const main = document.querySelector('[data-testid=stMain]');
        return main.scrollWidth - main.clientWidth;
    }"""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("width => document.body.clientWidth <= width", arg=width)
        with contextlib.suppress(TimeoutError):  # figures and tables follow the window a moment later
            page.wait_for_function(f"({too_wide})() <= 0", timeout=15_000)
        assert page.evaluate(too_wide) <= 0, f"{name} is too wide at {width}"


@pytest.mark.parametrize(
    ("run", "scheme"), [("none", "light"), pytest.param("top2-shared", "dark", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", PAGES)
def test_every_page_renders_and_axe_finds_nothing_serious(page, dashboard, name, run, scheme):
    page.emulate_media(color_scheme=scheme)
    dashboard.open(page, f"{name}?run={run}")
    expect(page.locator("h1")).to_have_count(1)
    if name not in WITHOUT_FIGURES:
        expect(page.locator(".js-plotly-plot").first).to_be_visible()
    expect(page.get_by_test_id("stAlert").filter(has_text="error")).to_have_count(0)
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response
    assert ours(page, found["violations"]) == []
    # a figure is one picture to a screen reader: it needs a text in its place
    for figure in page.get_by_test_id("stPlotlyChart").all():
        assert len(figure.get_attribute("aria-label") or "") > 20, "a figure without alternative text"
    if scheme == "light":
        check_that_nothing_scrolls_sideways(page, name)
