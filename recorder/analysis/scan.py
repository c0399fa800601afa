"""Decisions moment by moment: all that was decided in one step, phase and segment, from a stretch of part files.

No more than one moment and one batch of rows is in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recorder import storage
from recorder.analysis.id_pages import OtherLayoutError, ids_column, read_ids
from recorder.catalog import fill_defaults
from recorder.parts import Footer, PartFile, read_footer
from recorder.schema import PHASES, SCHEMAS, conform, lists_to_matrix, only
from recorder.storage import Place

_BATCH_ROWS = 1 << 17
#: Of `decisions`: all but the weights. Whoever needs neither the order of the tokens nor what was dropped reads less.
COLUMNS = ["step", "phase", "layer", "router", "token", "experts", "kept", "rank", "segment"]
IDS_ONLY = [name for name in COLUMNS if name not in ("token", "kept")]
#: A part and its row groups from a first one to before a last one.
Piece = tuple[PartFile, int, int]
_KEYS = ("segment", "step", "phase", "router", "rank")


@dataclass(frozen=True)
class Stretch:
    """Row groups, one after the other, and of the (segment, step) in them those from `since` to before `until`.

    None = no bound. A row group in which a step ends and another begins may be of two stretches.
    """

    pieces: tuple[Piece, ...]
    since: tuple[int, int] | None = None
    until: tuple[int, int] | None = None

    def holds(self, moment: tuple[int, int]) -> bool:
        """Whether it is one of these (segment, step)."""
        return (self.since is None or self.since <= moment) and (self.until is None or moment < self.until)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What one router decided for the tokens of one rank, in the order of the tokens' numbers.

    token_T int64, empty where it was not read: then in the order of the rows. expert_ids_TK integers (-1 = no choice),
    kept_TK bool or None where nothing could be dropped.
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


def moments(
    folder: Place, stretch: Stretch, routers: Mapping[int, int], columns: Sequence[str] = COLUMNS
) -> Iterator[Moment]:
    """The moments of a stretch of `decisions`, in order.

    Args:
        folder: the table's folder.
        stretch: in which the rows of one moment follow one another.
        routers: the router of each layer, for a writer that numbers none.
        columns: COLUMNS or IDS_ONLY.

    Raises:
        OSError, ValueError, pa.ArrowException: a part cannot be read.
    """
    gathered: _Gathered | None = None
    for part, first, stop in stretch.pieces:
        for batch in _batches(folder / part.name, part, range(first, stop), columns):
            for key, place, piece in _pieces(batch, routers):
                if not stretch.holds(key[:2]):
                    continue
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
    for key, place, piece in _pieces(_Batch(rows, {}), routers):
        gathered = gathered or _Gathered(key)
        gathered.pieces.setdefault(place, []).append(piece)
    return None if gathered is None else gathered.moment()


class _Batch(NamedTuple):
    """Rows of `decisions`, and beside them what need not be read with them.

    keys: key columns that the footer tells, (rows,) each; `phase` as its number in PHASES.
    ids_TK: the experts, where they were read from the pages.
    """

    rows: pa.Table
    keys: Mapping[str, np.ndarray]
    ids_TK: np.ndarray | None = None


def _batches(path: Place, part: PartFile, row_groups: range, columns: Sequence[str]) -> Iterator[_Batch]:
    """The rows of some row groups. Mostly one holds one step, phase, rank and segment, and its statistics say so."""
    footer = read_footer(path, part.stored)
    metadata, here = footer.metadata, list(row_groups)
    column = None if storage.is_remote(path) else ids_column(metadata, footer.schema)
    # a phase as a number is read in a sixth of the time that text takes
    as_numbers = [name for name in ("phase",) if name in footer.schema.names]
    with storage.parquet_file(path, metadata, part.stored, read_dictionary=as_numbers) as file:
        if isinstance(path, Path) and column is not None:
            kind = footer.schema.field("experts").type
            with path.open("rb") as pages:
                for group in here:
                    keys, there = _told(footer, [group], columns)
                    try:
                        ids_TK = read_ids(pages, metadata, group, column, kind)
                        there.remove("experts")
                    except OtherLayoutError:
                        ids_TK = None
                    rows = file.read_row_group(group, there, use_threads=False)
                    keys = {name: np.broadcast_to(values, rows.num_rows) for name, values in keys.items()}
                    yield _Batch(rows, keys, ids_TK)
            return
        keys, there = _told(footer, here, columns)
        ends = np.cumsum([metadata.row_group(group).num_rows for group in here])
        start = 0
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=here, columns=there, use_threads=False):
            stop = start + batch.num_rows
            rows_of_group = np.diff(np.clip(ends, start, stop), prepend=start)
            of_rows = {name: np.repeat(values, rows_of_group) for name, values in keys.items()}
            yield _Batch(pa.Table.from_batches([batch]), of_rows)
            start = stop


def _told(footer: Footer, row_groups: list[int], columns: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The keys that are of one value within each of these row groups, (groups,), and the columns left to read."""
    groups = footer.groups
    low, high = ({name: ends[row_groups] for name, ends in side.items()} for side in (groups.low, groups.high))
    told = {name: values for name, values in low.items() if (values == high[name]).all()}
    phases = [groups.phase[group] for group in row_groups]
    if all(phase in PHASES for phase in phases):
        told["phase"] = np.array([PHASES.index(phase) for phase in phases if phase], dtype=np.int64)
    return told, [name for name in columns if name in footer.schema.names and name not in told]


