"""The tables of a page, those that it makes only when they are opened among them."""

import pandas as pd
from streamlit.testing.v1 import AppTest


def tables(test: AppTest) -> list[pd.DataFrame]:
    """All of them in their order, after a redraw with every one open."""
    expanders = [block.proto for block in test.get("expander")]
    closed = [one.id.rsplit("-", 1)[-1] for one in expanders if one.id.endswith("_open") and not one.expanded]
    for key in closed:
        test.session_state[key] = True
    if closed:
        test.run()
        assert not test.exception, test.exception
    return [element.value for element in test.dataframe]
