"""Expert ids straight from the pages of a part file, in a quarter of the time that rebuilding lists takes.

Arrow reads a column of lists by way of two levels for each value (is it there, does a list begin), which costs far
more than the values themselves. Our writer's lists are all of one length and hold no nulls, and their values lie in
the pages one byte plane after the other. Where a file is not like that, or is damaged, `read_ids` says so and the
caller reads it as lists.

Layout: Parquet format, "Data Pages" and "BYTE_STREAM_SPLIT"; page headers are Thrift's compact protocol.
"""

from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_DATA_PAGE, _BYTE_STREAM_SPLIT = 0, 9
#: Fields of a page header, and of the header of a data page within it.
_TYPE, _WHOLE_SIZE, _STORED_SIZE, _DATA_HEADER = 1, 2, 3, 5
_NUM_VALUES, _ENCODING = 1, 2
_INT32_BYTES = 4


class OtherLayoutError(Exception):
    """The ids do not lie as our writer lays them."""


def ids_column(metadata: pq.FileMetaData, schema: pa.Schema) -> int | None:
    """The number of the column of ids in a file whose ids may be read from its pages; None where they may not."""
    if "experts" not in schema.names:
        return None
    kind = schema.field("experts").type
    if not (pa.types.is_fixed_size_list(kind) and kind.value_type in (pa.int8(), pa.int16())):
        return None
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    number = next((place for place, path in enumerate(paths) if path.split(".")[0] == "experts"), None)
    if number is None or metadata.schema.column(number).max_repetition_level != 1:
        return None
    return number


def read_ids(file: BinaryIO, metadata: pq.FileMetaData, group: int, column: int, kind: pa.DataType) -> np.ndarray:
    """The ids of one row group, (rows, K), int8 or int16 as `kind` says.

    Args:
        file: the part, open for reading.
        metadata: its footer.
        group: which row group.
        column: see `ids_column`.
        kind: the fixed-size list type of the column.

    Raises:
        OtherLayoutError: other pages, a list or value that is null, or damage.
        OSError: the file cannot be read.
    """
    try:
        return _read_ids(file, metadata, group, column, kind)
    except (LookupError, TypeError, ValueError, pa.ArrowException) as error:
        raise OtherLayoutError from error


def _read_ids(file: BinaryIO, metadata: pq.FileMetaData, group: int, column: int, kind: pa.DataType) -> np.ndarray:
    chunk, rows = metadata.row_group(group).column(column), metadata.row_group(group).num_rows
    if chunk.compression != "ZSTD" or chunk.physical_type != "INT32" or chunk.has_dictionary_page:
        raise OtherLayoutError
    file.seek(chunk.data_page_offset)
    stored = file.read(chunk.total_compressed_size)
    ids = np.empty(rows * kind.list_size, dtype=kind.value_type.to_pandas_dtype())
    start = place = 0
    while start < len(stored):
        header, start = _struct(stored, start)
        stop = start + header[_STORED_SIZE]
        if header[_TYPE] != _DATA_PAGE or header[_DATA_HEADER][_ENCODING] != _BYTE_STREAM_SPLIT:
            raise OtherLayoutError
        page = pa.decompress(stored[start:stop], header[_WHOLE_SIZE], "zstd", asbytes=False)
        values = header[_DATA_HEADER][_NUM_VALUES]
        place = _take_planes(np.frombuffer(page, dtype=np.uint8), values, ids, place)
        start = stop
    if place != len(ids):  # a null, or a list that is not of the length
        raise OtherLayoutError
    return ids.reshape(rows, kind.list_size)


def _take_planes(page: np.ndarray, values: int, ids: np.ndarray, place: int) -> int:
    """Put the values of one page in their place, and tell where the next go."""
    data = page
    for _ in range(2):  # levels: how long they are, then they
        size = int(data[:4].view("<u4")[0])
        data = data[4 + size :]
    if len(data) != values * _INT32_BYTES or place + values > len(ids):
        raise OtherLayoutError
    planes = data.reshape(_INT32_BYTES, values)
    width = ids.dtype.itemsize
    ids[place : place + values].view(np.uint8).reshape(values, width)[:] = planes[:width].T
    return place + values


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """A Thrift struct by field number, and where it ends. Only what page headers hold: integers, booleans, structs."""
    fields: dict[int, Any] = {}
    number = 0
    while True:
        head, at = data[at], at + 1
        if head == 0:
            return fields, at
        kind, step = head & 0x0F, head >> 4
        if step:
            number += step
        else:
            number, at = _integer(data, at)
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (4, 5, 6):
            fields[number], at = _integer(data, at)
        elif kind == 8:  # bytes
            length, at = _varint(data, at)
            fields[number], at = data[at : at + length], at + length
        elif kind == 12:
            fields[number], at = _struct(data, at)
        else:
            raise OtherLayoutError


def _integer(data: bytes, at: int) -> tuple[int, int]:
    raw, at = _varint(data, at)
    return (raw >> 1) ^ -(raw & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
