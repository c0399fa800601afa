"""Columns of the reader's frames as Arrow arrays and as Python values, for which pandas takes twenty times as long."""

from typing import Any

import pandas as pd
import pyarrow as pa


def array(column: pd.Series) -> pa.Array:
    """The column as one Arrow array, null where it has no value."""
    found = pa.array(column, from_pandas=True)
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def values(column: pd.Series) -> list[Any]:
    """The column's values as Python's, None where there is none."""
    found: list[Any] = array(column).to_pylist()
    return found
