"""A figure built as plain data is the one that plotly itself would have built."""

import copy
import json
import pickle
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.subplots import make_subplots

from app.figures.sheet import Sheet, scatter


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 9) if isinstance(value, float) else value


def sent(figure: go.Figure) -> dict[str, Any]:
    found = rounded(json.loads(figure.to_json()))
    found["layout"].pop("template", None)
    return found


GRIDS: list[dict[str, Any]] = [
    {"rows": 1, "cols": 3, "shared_xaxes": "all", "horizontal_spacing": 0.08, "subplot_titles": ["a", "", "c"]},
    {"rows": 2, "cols": 2, "shared_xaxes": "all", "vertical_spacing": 0.1, "subplot_titles": list("abcd")},
    {"rows": 3, "cols": 2, "shared_xaxes": "columns", "row_heights": [3, 1, 2], "column_titles": ["u", "v"]},
    {"rows": 2, "cols": 1, "row_heights": [250, 120], "vertical_spacing": 0.05},
]


@pytest.mark.parametrize("grid", GRIDS)
def test_panels_stand_where_plotly_puts_them(grid: dict[str, Any]):
    spacing = {"vertical_spacing": 0.0, "horizontal_spacing": 0.0}
    theirs = make_subplots(**{**spacing, **grid, "shared_xaxes": grid.get("shared_xaxes", False)})
    assert sent(Sheet(**grid).figure()) == sent(theirs)


def test_lines_notes_and_axes_are_those_of_plotly():
    sheet, theirs = Sheet(rows=2, cols=2), make_subplots(2, 2, vertical_spacing=0, horizontal_spacing=0)
    points = {"x": np.arange(3), "y": np.array([1.5, np.nan, 2.5]), "customdata": np.arange(6).reshape(3, 2)}
    for row, col in ((1, 1), (1, 2), (2, 1), (2, 2)):  # plotly draws no line for all panels into an empty one
        sheet.add_trace(scatter(**points, text=None), row=row, col=col)
        theirs.add_trace(go.Scatter(**points), row=row, col=col)
    note: dict[str, Any] = {"text": "here", "x": 1, "y": 2, "showarrow": False}
    for figure in (sheet, theirs):
        figure.add_hline(y=0.5, line={"dash": "dot"}, row=2, col=1)
        figure.add_annotation(xref="x domain", **note, row=1, col=2)
        figure.add_annotation(**note, row=2, col=2)
        figure.update_yaxes(range=[0, 1], row=1)
        figure.update_yaxes(type="log", row=2, col=1)
        figure.update_xaxes(showgrid=False, title={"text": "step"})
        figure.update_xaxes(title={"standoff": 3}, col=2)
        figure.update_layout(legend={"x": 0}, margin={"l": 3})
        figure.update_layout(legend={"y": 1}, hovermode="closest")
    assert sent(sheet.figure()) == sent(theirs)
    sheet.add_vline(x=1)
    theirs.add_vline(x=1)  # both in every panel
    ours, expected = (sent(figure)["layout"]["shapes"] for figure in (sheet.figure(), theirs))
    assert sorted(ours, key=lambda one: one["xref"]) == sorted(expected, key=lambda one: one["xref"])


@pytest.mark.parametrize(
    "values",
    [
        np.array([1, 200, 3]),
        np.array([[1, -40_000], [3, 4]]),
        np.array([2**40]),
        np.array([3, 2**35], dtype=np.uint64),
        np.array([0.1, np.inf, np.nan], dtype=np.float32),
        np.array([True, False]),
        np.array(["a", "b"], dtype=object),
        np.array([[1, None]], dtype=object),
        np.zeros((0, 3)),
        np.arange(12.0).reshape(3, 4).T,
        np.arange(10)[::2],
    ],
)
def test_arrays_reach_the_browser_as_plotly_sends_them(values: np.ndarray):
    ours = json.loads(Sheet(scatter(customdata=values, y=[0])).figure().to_json())
    theirs = json.loads(go.Figure(go.Scatter(customdata=values, y=[0])).to_json())
    assert ours["data"] == theirs["data"]


def test_what_is_none_is_left_out_and_nothing_is_shared():
    line = {"color": None, "width": 2}
    sheet = Sheet(scatter(x=[None, 1], line=line, name=None))
    sheet.update_layout(legend={"font": {"size": 1}})
    one = sheet.figure()
    one.update_layout(legend={"font": {"size": 9}})
    (trace,) = json.loads(one.to_json())["data"]
    assert trace == {"type": "scatter", "x": [None, 1], "line": {"width": 2}}
    assert line == {"color": None, "width": 2}
    assert json.loads(one.to_json())["layout"]["legend"] == {"font": {"size": 9}}


def test_for_a_person_it_is_a_figure_of_plotly():
    sheet = Sheet(scatter(x=np.arange(3), y=[1, 2, 3]))
    sheet.update_layout(height=300)
    for copied in (
        copy.deepcopy(sheet.figure()),
        pickle.loads(pickle.dumps(sheet.figure())),
        go.Figure(sheet.figure()),
    ):
        assert (type(copied), copied.layout.height) == (go.Figure, 300)
        assert sent(copied)["data"] == sent(sheet.figure())["data"]
    figure = sheet.figure()
    figure.to_dict()["layout"]["height"] = 1
    assert figure.layout.height == 300
    figure.update_layout(height=200)
    assert figure.to_dict()["layout"]["height"] == 200
    with pytest.raises(ValueError, match="no_such_property"):
        figure.update_layout(no_such_property=1)
