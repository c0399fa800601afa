"""The tables that the summed counts make. Arrow; one function a table, and `SCHEMAS` for what is in them."""

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from recorder.analysis.counts import Counts, Key, Sparse
from recorder.analysis.settling import rank_and_token

_PLACE = [("phase", pa.string()), ("layer", pa.int32()), ("router", pa.int32())]
_LOAD = pa.list_(pa.int64())

SCHEMAS = MappingProxyType(
    {
        "stats": pa.schema([*_PLACE, ("tokens", pa.int64()), ("load", _LOAD), ("router_entropy", pa.float64())]),
        "loads": pa.schema([*_PLACE, ("tokens", pa.int64()), ("load", _LOAD), ("first_choices", _LOAD)]),
        "coactivation": pa.schema([*_PLACE, ("expert", pa.int32()), ("together", _LOAD)]),
        "transitions": pa.schema(
            [*_PLACE, ("next_layer", pa.int32()), ("next_router", pa.int32()), ("expert", pa.int32()), ("to", _LOAD)]
        ),
        "domains": pa.schema([*_PLACE, ("domain", pa.string()), ("tokens", pa.int64()), ("load", _LOAD)]),
        "vocabulary": pa.schema(
            [
                *_PLACE,
                ("token_id", pa.int64()),
                ("text", pa.string()),
                ("occurrences", pa.int64()),
                ("experts", pa.list_(pa.int32())),
                ("counts", _LOAD),
            ]
        ),
        "repeats": pa.schema([*_PLACE, ("repeats", pa.int64()), ("pairs", pa.int64())]),
        "positions": pa.schema(
            [*_PLACE, ("position", pa.int64()), ("assignments", pa.int64()), ("dropped", pa.int64())]
        ),
        "settling": pa.schema(
            [
                *_PLACE,
                ("step", pa.int64()),
                ("tokens", pa.int64()),
                ("saturation", pa.float64()),
                ("churn", pa.float64()),
            ]
        ),
        "fluctuation": pa.schema(
            [
                *_PLACE,
                ("rank", pa.int32()),
                ("token", pa.int64()),
                ("last_fluctuation", pa.int64()),
                ("expert_there", pa.int32()),
                ("final_expert", pa.int32()),
            ]
        ),
    }
)
#: Names of the tables.
TABLES = tuple(SCHEMAS)
#: Those with a row for each token: as large as all the others are small.
BY_TOKEN = frozenset({"vocabulary", "fluctuation"})

Rows = Iterator[dict[str, Any]]


def make_tables(counts: Counts) -> dict[str, pa.Table]:
    """All tables, by name; those that nothing was counted for are empty."""
    return {name: _BUILD[name](counts, SCHEMAS[name]) for name in TABLES}


def _by_row(rows: Callable[[Counts], Rows]) -> Callable[[Counts, pa.Schema], pa.Table]:
    return lambda counts, schema: pa.Table.from_pylist(list(rows(counts)), schema=schema)


def _stats(counts: Counts) -> Rows:
    for key, load in counts.named("stats_load"):
        tokens, with_entropy = counts.arrays[key._replace(name="stats_tokens")].tolist()
        entropy = counts.arrays[key._replace(name="stats_entropy")].item()
        yield _place(key) | {
            "tokens": tokens,
            "load": load,
            "router_entropy": entropy / with_entropy if with_entropy else None,
        }


def _loads(counts: Counts) -> Rows:
    for key, load in counts.named("load"):
        first = counts.arrays[key._replace(name="first_choices")]
        tokens = counts.arrays[key._replace(name="tokens")].item()
        yield _place(key) | {"tokens": tokens, "load": load, "first_choices": first}


def _coactivation(counts: Counts) -> Rows:
    for key, together_EE in counts.named("coactivation"):
        for expert, together in enumerate(together_EE):
            yield _place(key) | {"expert": expert, "together": together}


def _transitions(counts: Counts) -> Rows:
    for key, pairs in counts.named("transitions"):
        layer, router = map(int, key.detail.split(","))
        for expert, to in enumerate(pairs):
            yield _place(key) | {"next_layer": layer, "next_router": router, "expert": expert, "to": to}


