"""A figure while it is built: plain dicts with the names of plotly, which become a plotly figure at the end.

Plotly's own figure checks and copies every value at every call, which takes most of the time that a page takes: 64
curves 60 ms instead of 9, a grid of 16 panels 66 instead of 1, the JSON of both another 40. Nothing is checked here;
the tests hand every figure to plotly's checks.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

Trace = dict[str, Any]

_ALL = "all"
# numpy's names of the numbers that plotly.js reads as binary
_BINARY = {"i1", "u1", "i2", "u2", "i4", "u4", "f4", "f8"}
_SMALLER = {"i8": ("i1", "i2", "i4"), "u8": ("u1", "u2", "u4")}  # it knows none of 64 bits


def scatter(**settings: Any) -> Trace:
    """A trace of points or lines; what is None is left to plotly."""
    return {"type": "scatter", **settings}


def bar(**settings: Any) -> Trace:
    """A trace of bars."""
    return {"type": "bar", **settings}


def heatmap(**settings: Any) -> Trace:
    """A trace of cells."""
    return {"type": "heatmap", **settings}


class Sheet:
    """The traces and the layout of a figure, in a grid of panels.

    Its methods are those of `plotly.graph_objects.Figure` with fewer forms: a nested property is a nested dict, and
    what is set stands beside what was set before. `row` and `col` count from 1, from the upper left; without them a
    line stands in every panel, and the settings are those of every axis.

    Attributes:
        data: the traces in their order, the first at the back.
        layout: as plotly.js takes it.
    """

    def __init__(
        self,
        *traces: Trace,
        rows: int = 1,
        cols: int = 1,
        shared_xaxes: Literal["columns", "all"] | None = None,
        row_heights: Sequence[float] | None = None,
        vertical_spacing: float = 0.0,
        horizontal_spacing: float = 0.0,
        subplot_titles: Sequence[str] | None = None,
        column_titles: Sequence[str] | None = None,
    ) -> None:
        """Panels side by side and below each other.

        Args:
            shared_xaxes: steps are zoomed together, in a column (named below the lowest panel alone) or in all.
            row_heights: of the rows to each other. vertical_spacing, horizontal_spacing: of the whole, between two.
            subplot_titles: one a panel, row by row. column_titles: one a column.
        """
        self.data: list[Trace] = list(traces)
        self.layout: dict[str, Any] = {}
        self._rows, self._cols = rows, cols
        heights = np.asarray(row_heights if row_heights is not None else [1.0] * rows, dtype=np.float64)
        heights = heights / heights.sum() * (1 - vertical_spacing * (rows - 1))
        width = (1 - horizontal_spacing * (cols - 1)) / cols
        for row, col in self._panels():
            # the lowest panels' axes are those that the others follow
            leader = self._name((rows if shared_xaxes else row), 1 if shared_xaxes == _ALL else col)
            name = self._name(row, col)
            left = (col - 1) * (width + horizontal_spacing)
            top = 1 - float(heights[: row - 1].sum()) - (row - 1) * vertical_spacing
            x_axis: dict[str, Any] = {"anchor": f"y{name}", "domain": [left, left + width]}
            if shared_xaxes and leader != name:
                x_axis["matches"] = f"x{leader}"
                if row < rows:
                    x_axis["showticklabels"] = False
            self.layout[f"xaxis{name}"] = x_axis
            self.layout[f"yaxis{name}"] = {"anchor": f"x{name}", "domain": [max(top - float(heights[row - 1]), 0), top]}
        if rows == cols == 1:  # alone it takes all the room, and may be left without a domain
            self.layout = {"xaxis": {}, "yaxis": {}}
        headings = [(row, col, text) for (row, col), text in zip(self._panels(), subplot_titles or (), strict=False)]
        headings += [(1, col, text) for col, text in enumerate(column_titles or (), 1)]
        for row, col, text in headings:
            if text:
                self._add_heading(text, row, col)

    def _add_heading(self, text: str, row: int, col: int) -> None:
        name = self._name(row, col)
        across = self.layout[f"xaxis{name}"].get("domain", [0.0, 1.0])
        self.layout.setdefault("annotations", []).append(
            {
                "text": text,
                "font": {"size": 16},
                "showarrow": False,
                "x": sum(across) / 2,
                "xanchor": "center",
                "xref": "paper",
                "y": self.layout[f"yaxis{name}"].get("domain", [0.0, 1.0])[1],
                "yanchor": "bottom",
                "yref": "paper",
            }
        )

    def _panels(self, row: int | None = None, col: int | None = None) -> list[tuple[int, int]]:
        rows = range(1, self._rows + 1) if row is None else [row]
        return [(r, c) for r in rows for c in (range(1, self._cols + 1) if col is None else [col])]

    def _name(self, row: int, col: int) -> str:
        """What stands behind "x" and "xaxis" for a panel."""
        number = (row - 1) * self._cols + col
        return "" if number == 1 else str(number)

    def add_trace(self, trace: Trace, *, row: int = 1, col: int = 1) -> None:
        """Draw a trace above those before, in a panel."""
        name = self._name(row, col)
        self.data.append({**trace, "xaxis": f"x{name}", "yaxis": f"y{name}"})

    def add_annotation(self, *, row: int | None = None, col: int | None = None, **settings: Any) -> None:
        """Write a text; `xref` and `yref` "... domain" are of the panel, others its axes."""
        self._place("annotations", settings, row, col)

    def add_hline(self, y: float, *, row: int | None = None, col: int | None = None, **settings: Any) -> None:
        """Draw a line across."""
        ends = {"type": "line", "xref": "x domain", "x0": 0, "x1": 1, "y0": y, "y1": y}
        self._place("shapes", ends | settings, row, col)

    def add_vline(self, x: float, *, row: int | None = None, col: int | None = None, **settings: Any) -> None:
        """Draw a line from top to bottom."""
        ends = {"type": "line", "yref": "y domain", "y0": 0, "y1": 1, "x0": x, "x1": x}
        self._place("shapes", ends | settings, row, col)

    def _place(self, kind: str, settings: dict[str, Any], row: int | None, col: int | None) -> None:
        several = self._rows * self._cols > 1
        for place in self._panels(row, col):
            name = self._name(*place)
            refs = {"xref": settings.get("xref", "x"), "yref": settings.get("yref", "y")}
            if several:
                refs = {key: f"{key[0]}{name}{' domain' * ref.endswith('domain')}" for key, ref in refs.items()}
            self.layout.setdefault(kind, []).append(settings | refs)

    def update_xaxes(self, *, row: int | None = None, col: int | None = None, **settings: Any) -> None:
        """Set properties of the step axes, or of whatever runs to the right."""
        self._update_axes("x", settings, row, col)

    def update_yaxes(self, *, row: int | None = None, col: int | None = None, **settings: Any) -> None:
        """Set properties of the axes that run up."""
        self._update_axes("y", settings, row, col)

    def _update_axes(self, which: str, settings: dict[str, Any], row: int | None, col: int | None) -> None:
        for place in self._panels(row, col):
            _merge(self.layout[f"{which}axis{self._name(*place)}"], settings)

    def update_layout(self, **settings: Any) -> None:
        """Set properties of the layout."""
        _merge(self.layout, settings)

    def figure(self) -> go.Figure:
        """The figure, one of plotly's like any other."""
        data = [{key: value for key, value in trace.items() if value is not None} for trace in self.data]
        return _Figure(data, self.layout)


