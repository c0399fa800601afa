"""The report of the runs on a page, as a download."""

from collections.abc import Sequence

import streamlit as st

from recorder.reader import Run


def report_button(runs: Sequence[Run], *, key: str = "report") -> None:
    """Draw a button that saves what `routescope report` writes of these runs; it is made once it is clicked."""
    st.download_button(
        "Report",
        data=lambda: _report(runs),
        file_name="report.html",
        mime="text/html",
        key=key,
        icon=":material/summarize:",
        help="One HTML file of 5 to 10 MB with diagnosis, metrics and figures. It opens without a network; a large run "
        "takes some seconds.",
        on_click="ignore",
    )


def _report(runs: Sequence[Run]) -> bytes:
    from app.report.contents import report_html  # not above: its words are those of the views that draw this button

    return report_html(runs).encode()