def _domains(counts: Counts) -> Rows:
    for key, tokens_and_load in counts.named("domains"):
        tokens, *load = tokens_and_load.tolist()
        yield _place(key) | {"domain": key.detail, "tokens": tokens, "load": load}


def _repeats(counts: Counts) -> Rows:
    for key, found in counts.named("repeats"):
        repeats, pairs = found.tolist()
        yield _place(key) | {"repeats": repeats, "pairs": pairs}


def _positions(counts: Counts) -> Rows:
    for key, by_position in counts.named("positions"):
        for position, (dropped, assignments) in enumerate(by_position.tolist()):
            yield _place(key) | {"position": position, "assignments": assignments, "dropped": dropped}


def _settling(counts: Counts) -> Rows:
    for key, row in counts.named("settling"):
        step, tokens, saturation, churn = row.tolist()
        values = {"saturation": saturation, "churn": churn}
        defined = {name: value if np.isfinite(value) else None for name, value in values.items()}
        yield _place(key) | {"step": int(step), "tokens": int(tokens)} | defined


def _fluctuation(counts: Counts, schema: pa.Schema) -> pa.Table:
    pieces = [schema.empty_table()]
    for key, latest in counts.named("fluctuation"):
        rank, token = rank_and_token(latest[:, 0])
        _, last, there, final = latest.T
        columns = _repeated(key, len(latest)) | {
            "rank": rank,
            "token": token,
            "last_fluctuation": pa.array(last, mask=last < 0),
            "expert_there": pa.array(there, mask=(last < 0) | (there < 0)),
            "final_expert": final,
        }
        pieces.append(pa.table(columns).cast(schema))
    return pa.concat_tables(pieces)


def _vocabulary(counts: Counts, schema: pa.Schema) -> pa.Table:
    pieces = [schema.empty_table()]
    ids = np.array(sorted(counts.texts), dtype=np.int64)
    texts = pa.array([counts.texts[token_id] for token_id in ids.tolist()], pa.string())
    for key in sorted(counts.sparse):
        token_ids, columns = _token_columns(counts.sparse[key], int(key.detail))
        places = np.searchsorted(ids, token_ids)
        known = np.append(ids, -1)[places] == token_ids
        columns["text"] = texts.take(pa.array(places, mask=~known))
        columns = _repeated(key, len(token_ids)) | {"token_id": token_ids} | columns
        pieces.append(pa.table({name: columns[name] for name in schema.names}).cast(schema))
    return pa.concat_tables(pieces)


def _token_columns(sparse: Sparse, width: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Token ids, ascending, and their occurrences, experts and counts, the most frequent expert first."""
    cells, times = sparse.items()
    token_of, expert_of = cells // width, cells % width
    total = expert_of == width - 1
    token_ids, occurrences = token_of[total], times[total]
    token_of, expert_of, times = token_of[~total], expert_of[~total], times[~total]
    order = np.lexsort([expert_of, -times, token_of])
    offsets = pa.array(np.append(np.searchsorted(token_of, token_ids), len(token_of)), pa.int32())
    return token_ids, {
        "occurrences": occurrences,
        "experts": pa.ListArray.from_arrays(offsets, pa.array(expert_of[order], pa.int32())),
        "counts": pa.ListArray.from_arrays(offsets, pa.array(times[order], pa.int64())),
    }


def _place(key: Key) -> dict[str, Any]:
    return {"phase": key.phase, "layer": key.layer, "router": key.router}


def _repeated(key: Key, times: int) -> dict[str, pa.Array]:
    return {name: pa.repeat(value, times) for name, value in _place(key).items()}


_BUILD: dict[str, Callable[[Counts, pa.Schema], pa.Table]] = {
    "stats": _by_row(_stats),
    "loads": _by_row(_loads),
    "coactivation": _by_row(_coactivation),
    "transitions": _by_row(_transitions),
    "domains": _by_row(_domains),
    "vocabulary": _vocabulary,
    "repeats": _by_row(_repeats),
    "positions": _by_row(_positions),
    "settling": _by_row(_settling),
    "fluctuation": _fluctuation,
}
