"""How every chart is put on a page: width, theme, alternative text, the numbers behind it close by, and as files."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pandas as pd
import streamlit as st

from app import export, export_images, narrow_title, navigation, state
from app.fragments import fragment

_CONFIG = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["toImage", "select2d", "lasso2d", "autoScale2d"],
}
_HANDLED = "_clicks_handled"
_SAVE = ":material/download:"
_NO_NAME = re.compile(r"[^\w.=+-]+")  # letters that a file's name is better without


def theme() -> Literal["light", "dark"]:
    """The theme the browser shows now, for the figure functions."""
    # None before the browser has told, and in tests.
    return "dark" if st.context.theme.type == "dark" else "light"


def show(
    figure: Any,
    *,
    key: str,
    alt: str,
    numbers: Callable[[], pd.DataFrame] | None = None,
    selectable: bool = False,
    saveable: bool = True,
    titled: bool = True,
) -> list[dict[str, Any]]:
    """Draw a plotly figure over the full width, and under it its numbers and itself to take away.

    key         unique on the page and the same from run to run, so that the figure is updated in place
    alt         what the figure shows, for those who cannot see it
    numbers     makes a table with a row for each thing drawn; nothing is offered without it
    selectable  True makes a click run the page (or fragment) again
    saveable    False where the caller offers `save` elsewhere
    titled      False where the caller puts the title as text for narrow screens elsewhere
    Returns the points of a click that has not been returned before, each a dict with "customdata" where the
    figure has it; [] otherwise. Streamlit alone would report it again on every run until the next click.
    """
    points: list[dict[str, Any]] = []
    if titled:
        narrow_title.show(figure, key=key)
    common: dict[str, Any] = {"key": key, "theme": None, "width": "stretch", "config": _CONFIG, "alt": alt}
    if selectable:
        event = st.plotly_chart(figure, on_select="rerun", selection_mode="points", **common)
        selected = [dict(point) for point in event["selection"]["points"]]
        handled = st.session_state.setdefault(_HANDLED, {})
        points = selected if selected != handled.get(key, []) else []
        handled[key] = selected
    else:
        st.plotly_chart(figure, **common)
    if numbers is not None or saveable:
        with st.container(horizontal=True, horizontal_alignment="right", gap="small"):
            if numbers is not None:
                table_to_open(numbers, key=f"{key}_numbers")
            if saveable:
                save(figure, key=key, alt=alt)
    return points


def table_to_open(make: Callable[[], pd.DataFrame], *, key: str, label: str = "Numbers") -> None:
    """Offer a table that is made, and sent, only once somebody opens it: most of what a page weighs otherwise."""
    fragment(_table_to_open)(make, key, label)


def _table_to_open(make: Callable[[], pd.DataFrame], key: str, label: str) -> None:
    with st.expander(label, icon=":material/table:", key=f"{key}_open", on_change="rerun") as expander:
        if expander.open:
            table(make(), key=key)


def save(figure: Any, *, key: str, alt: str, chart: str | None = None) -> None:
    """Offer a figure as PNG, SVG and HTML behind one small button, in the theme that is shown.

    key    the name of the files, unique on the page
    chart  the key of the chart that shows it, where that is another
    """
    now, file = theme(), _file(key)
    with st.popover("Save", icon=_SAVE, type="tertiary", key=f"{key}_save"), st.container(horizontal=True, gap="small"):
        export_images.buttons(chart=chart or key, name=file, alt=alt, theme=now, key=f"{key}_image")
        st.download_button(
            "HTML",
            data=lambda: export.figure_html(figure, name=file, alt=alt, theme=now),
            file_name=f"{file}.html",
            mime="text/html",
            key=f"{key}_html",
            help="One file of about 5 MB that opens without a network, as interactive as here.",
            on_click="ignore",
        )


def _file(key: str) -> str:
    """The name of a saved figure or table: on a page of one run with the run's in front."""
    run = state.current("run") if state.page() in navigation.OF_ONE_RUN else None
    return key if run is None else f"{_NO_NAME.sub('-', run)}-{key}"


def table(frame: pd.DataFrame, *, key: str, columns: dict[str, Any] | None = None) -> None:
    """Draw a table and offer it as CSV and Parquet.

    columns  settings of columns (`st.column_config`), their definitions in the help texts above all
    """
    shown = export.of_one_kind(frame)  # Streamlit does the same after a traceback in the server's log
    st.dataframe(shown, hide_index=True, width="stretch", key=key, column_config=columns, placeholder="-")
    with st.container(horizontal=True, gap="small"):
        save_table(frame, key=key)


def save_table(frame: pd.DataFrame, *, key: str) -> None:
    """Offer a table as CSV and Parquet: a button each. key: the name of the files, unique on the page."""
    formats = (("CSV", export.table_csv, "text/csv"), ("Parquet", export.table_parquet, "application/octet-stream"))
    for name, convert, mime in formats:
        st.download_button(
            f"Save as {name}",
            data=partial(convert, frame),
            file_name=f"{_file(key)}.{name.lower()}",
            mime=mime,
            key=f"{key}_{name.lower()}",
            icon=_SAVE,
            on_click="ignore",
        )
