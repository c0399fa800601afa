"""The Routing lab in a real browser: numbers typed into the table, and what survives a reload."""

import contextlib
import re

import pytest
from playwright.sync_api import TimeoutError, expect

FIRST_MS = 180_000  # the first visit loads torch, which a busy machine takes its time for
pytestmark = pytest.mark.browser


def cell(page, row, column):
    """The middle of a cell of the table of logits, counted from 0; column 0 is the first expert's."""
    found = page.locator("[class*=st-key-lab_table] canvas").first
    found.scroll_into_view_if_needed()
    box = found.bounding_box()
    columns, rows = 6, 9  # the token's number, a check mark and 4 experts; a head and 8 tokens
    return box["x"] + box["width"] * (column + 2.5) / columns, box["y"] + box["height"] * (row + 1.5) / rows


def type_into(page, dashboard, row, column, text):
    field = page.locator("#portal textarea")
    for opens in ("", "Enter") * 4:  # a click opens a cell that is selected already, and selects another
        if opens:
            page.keyboard.press(opens)
        else:
            page.mouse.click(*cell(page, row, column))
        with contextlib.suppress(TimeoutError):
            field.wait_for(timeout=2500)  # letters typed before the cell is open would be lost
            break
    field.fill(text)
    page.keyboard.press("Enter")
    dashboard.settle(page)


@pytest.mark.slow
def test_numbers_typed_into_the_table_move_the_page_and_stay_in_the_link(page, dashboard):
    page.goto(f"{dashboard.url}/routing_lab")
    title = page.locator("h1")
    expect(title).to_contain_text("Expert 2 takes 6 of 8 tokens", timeout=FIRST_MS)
    dashboard.settle(page)
    type_into(page, dashboard, 0, 2, "-1")
    expect(title).to_contain_text("Expert 2 takes 5 of 8 tokens")
    type_into(page, dashboard, 4, 2, "nan")
    expect(title).to_contain_text("Expert 2 takes 4 of 7 tokens")
    page.wait_for_url(re.compile(r"logits%3A0\.4_0\.1_-1_0\.3~.*0\.3_1_nan_0\.6"))
    page.reload()
    dashboard.settle(page)
    expect(title).to_contain_text("Expert 2 takes 4 of 7 tokens")
    page.get_by_role("button", name="Apply the update").click()
    expect(page.get_by_text("1 update applied so far.")).to_be_visible()
    page.get_by_role("link", name="Runs", exact=True).click()
    page.wait_for_url(re.compile("/runs"))
    dashboard.settle(page)
    page.get_by_role("link", name="Routing lab", exact=True).click()
    page.wait_for_url(re.compile("/routing_lab"))
    expect(page.get_by_text("1 update applied so far.")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(title).to_contain_text("Expert 2 takes 4 of 7 tokens")
