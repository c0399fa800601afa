"""Figures and tables as files that a person takes away."""

from __future__ import annotations

import io

import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.parquet as pq

from app.export_page import PageFigure, page
from app.figures.theme import Theme


def figure_html(figure: go.Figure, *, name: str, alt: str, theme: Theme) -> bytes:
    """A figure as one page of HTML that opens offline, interactive, in the theme it was drawn in.

    name: the title of the browser's tab. alt: what the figure shows.
    """
    return page(name, [PageFigure(light=figure, alt=alt)], theme=theme).encode()


def table_csv(frame: pd.DataFrame) -> bytes:
    """A table as CSV in UTF-8, no value as an empty field."""
    return frame.to_csv(index=False).encode()


def table_parquet(frame: pd.DataFrame) -> bytes:
    """A table as Parquet, as `of_one_kind`."""
    frame = of_one_kind(frame)
    columns = [pa.array(frame.iloc[:, place], from_pandas=True) for place in range(frame.shape[1])]
    table = pa.Table.from_arrays(columns, names=[str(name) for name in frame.columns])
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def of_one_kind(frame: pd.DataFrame) -> pd.DataFrame:
    """A table whose columns that mix kinds of values (numbers and words) are text, as Arrow has no such columns."""
    frame = frame.copy(deep=False)
    for place in range(frame.shape[1]):
        values = frame.iloc[:, place]
        if values.dtype == object:
            try:
                pa.array(values, from_pandas=True)
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
                texts = [None if pd.api.types.is_scalar(one) and pd.isna(one) else str(one) for one in values]
                frame.isetitem(place, texts)
    return frame
