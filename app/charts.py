"""How every chart is put on a page: width, theme, alternative text, and the numbers behind it close by."""

from typing import Any, Literal

import pandas as pd
import streamlit as st

_CONFIG = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
}
_HANDLED = "_clicks_handled"


def theme() -> Literal["light", "dark"]:
    """The theme the browser shows now, for the figure functions."""
    # None before the browser has told, and in tests.
    return "dark" if st.context.theme.type == "dark" else "light"


def show(
    figure: Any,
    *,
    key: str,
    alt: str,
    numbers: pd.DataFrame | None = None,
    selectable: bool = False,
) -> list[dict[str, Any]]:
    """Draw a plotly figure over the full width, and under it its numbers as a table to look at or take away.

    key         unique on the page and the same from run to run, so that the figure is updated in place
    alt         what the figure shows, for those who cannot see it
    numbers     a row for each thing drawn; nothing is offered without it
    selectable  True makes a click run the page (or fragment) again
    Returns the points of a click that has not been returned before, each a dict with "customdata" where the
    figure has it; [] otherwise. Streamlit alone would report it again on every run until the next click.
    """
    points: list[dict[str, Any]] = []
    common: dict[str, Any] = {"key": key, "theme": None, "width": "stretch", "config": _CONFIG, "alt": alt}
    if selectable:
        event = st.plotly_chart(figure, on_select="rerun", selection_mode="points", **common)
        selected = [dict(point) for point in event["selection"]["points"]]
        handled = st.session_state.setdefault(_HANDLED, {})
        points = selected if selected != handled.get(key, []) else []
        handled[key] = selected
    else:
        st.plotly_chart(figure, **common)
    if numbers is not None:
        with st.expander("Numbers", icon=":material/table:"):
            table(numbers, key=f"{key}_numbers")
    return points


def table(frame: pd.DataFrame, *, key: str, columns: dict[str, Any] | None = None) -> None:
    """Draw a table and offer it as CSV.

    columns  settings of columns (`st.column_config`), their definitions in the help texts above all
    """
    st.dataframe(frame, hide_index=True, width="stretch", key=key, column_config=columns, placeholder="-")
    st.download_button(
        "Save as CSV",
        data=lambda: frame.to_csv(index=False).encode(),
        file_name=f"{key}.csv",
        mime="text/csv",
        key=f"{key}_csv",
        icon=":material/download:",
        on_click="ignore",
    )
