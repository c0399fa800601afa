"""What a writer is given, checked and turned into rows of the run format.

Shapes: E experts, K top-k, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from recorder import checks
from recorder.schema import PHASES, SCHEMAS, conform, id_type, round_weights, unify_schema


def key(step: int, phase: str) -> dict[str, Any]:
    """`step` and `phase` as columns.

    Raises:
        ValueError: a step that is no whole number of 63 bits, or an unknown phase.
    """
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
    return {"step": checks.whole("step", step), "phase": phase}


def experts_by_router(manifest: dict[str, Any]) -> dict[int, int]:
    """E of every router that the manifest names."""
    layers = (manifest.get("model") or {}).get("layers") or []
    return {
        layer["router"]: layer["num_experts"]
        for layer in layers
        if layer.get("router") is not None and layer.get("num_experts")
    }


def layer_stats_row(
    where: dict[str, Any],
    *,
    layer: int,
    router: int,
    tokens: int | None,
    vectors: dict[str, np.ndarray | None],
    num_experts: int | None,
    scalars: dict[str, float | None],
) -> dict[str, Any]:
    """One row of `layer_stats`: arrays copied, lengths checked against each other and against E."""
    row: dict[str, Any] = where | {"layer": int(layer), "router": int(router)}
    row["tokens"] = None if tokens is None else int(tokens)
    length = num_experts
    for name, vector in vectors.items():
        if vector is None:
            row[name] = None
            continue
        array = np.asarray(vector)
        if array.ndim != 1 or array.size == 0:
            raise ValueError(f"{name} must have shape (E,), got {array.shape}")
        if length is None:
            length = array.size
        if array.size != length:
            source = f"router {router} has" if num_experts is not None else "load has"
            raise ValueError(f"{name} has {array.size} experts, {source} {length}")
        row[name] = _counts(name, array) if name in ("load", "dropped") else np.array(array, dtype=np.float32)
    if row["load"] is None:
        raise ValueError("load must be an array of shape (E,), got None")
    for name, value in scalars.items():
        kind = int if name in ("rerouted", "invalid") else float
        row[name] = None if value is None else kind(value)
    return row


def decision_rows(
    where: dict[str, Any],
    *,
    layers: Sequence[int],
    routers: Sequence[int],
    experts_RTK: np.ndarray,
    weights_RTK: np.ndarray | None,
    kept_RTK: np.ndarray | None,
    tokens_T: np.ndarray | None,
    num_experts: int | None,
    full_weights: bool,
) -> pa.Table:
    """Rows of `decisions` for routers of one E, about the same tokens of one step; lists of fixed length K."""
    ids_RTK = np.asarray(experts_RTK)
    if ids_RTK.ndim != 3 or ids_RTK.shape[2] == 0 or not np.issubdtype(ids_RTK.dtype, np.integer):
        raise ValueError(f"experts_TK must be integers of shape (T, K), got {ids_RTK.dtype} {ids_RTK.shape[1:]}")
    num_routers, num_tokens, top_k = ids_RTK.shape
    if ids_RTK.size:
        low, high = int(ids_RTK.min()), int(ids_RTK.max())
        limit = num_experts if num_experts is not None else np.iinfo(np.int32).max
        if low < -1 or high >= limit:
            wrong = low if low < -1 else high
            raise ValueError(f"expert id {wrong} is outside [-1, {limit}) of router {', '.join(map(str, routers))}")
    if weights_RTK is None:
        gates: pa.Array = pa.nulls(num_routers * num_tokens, pa.list_(pa.float32(), top_k))
    else:
        gates_RTK = np.asarray(weights_RTK)
        if gates_RTK.shape != ids_RTK.shape:
            raise ValueError(f"weights_TK has shape {gates_RTK.shape[1:]}, experts_TK {ids_RTK.shape[1:]}")
        rounded_RTK = np.array(gates_RTK, dtype=np.float32) if full_weights else round_weights(gates_RTK)
        gates = _fixed_lists(rounded_RTK, pa.float32())
    tokens = _numbers("tokens_T", tokens_T, num_tokens)
    columns: dict[str, Any] = {
        "layer": pa.array(np.repeat(np.array(layers, dtype=np.int32), num_tokens)),
        "router": pa.array(np.repeat(np.array(routers, dtype=np.int32), num_tokens)),
        "token": pa.array(np.tile(tokens, num_routers), pa.int32()),
        "experts": _fixed_lists(ids_RTK, id_type(num_experts)),
        "weights": gates,
    }
    if kept_RTK is None:
        columns["kept"] = pa.nulls(num_routers * num_tokens, pa.list_(pa.bool_(), top_k))
    else:
        kept = np.asarray(kept_RTK)
        if kept.shape != ids_RTK.shape or kept.dtype != np.bool_:
            raise ValueError(f"kept_TK must be bool {ids_RTK.shape[1:]}, got {kept.dtype} {kept.shape[1:]}")
        columns["kept"] = _fixed_lists(kept, pa.bool_())
    return _with_key(where, columns, num_routers * num_tokens)


def token_rows(
    where: dict[str, Any],
    *,
    sequence_T: np.ndarray,
    position_T: np.ndarray,
    token_id_T: np.ndarray | None,
    text_T: Sequence[str | None] | None,
    domain_T: Sequence[str | None] | None,
    tokens_T: np.ndarray | None,
) -> pa.Table:
    """Rows of `tokens` for one step."""
    num_tokens = len(sequence_T)
    columns: dict[str, Any] = {
        "token": pa.array(_numbers("tokens_T", tokens_T, num_tokens), pa.int32()),
        "sequence": pa.array(_numbers("sequence_T", sequence_T, num_tokens), pa.int32()),
        "position": pa.array(_numbers("position_T", position_T, num_tokens), pa.int32()),
    }
    if token_id_T is not None:
        columns["token_id"] = pa.array(_numbers("token_id_T", token_id_T, num_tokens), pa.int32())
    for name, values in (("text", text_T), ("domain", domain_T)):
        if values is not None:
            if len(values) != num_tokens:
                raise ValueError(f"{name}_T has {len(values)} entries for {num_tokens} tokens")
            columns[name] = _texts(name, values)
    return _with_key(where, columns, num_tokens)


def assemble(table: str, rows: list[pa.Table | dict[str, Any]], *, rank: int, segment: int) -> pa.Table:
    """Buffered rows as one Arrow table with the columns of `table`."""
    pieces = [item for item in rows if isinstance(item, pa.Table)]
    single = [item for item in rows if isinstance(item, dict)]
    if single:
        schema = SCHEMAS[table]
        names = [name for name in schema.names if name not in ("rank", "segment")]
        arrays = [
            pa.array([row.get(name) for row in single], schema.field(name).type, from_pandas=False) for name in names
        ]
        pieces.append(pa.table(arrays, names=names))
    alike: dict[pa.Schema, list[pa.Table]] = {}  # thousands of small pieces have a schema or two among them
    for piece in pieces:
        alike.setdefault(piece.schema, []).append(piece)
    schema = unify_schema(table, list(alike))
    whole = pa.concat_tables([conform(pa.concat_tables(group), schema) for group in alike.values()])
    for name, value in (("rank", rank), ("segment", segment)):
        column = pa.repeat(pa.scalar(value, pa.int32()), whole.num_rows)
        whole = whole.set_column(whole.schema.get_field_index(name), name, column)
    return whole


def _with_key(where: dict[str, Any], columns: dict[str, Any], num_tokens: int) -> pa.Table:
    keys = {
        "step": pa.repeat(pa.scalar(where["step"], pa.int64()), num_tokens),
        "phase": pa.repeat(pa.scalar(where["phase"], pa.string()), num_tokens),
    }
    return pa.table(keys | columns)


def _fixed_lists(values: np.ndarray, value_type: pa.DataType) -> pa.FixedSizeListArray:
    """Lists along the last axis."""
    # A copy: the caller may go on changing its array before the flush.
    flat = np.array(values, dtype=value_type.to_pandas_dtype(), order="C", copy=True).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, value_type), values.shape[-1])


def _numbers(name: str, values: np.ndarray | None, num_tokens: int) -> np.ndarray:
    if values is None:
        return np.arange(num_tokens, dtype=np.int32)
    array = np.asarray(values)
    if array.shape != (num_tokens,):
        raise ValueError(f"{name} must have shape ({num_tokens},), got {array.shape}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError(f"{name} must fit 32 bits, got {array.min()} to {array.max()}")
    return np.array(array, dtype=np.int32)


def _texts(name: str, values: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([checks.encodable(value) if value else value for value in values], pa.string())
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(f"{name}_T must hold str or None: {error}") from None


def _counts(name: str, array: np.ndarray) -> np.ndarray:
    whole = array.astype(np.int64)
    if not np.array_equal(whole, array) or (whole < 0).any():
        raise ValueError(f"{name} must hold whole numbers, at least 0, got {array.tolist()}")
    return whole
