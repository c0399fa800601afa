"""Decisions moment by moment: all that was decided in one step, phase and segment, from a stretch of part files.

No more than one moment and one batch of rows is in memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recorder import storage
from recorder.catalog import fill_defaults
from recorder.parts import PartFile
from recorder.schema import SCHEMAS, conform, lists_to_matrix, only
from recorder.storage import Place

_BATCH_ROWS = 1 << 17
#: Of `decisions`: all but the weights.
COLUMNS = ["step", "phase", "layer", "router", "token", "experts", "kept", "rank", "segment"]
_KEYS = ("segment", "step", "phase", "router", "rank")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What one router decided for the tokens of one rank, in the order of the tokens' numbers.

    token_T int64, expert_ids_TK integers (-1 = no choice), kept_TK bool or None where nothing could be dropped.
    """

    layer: int
    token_T: np.ndarray
    expert_ids_TK: np.ndarray
    kept_TK: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """All decisions of one step, phase and segment that a task has, by rank and router."""

    step: int
    phase: str
    segment: int
    choices: Mapping[tuple[int, int], Choices]


@dataclass
class _Gathered:
    key: tuple[int, int, str]
    pieces: dict[tuple[int, int], list[Choices]] = field(default_factory=dict)

    def moment(self) -> Moment:
        segment, step, phase = self.key
        choices = {place: _joined(pieces) for place, pieces in sorted(self.pieces.items())}
        return Moment(step=step, phase=phase, segment=segment, choices=choices)


def moments(folder: Place, parts: Iterable[PartFile], routers: Mapping[int, int]) -> Iterator[Moment]:
    """The moments of these parts of `decisions`, in order.

    Args:
        folder: the table's folder.
        parts: in which the rows of one moment follow one another.
        routers: the router of each layer, for a writer that numbers none.

    Raises:
        OSError, ValueError, pa.ArrowException: a part cannot be read.
    """
    gathered: _Gathered | None = None
    for part in parts:
        with storage.parquet_file(folder / part.name, stored=part.stored) as file:
            there = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(_BATCH_ROWS, columns=there, use_threads=False):
                for key, place, piece in _pieces(pa.Table.from_batches([batch]), routers):
                    if gathered is None or gathered.key != key:
                        if gathered is not None:
                            yield gathered.moment()
                        gathered = _Gathered(key)
                    gathered.pieces.setdefault(place, []).append(piece)
    if gathered is not None:
        yield gathered.moment()


def moment_of(rows: pa.Table, routers: Mapping[int, int]) -> Moment | None:
    """The moment that these rows of `decisions`, all of one step, phase and segment, make; None without rows."""
    gathered: _Gathered | None = None
    for key, place, piece in _pieces(rows, routers):
        gathered = gathered or _Gathered(key)
        gathered.pieces.setdefault(place, []).append(piece)
    return None if gathered is None else gathered.moment()


def _pieces(
    rows: pa.Table, routers: Mapping[int, int]
) -> Iterator[tuple[tuple[int, int, str], tuple[int, int], Choices]]:
    """Runs of rows with the same keys: (segment, step, phase), (rank, router), the choices."""
    if not rows.num_rows:
        return
    lists = {name: rows[name] for name in ("experts", "kept") if name in rows.column_names}
    plain = [name for name in COLUMNS if name not in ("experts", "kept")]
    rows = fill_defaults(conform(rows.drop_columns(list(lists)), only(SCHEMAS["decisions"], plain)))
    phases = pc.dictionary_encode(rows["phase"]).combine_chunks()
    names = phases.dictionary.to_pylist()
    keys = {name: rows[name].to_numpy() for name in ("segment", "step", "layer", "rank", "token")}
    keys["phase"] = phases.indices.to_numpy()
    keys["router"] = _router_numbers(rows, keys["layer"], routers)
    columns = {name: column.combine_chunks() for name, column in lists.items()}
    new = _changes(keys)
    if new.sum() > len(new) // 8:  # another writer's order: token by token, say
        order = np.lexsort([keys["token"], *(keys[name] for name in reversed(_KEYS))])
        keys = {name: values[order] for name, values in keys.items()}
        columns = {name: column.take(pa.array(order)) for name, column in columns.items()}
        new = _changes(keys)
    starts = np.flatnonzero(new).tolist()
    for start, stop in zip(starts, [*starts[1:], len(new)], strict=True):
        kept = columns["kept"].slice(start, stop - start) if "kept" in columns else None
        at = {name: keys[name][start].item() for name in (*_KEYS, "layer")}
        yield (
            (at["segment"], at["step"], names[at["phase"]]),
            (at["rank"], at["router"]),
            Choices(
                layer=at["layer"],
                token_T=keys["token"][start:stop].astype(np.int64),
                expert_ids_TK=lists_to_matrix(columns["experts"].slice(start, stop - start)),
                kept_TK=_kept(kept, start, stop),
            ),
        )


def _changes(keys: Mapping[str, np.ndarray]) -> np.ndarray:
    """Where a row's keys are not those of the row before, bool (rows,)."""
    new = np.zeros(len(keys["step"]), dtype=bool)
    new[0] = True
    for name in _KEYS:
        new[1:] |= keys[name][1:] != keys[name][:-1]
    return new


def _router_numbers(rows: pa.Table, layers: np.ndarray, routers: Mapping[int, int]) -> np.ndarray:
    if not rows["router"].null_count:
        return rows["router"].to_numpy()
    numbers = pa.array([routers.get(layer, layer) for layer in layers.tolist()], pa.int32())
    return pc.coalesce(rows["router"], numbers).to_numpy()


def _kept(kept: Any, start: int, stop: int) -> np.ndarray | None:
    if kept is None or kept.null_count == stop - start:
        return None
    if kept.null_count:  # null = kept
        width = pc.max(pc.list_value_length(kept)).as_py()
        kept = pc.coalesce(kept.cast(pa.list_(pa.bool_())), pa.scalar([True] * width, pa.list_(pa.bool_())))
    return lists_to_matrix(kept)


def _joined(pieces: list[Choices]) -> Choices:
    """Pieces of one router and rank, sorted by token."""
    token_T = np.concatenate([piece.token_T for piece in pieces])
    ids_TK = np.concatenate([piece.expert_ids_TK for piece in pieces])
    kept = [piece.kept_TK for piece in pieces]
    kept_TK = None
    if any(part is not None for part in kept):
        shapes = [piece.expert_ids_TK.shape for piece in pieces]
        kept_TK = np.concatenate(
            [np.ones(shape, dtype=bool) if part is None else part for part, shape in zip(kept, shapes, strict=True)]
        )
    if (token_T[1:] < token_T[:-1]).any():
        order = np.argsort(token_T, kind="stable")
        token_T, ids_TK = token_T[order], ids_TK[order]
        kept_TK = None if kept_TK is None else kept_TK[order]
    return Choices(layer=pieces[0].layer, token_T=token_T, expert_ids_TK=ids_TK, kept_TK=kept_TK)
