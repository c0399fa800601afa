"""The run format, version 1: tables, Arrow types, and how types of different part files become one.

Shapes: E experts, K top-k, T tokens, N rows.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

FORMAT_VERSION = 1
PHASES = ("train", "probe", "eval", "generate")
TABLES = ("steps", "layer_stats", "decisions", "tokens", "events")

MANTISSA_BITS = 10
_DROPPED_BITS = 23 - MANTISSA_BITS  # float32 has 23 explicit mantissa bits

_LIST_F32 = pa.list_(pa.float32())
_LIST_I64 = pa.list_(pa.int64())
_WHERE = [("rank", pa.int32()), ("segment", pa.int32())]

#: Every table's columns in order, `rank` and `segment` last. The list columns of `decisions` are written with
#: a fixed length where K is the same for all rows of a part, and `experts` in the narrowest type of `id_type`.
SCHEMAS: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "steps": pa.schema(
            [
                ("step", pa.int64()),
                ("phase", pa.string()),
                ("tokens", pa.int64()),
                ("wall_time_s", pa.float64()),
                ("loss", pa.float64()),
                ("ce_loss", pa.float64()),
                ("aux_loss", pa.float64()),
                ("z_loss", pa.float64()),
                ("grad_norm", pa.float64()),
                ("learning_rate", pa.float64()),
                *_WHERE,
            ]
        ),
        "layer_stats": pa.schema(
            [
                ("step", pa.int64()),
                ("phase", pa.string()),
                ("layer", pa.int32()),
                ("router", pa.int32()),
                ("tokens", pa.int64()),
                ("load", _LIST_I64),
                ("gate_mass", _LIST_F32),
                ("mean_prob", _LIST_F32),
                ("expert_bias", _LIST_F32),
                ("rerouted", pa.int64()),
                ("dropped", _LIST_I64),
                ("invalid", pa.int64()),
                ("router_entropy", pa.float64()),
                ("aux_loss", pa.float64()),
                ("z_loss", pa.float64()),
                *_WHERE,
            ]
        ),
        "decisions": pa.schema(
            [
                ("step", pa.int64()),
                ("phase", pa.string()),
                ("layer", pa.int32()),
                ("router", pa.int32()),
                ("token", pa.int32()),
                ("experts", pa.list_(pa.int8())),
                ("weights", _LIST_F32),
                ("kept", pa.list_(pa.bool_())),
                *_WHERE,
            ]
        ),
        "tokens": pa.schema(
            [
                ("step", pa.int64()),
                ("phase", pa.string()),
                ("token", pa.int32()),
                ("sequence", pa.int32()),
                ("position", pa.int32()),
                ("token_id", pa.int32()),
                ("text", pa.string()),
                ("domain", pa.string()),
                *_WHERE,
            ]
        ),
        "events": pa.schema(
            [("step", pa.int64()), ("kind", pa.string()), ("message", pa.string()), *_WHERE],
        ),
    }
)

#: Without these a Parquet file is not a part of the table; any other column may be missing.
REQUIRED_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "steps": ("step",),
        "layer_stats": ("step", "layer", "load"),
        "decisions": ("step", "layer", "token", "experts"),
        "tokens": ("step", "token", "sequence", "position"),
        "events": ("step", "kind"),
    }
)


def id_type(num_experts: int | None) -> pa.DataType:
    """Narrowest signed integer type that holds `num_experts` and the sentinel -1.

    Args:
        num_experts: E, or None when it is not known (then int32).

    Raises:
        ValueError: E below 1 or above what int32 holds.
    """
    if num_experts is None:
        return pa.int32()
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    for bits, arrow_type in ((8, pa.int8()), (16, pa.int16()), (32, pa.int32())):
        if num_experts < 1 << (bits - 1):
            return arrow_type
    raise ValueError(f"num_experts must fit 32 bits, got {num_experts}")


def round_weights(weights: np.ndarray) -> np.ndarray:
    """Round float32 values to 10 mantissa bits, half up on the bit pattern (relative error at most 2^-11).

    NaN, both infinities and both zeros stay as they are. A finite value that would round up to infinity is
    cut instead, so that finite stays finite.

    Args:
        weights: any shape; taken as float32.

    Returns:
        A new float32 array of the same shape.
    """
    weights = np.asarray(weights, dtype=np.float32)
    bits = np.ascontiguousarray(weights).view(np.uint32)
    finite = np.isfinite(weights)
    mask = np.uint32((0xFFFFFFFF << _DROPPED_BITS) & 0xFFFFFFFF)
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    up = ((np.where(finite, bits, np.uint32(0)) + half) & mask).view(np.float32)
    cut = (bits & mask).view(np.float32)
    return np.where(finite, np.where(np.isfinite(up), up, cut), weights).reshape(weights.shape)


def unify_types(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that holds the values of both: null gives way, integers widen, integer and float make float64,
    lists unify their values, fixed lists of different lengths become variable ones.

    Raises:
        TypeError: when there is none, naming both.
    """
    if first == second:
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_null(second):
        return first
    if _is_text(first) and _is_text(second):
        return pa.string()
    if _is_list(first) and _is_list(second):
        value_type = unify_types(first.value_type, second.value_type)
        if (
            pa.types.is_fixed_size_list(first)
            and pa.types.is_fixed_size_list(second)
            and first.list_size == second.list_size
        ):
            return pa.list_(value_type, first.list_size)
        return pa.list_(value_type)
    if _is_number(first) and _is_number(second):
        if pa.types.is_integer(first) and pa.types.is_integer(second):
            return _wider_integer(first, second)
        if pa.types.is_floating(first) and pa.types.is_floating(second):
            return first if first.bit_width > second.bit_width else second
        return pa.float64()
    raise TypeError(f"{first} and {second} do not go together")