class _Figure(go.Figure):
    """A plotly figure that becomes one when somebody looks into it: to be drawn it need not."""

    def __init__(self, data: list[Trace], layout: dict[str, Any]) -> None:
        self.__dict__.update(plain=(data, layout), sent=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "plain" not in vars(self):  # of Python's own, or asked while it is copied
            raise AttributeError(name)
        data, layout = self.__dict__.pop("plain")
        super().__init__(data, layout, _validate=False)
        self._validate = True  # from here on it is a person's
        return getattr(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return go.Figure, (self.to_dict(),)  # as a copy it is plotly's

    def to_dict(self) -> dict[str, Any]:
        if "plain" not in vars(self):
            return cast("dict[str, Any]", _sendable({"data": self._data, "layout": self._layout}))
        if self.sent is None:
            data, layout = self.plain
            self.__dict__["sent"] = _sendable({"data": data, "layout": layout})
        return {"data": list(self.sent["data"]), "layout": dict(self.sent["layout"])}


def with_layout(figure: go.Figure, **settings: Any) -> go.Figure:
    """The figure with these properties of its layout beside the others, as in `Sheet.update_layout`."""
    if "plain" not in vars(figure):
        return figure.update_layout(**settings)
    data, layout = vars(figure)["plain"]
    layout = dict(layout)
    _merge(layout, settings)
    return _Figure(data, layout)


def _merge(into: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            into[key] = dict(into[key])
            _merge(into[key], value)
        else:
            into[key] = value


def _sendable(value: Any) -> Any:
    """The same with every array of numbers as plotly.js reads it fastest, without what is None; lists stay."""
    if isinstance(value, dict):
        return {key: _sendable(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, np.ndarray):
        return _binary(value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        return [_sendable(inner) for inner in value]
    return value


def _binary(array: NDArray) -> Any:
    kind = array.dtype.str[1:]
    for smaller in _SMALLER.get(kind, ()):
        if array.size and np.iinfo(smaller).min <= array.min() and array.max() <= np.iinfo(smaller).max:
            array, kind = array.astype(smaller), smaller
            break
    if not array.size or kind not in _BINARY:
        return array.tolist()
    numbers = array.astype(f"<{kind}", copy=False).tobytes()
    sent = {"dtype": kind, "bdata": base64.b64encode(numbers).decode()}
    return sent if array.ndim == 1 else sent | {"shape": ", ".join(map(str, array.shape))}
