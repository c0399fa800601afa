"""Expert ids read from pages against the same read as lists."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recorder.analysis.id_pages import OtherLayoutError, ids_column, read_ids
from recorder.parts import write_part


def decisions(ids_TK, kind=None):
    """Rows of `decisions` with these experts."""
    rows, k = ids_TK.shape
    kind = kind or pa.list_(pa.from_numpy_dtype(ids_TK.dtype), k)
    keys = {name: np.zeros(rows, dtype=np.int32) for name in ("layer", "router", "token", "rank", "segment")}
    keys |= {"step": np.arange(rows) // 1000, "phase": ["train"] * rows}
    return pa.table({**keys, "experts": pa.array(ids_TK.tolist(), kind)})


def read(path):
    metadata = pq.read_metadata(path)
    schema = metadata.schema.to_arrow_schema()
    column = ids_column(metadata, schema)
    with path.open("rb") as file:
        kind = schema.field("experts").type
        groups = [read_ids(file, metadata, group, column, kind) for group in range(metadata.num_row_groups)]
    return np.concatenate(groups)


@pytest.mark.parametrize(("dtype", "most"), [("int8", 127), ("int16", 300)])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_as_our_writer_lays_them(tmp_path, dtype, most, k):
    # more than a page (1 MB of values) and more than a row group
    ids_TK = np.random.default_rng(0).integers(-1, most, (140_000, k)).astype(dtype)
    write_part(tmp_path / "part.parquet", "decisions", decisions(ids_TK))
    assert pq.read_metadata(tmp_path / "part.parquet").num_row_groups > 1
    found = read(tmp_path / "part.parquet")
    assert found.dtype == dtype
    assert np.array_equal(found, ids_TK)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dictionary": True},
        {"use_dictionary": False},
        {"compression": "snappy"},
        {"data_page_version": "2.0"},
    ],
)
def test_another_writers_pages_are_refused(tmp_path, options):
    ids_TK = np.random.default_rng(0).integers(-1, 64, (1000, 8)).astype(np.int8)
    split = {"use_dictionary": False, "column_encoding": {"experts.list.element": "BYTE_STREAM_SPLIT"}}
    encoded = {"compression": "zstd"} | ({} if "use_dictionary" in options else split) | options
    pq.write_table(decisions(ids_TK).select(["experts"]), tmp_path / "part.parquet", **encoded)
    with pytest.raises(OtherLayoutError):
        read(tmp_path / "part.parquet")


@pytest.mark.parametrize("missing", ["a value", "a list"])
def test_nulls_are_refused(tmp_path, missing):
    lists = [[1, 2], [3, None] if missing == "a value" else None, [5, 6]]
    table = pa.table({"experts": pa.array(lists, pa.list_(pa.int8(), 2))})
    split = {"column_encoding": {"experts.list.element": "BYTE_STREAM_SPLIT"}}
    pq.write_table(table, tmp_path / "part.parquet", compression="zstd", use_dictionary=False, **split)
    with pytest.raises(OtherLayoutError):
        read(tmp_path / "part.parquet")


def test_lists_of_any_length_have_no_such_column(tmp_path):
    pq.write_table(pa.table({"experts": [[1], [2, 3]]}), tmp_path / "part.parquet")
    metadata = pq.read_metadata(tmp_path / "part.parquet")
    assert ids_column(metadata, metadata.schema.to_arrow_schema()) is None