def part_problem(table: str, schema: pa.Schema) -> str | None:
    """Why a file of this schema cannot be a part of `table`, in one line; None when it can."""
    missing = [name for name in REQUIRED_COLUMNS[table] if name not in schema.names]
    if missing:
        return f"not a {table} table: column {', '.join(missing)} missing"
    for field in SCHEMAS[table]:
        if field.name in schema.names:
            found = schema.field(field.name).type
            try:
                unify_types(field.type, found)
            except TypeError:
                return f"not a {table} table: column {field.name} is {found}, expected {field.type}"
    return None


def unify_schema(table: str, schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The schema that holds the rows of all these, the format's own columns first.

    Args:
        table: one of `TABLES`; each schema has passed `part_problem`.
        schemas: of the parts, in order.

    Raises:
        TypeError: parts that disagree about a column beyond repair.
    """
    fields: dict[str, pa.DataType] = {}
    for field in SCHEMAS[table]:
        # A fixed-size list stays one only if the parts say so: the format's own type is the variable kind.
        own_kind = table == "decisions" and _is_list(field.type)
        fields[field.name] = pa.null() if own_kind and schemas else field.type
    for schema in schemas:
        for field in schema:
            fields[field.name] = unify_types(fields.get(field.name, pa.null()), field.type)
    for field in SCHEMAS[table]:
        if pa.types.is_null(fields[field.name]):
            fields[field.name] = field.type
    return pa.schema(list(fields.items()))


def only(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """`schema` with these columns alone, in its own order; all of them when None."""
    return schema if columns is None else pa.schema([field for field in schema if field.name in columns])


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with exactly the columns of `schema`: missing ones all null, the others cast."""
    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        if field.name in table.column_names:
            column = table[field.name]
            columns.append(column if column.type == field.type else column.cast(field.type))
        else:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
    return pa.table(columns, schema=schema)


def lists_to_matrix(column: Any) -> np.ndarray:
    """A list column whose rows are all of one length as an array (rows, length), without a copy where possible.

    Args:
        column: an Arrow array or chunked array, or a column of one of the reader's frames.

    Raises:
        ValueError: rows of different lengths, or null rows, naming the lengths found.
    """
    array = column if isinstance(column, (pa.Array, pa.ChunkedArray)) else pa.array(column)
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    rows = len(array)
    if rows == 0:
        width = array.type.list_size if pa.types.is_fixed_size_list(array.type) else 0
        return np.empty((0, width), dtype=array.type.value_type.to_pandas_dtype())
    if array.null_count:
        raise ValueError(f"{array.null_count} of {rows} lists are null")
    if not pa.types.is_fixed_size_list(array.type):
        lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) != 1:
            raise ValueError(f"lists of different lengths: {lengths.tolist()}")
    values = array.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(rows, -1)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _wider_integer(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """A signed type unless both are unsigned: ids and counts of two writers must keep their -1."""
    signs = [pa.types.is_signed_integer(kind) for kind in (first, second)]
    if all(signs) or not any(signs):
        return first if first.bit_width > second.bit_width else second
    unsigned = second if signs[0] else first
    bits = max(max(first.bit_width, second.bit_width), min(64, unsigned.bit_width * 2))
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[bits]