def _pieces(
    batch: _Batch, routers: Mapping[int, int]
) -> Iterator[tuple[tuple[int, int, str], tuple[int, int], Choices]]:
    """Runs of rows with the same keys: (segment, step, phase), (rank, router), the choices."""
    rows, told, ids_TK = batch
    if not rows.num_rows:
        return
    lists = {name: rows[name].combine_chunks() for name in ("experts", "kept") if name in rows.column_names}
    if ids_TK is None and pa.types.is_fixed_size_list(lists["experts"].type):  # else routers may differ in k
        ids_TK = lists_to_matrix(lists["experts"])
    keys, phases = _keys(rows, routers, told)
    new = _changes(keys)
    if new.sum() > len(new) // 8:  # another writer's order: token by token, say
        by_token = [keys["token"]] if "token" in keys else []
        order = np.lexsort([*by_token, *(keys[name] for name in reversed(_KEYS))])
        keys = {name: values[order] for name, values in keys.items()}
        lists = {name: column.take(pa.array(order)) for name, column in lists.items()}
        ids_TK = None if ids_TK is None else ids_TK[order]
        new = _changes(keys)
    starts = np.flatnonzero(new)
    stops = np.append(starts[1:], len(new))
    first = {name: keys[name][starts].tolist() for name in (*_KEYS, "layer")}
    token = keys["token"].astype(np.int64) if "token" in keys else np.empty(0, dtype=np.int64)
    for place, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        at = {name: values[place] for name, values in first.items()}
        kept = lists["kept"].slice(start, stop - start) if "kept" in lists else None
        yield (
            (at["segment"], at["step"], phases[at["phase"]]),
            (at["rank"], at["router"]),
            Choices(
                layer=at["layer"],
                token_T=token[start:stop],
                expert_ids_TK=lists_to_matrix(lists["experts"].slice(start, stop - start))
                if ids_TK is None
                else ids_TK[start:stop],
                kept_TK=_kept(kept, start, stop),
            ),
        )


def _keys(
    rows: pa.Table, routers: Mapping[int, int], told: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The key columns and `token` where it is there, (rows,) each; `phase` as numbers of the names beside them."""
    plain = [name for name in ("token", "layer", *_KEYS) if name not in told]
    if "token" not in rows.column_names:
        plain.remove("token")
    there = rows.select([name for name in plain if name in rows.column_names])
    phases = list(PHASES)
    keys = dict(told)
    if "phase" in plain:
        plain.remove("phase")
        if "phase" in there.column_names:
            phases, keys["phase"] = _encoded(there["phase"])
            there = there.drop_columns("phase")
        else:
            keys["phase"] = np.full(rows.num_rows, PHASES.index("train"))
    there = fill_defaults(conform(there, only(SCHEMAS["decisions"], plain))) if plain else there
    keys |= {name: there[name].to_numpy() for name in plain if name != "router"}
    if "router" not in told:
        keys["router"] = _router_numbers(there, keys["layer"], routers)
    return keys, phases


def _encoded(phase: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """Names, and the place of each row's among them; null = train."""
    encoded = pc.dictionary_encode(phase) if not pa.types.is_dictionary(phase.type) else phase
    encoded = encoded.unify_dictionaries().combine_chunks()
    names = [*encoded.dictionary.to_pylist(), "train"]
    return names, pc.fill_null(encoded.indices, names.index("train")).to_numpy(zero_copy_only=False)


def _changes(keys: Mapping[str, np.ndarray]) -> np.ndarray:
    """Where a row's keys are not those of the row before, bool (rows,)."""
    new = np.zeros(len(keys["step"]), dtype=bool)
    new[0] = True
    for name in _KEYS:
        if keys[name].strides != (0,):  # else one value, told by the footer
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
    ids_TK = pieces[0].expert_ids_TK if len(pieces) == 1 else np.concatenate([one.expert_ids_TK for one in pieces])
    token_T = np.concatenate([piece.token_T for piece in pieces])
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
