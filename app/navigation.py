"""The pages: their names, order and icons, and the ways to get from one to another."""

import importlib
from dataclasses import dataclass
from typing import Any, NoReturn

import streamlit as st

from app import state


@dataclass(frozen=True, kw_only=True)
class View:
    """A page: `app/views/<name>.py` with a function `render()`; `name` is its url_path too."""

    name: str
    title: str
    icon: str

    def __call__(self) -> None:
        importlib.import_module(f"app.views.{self.name}").render()


VIEWS = (
    View(name="runs", title="Runs", icon=":material/list:"),
    View(name="overview", title="Overview", icon=":material/monitoring:"),
    View(name="replay", title="Replay", icon=":material/play_circle:"),
    View(name="tokens", title="Tokens", icon=":material/text_fields:"),
    View(name="specialisation", title="Specialisation", icon=":material/category:"),
    View(name="coactivation", title="Co-activation", icon=":material/hub:"),
    View(name="settling", title="Settling", icon=":material/hourglass_bottom:"),
    View(name="placement", title="Placement", icon=":material/dns:"),
    View(name="layouts", title="Layouts", icon=":material/view_column:"),
    View(name="compare", title="Compare", icon=":material/compare_arrows:"),
    View(name="dispatch", title="Dispatch", icon=":material/timer:"),
    View(name="routing_lab", title="Routing lab", icon=":material/science:"),
    View(name="recording", title="Recording", icon=":material/fiber_manual_record:"),
    View(name="glossary", title="Glossary", icon=":material/menu_book:"),
)
# pages that show the run picked in the sidebar
OF_ONE_RUN = ("overview", "replay", "tokens", "specialisation", "coactivation", "settling", "placement", "layouts")


def pages() -> list[Any]:
    """The `st.Page` of every view, in order, and after them one that serves the first view at the root."""
    # No icon here: Streamlit would turn it into a favicon fetched from another host. The links carry it.
    first = VIEWS[0]
    # A default page gives up its own url_path, so the root is a page apart and /runs keeps working.
    return [
        *(st.Page(view, title=view.title, url_path=view.name) for view in VIEWS),
        st.Page(first, title=first.title, url_path="home", default=True, visibility="hidden"),
    ]


def name_of(page: Any) -> str:
    """The name of the view that a page shows."""
    return page.url_path or VIEWS[0].name


def links(pages: list[Any], current: Any) -> None:
    """Draw the menu. Each link carries what is chosen, so that it also opens in a new tab as it is here."""
    for view, page in zip(VIEWS, pages, strict=False):
        target = current if name_of(current) == view.name else page
        st.page_link(target, icon=view.icon, query_params=state.url_parameters())


def go(name: str, **choices: Any) -> NoReturn:
    """Go to the page `name` after choosing, e.g. `go("replay", layer=3, step=57)`. Ends the script's run."""
    state.choose(**choices)
    target = next(page for page in pages() if page.url_path == name)
    state.forget_fragments()
    st.switch_page(target, query_params=state.url_parameters())
