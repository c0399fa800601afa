"""Files that a person takes away: tables read back, pages that need nothing but themselves."""

import io
import json
import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pyarrow.parquet as pq
import pytest
from opened import tables
from streamlit.testing.v1 import AppTest

from app import export
from app.export_page import PageFigure, page
from app.figures.inputs import LoadSeries
from app.figures.load_heatmap import load_heatmap


@pytest.fixture
def frame():
    return pd.DataFrame(
        {
            "step": np.arange(3),
            "loss": pd.array([1.5, None, 0.25], dtype="Float64"),
            "experts": pd.array([None, 4, 5], dtype="Int64"),
            "run": ["a, b", "prose", None],
            "value": [1, "none", None],  # numbers and words in one column
        }
    )


def test_csv_reads_back(frame):
    read = pd.read_csv(io.BytesIO(export.table_csv(frame)))
    assert read["step"].tolist() == [0, 1, 2]
    assert read["run"].tolist()[:2] == ["a, b", "prose"]
    assert read["loss"].isna().tolist() == [False, True, False]


def test_parquet_keeps_types_and_nulls(frame):
    table = pq.read_table(io.BytesIO(export.table_parquet(frame)))
    assert table.column_names == list(frame.columns)
    assert [str(field.type) for field in table.schema][:3] == ["int64", "double", "int64"]
    assert table["loss"].to_pylist() == [1.5, None, 0.25]
    assert table["experts"].to_pylist() == [None, 4, 5]
    assert table["run"].to_pylist() == ["a, b", "prose", None]
    assert table["value"].to_pylist() == ["1", "none", None]


def test_parquet_of_a_table_without_rows_and_of_columns_that_share_a_name():
    assert pq.read_table(io.BytesIO(export.table_parquet(pd.DataFrame({"step": []})))).num_rows == 0
    twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
    assert pq.ParquetFile(io.BytesIO(export.table_parquet(twice))).metadata.num_columns == 2


def heatmap(theme):
    load_SE = np.arange(40).reshape(10, 4)
    series = LoadSeries(
        run="a </script><script>alert(1)</script>", layer=1, steps_S=np.arange(10), load_SE=load_SE, top_k=1
    )
    return load_heatmap([series], title="Two experts take all </title>", theme=theme)


def figures_of(text):
    """The figures that a page holds, as its script reads them."""
    found = re.search(r"const figures = (\[\n.*?\n\]);\n", text, flags=re.DOTALL)
    return json.loads(found[1])


def test_html_needs_nothing_but_itself():
    text = export.figure_html(heatmap("dark"), name="load", alt="Load of a & b", theme="dark").decode()
    outside = text.replace(re.search(r"<script>/\*\*.*?</script>", text, flags=re.DOTALL)[0], "")  # all but plotly.js
    assert not re.search(r"\b(src|href)=|@import|url\(|https?://", outside)
    assert "default-src 'none'" in text
    assert 'data-theme="dark"' in text
    assert 'aria-label="Load of a &amp; b"' in text
    assert outside.count("</script>") == 1  # what a run is called does not end the script
    assert len(text) < 6_000_000


def test_dark_is_the_light_figure_with_its_differences():
    light, dark = heatmap("light"), heatmap("dark")
    [figure] = figures_of(page("a", [PageFigure(light=light, dark=dark, alt="a")]))
    for path, value in figure["dark"]:
        holder = figure["light"]
        for name in path[:-1]:
            holder = holder[name]
        if value is None:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value
    wanted = json.loads(dark.to_json())
    assert figure["light"] == {"data": wanted["data"], "layout": wanted["layout"]}
    assert figure["light"]["layout"]["plot_bgcolor"] != json.loads(light.to_json())["layout"]["plot_bgcolor"]


def test_plotly_is_in_a_page_once():
    figure = PageFigure(light=go.Figure(), alt="a")
    assert page("a", [figure, "<p>words</p>", figure]).count("plotly.js v") == 1


def test_a_figure_and_its_table_are_offered_in_every_format():
    def script():
        import pandas as pd
        import plotly.graph_objects as go

        from app import charts

        charts.show(go.Figure(), key="load", alt="Load", numbers=lambda: pd.DataFrame({"step": [1]}))
        charts.show(go.Figure(), key="bare", alt="Nothing to count")

    test = AppTest.from_function(script, default_timeout=60).run()
    assert not test.exception
    figures = {"load_html": "HTML", "bare_html": "HTML"}
    assert {button.key: button.label for button in test.get("download_button")} == figures
    assert not test.dataframe  # a table is made when it is opened
    (numbers,) = tables(test)
    assert numbers.to_dict("list") == {"step": [1]}
    assert {button.key: button.label for button in test.get("download_button")} == figures | {
        "load_numbers_csv": "Save as CSV",
        "load_numbers_parquet": "Save as Parquet",
    }
