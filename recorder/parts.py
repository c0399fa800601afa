"""Part files: their names, how one is written so that it is whole or not there, and what its footer tells.

A part may *replace* others (compaction): its footer names them, and from the moment it has its name a reader
leaves them out, whether they are still there or not. So no moment exists at which rows count twice or not at all.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recorder import storage
from recorder.storage import Place, Stored

PART_NAME = re.compile(r"part-r(\d{5,})-(\d{6,})\.parquet")
_REPLACES_KEY = b"routescope.replaces"
_KEY_COLUMNS = ("step", "phase", "layer", "router", "rank", "segment")
_INT_KEYS = ("step", "layer", "router", "rank", "segment")

#: Row groups below this many rows are joined with the next: a footer entry costs more than it saves. Rows of one token
#: are small, and their weights compress a tenth better in long columns, which take about a millisecond to read.
MIN_GROUP_ROWS = 512
_MIN_GROUP_ROWS_OF = {"decisions": 1 << 16, "tokens": 1 << 16}
MAX_GROUP_ROWS = 1 << 18
_ZSTD_LEVEL = 6  # a byte plane's own Huffman table from 4 on: 6 % less than at 1 for 40 ns a row, and no slower to read
_MAX_GROUP_VALUES = 1 << 21

#: How rows of each table are ordered inside a part, and at which columns' changes a new row group starts.
_ORDER: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "steps": (("segment", "step", "phase"), ("segment",)),
    "layer_stats": (("segment", "phase", "router", "step"), ("segment", "phase", "router")),
    "decisions": (("segment", "step", "phase", "router", "token"), ("segment", "step", "phase", "router")),
    "tokens": (("segment", "step", "phase", "token"), ("segment", "step", "phase")),
    "events": (("segment", "step"), ("segment",)),
}


@dataclass(frozen=True, kw_only=True)
class PartFile:
    """One file of a table's folder as a listing saw it; equal when name, size and time of change are."""

    name: str
    size: int
    mtime_ns: int

    @property
    def stored(self) -> Stored:
        """Size and time of change, as `recorder.storage` knows a file by."""
        return Stored(self.size, self.mtime_ns)


class Footer:
    """What a part's footer says: schema, rows, replaced parts and, on demand, the range of each row group."""

    def __init__(self, metadata: pq.FileMetaData) -> None:
        self.metadata = metadata
        self.schema: pa.Schema = metadata.schema.to_arrow_schema()
        self.num_rows: int = metadata.num_rows
        replaced = (metadata.metadata or {}).get(_REPLACES_KEY)
        self.replaces: frozenset[str] = frozenset(json.loads(replaced)) if replaced else frozenset()

    @cached_property
    def groups(self) -> "RowGroups":
        """Ranges of the key columns in every row group."""
        return RowGroups(self.metadata)


class RowGroups:
    """Least and greatest value of the key columns in each row group, as arrays over the groups.

    `low["step"]`, `high["step"]` ... int64; where a file holds no statistics the range is unbounded. A column the
    file lacks reads as 0 for rank and segment. `phase` is None where a group mixes phases or tells nothing.
    """

    def __init__(self, metadata: pq.FileMetaData) -> None:
        self.count: int = metadata.num_row_groups
        position = {metadata.schema.column(i).path: i for i in range(metadata.num_columns)}
        unbounded = np.iinfo(np.int64)
        self.low = {name: np.full(self.count, unbounded.min) for name in _INT_KEYS}
        self.high = {name: np.full(self.count, unbounded.max) for name in _INT_KEYS}
        self.phase: list[str | None] = [None if "phase" in position else "train"] * self.count
        for name in ("rank", "segment"):
            if name not in position:
                self.low[name][:] = self.high[name][:] = 0
        for group in range(self.count):
            row_group = metadata.row_group(group)
            for name in _KEY_COLUMNS:
                statistics = row_group.column(position[name]).statistics if name in position else None
                # A null phase means train, a null segment 0: then the range of the others is not the whole truth.
                if statistics is None or not statistics.has_min_max or statistics.null_count:
                    continue
                low, high = statistics.min, statistics.max
                if name == "phase":
                    self.phase[group] = low if low == high and isinstance(low, str) else None
                elif isinstance(low, int) and isinstance(high, int):
                    self.low[name][group], self.high[name][group] = low, high

    def select(self, *, phase: str | None = None, **equals: int | None) -> list[int]:
        """Numbers of the row groups that may hold rows with these values (None = any)."""
        keep = np.ones(self.count, dtype=bool)
        for name, value in equals.items():
            if value is not None:
                keep &= (self.low[name] <= value) & (value <= self.high[name])
        groups: list[int] = np.flatnonzero(keep).tolist()
        if phase is None:
            return groups
        return [group for group in groups if self.phase[group] in (phase, None)]


def part_name(rank: int, sequence: int) -> str:
    """Name of a rank's part file number `sequence`."""
    return f"part-r{rank:05d}-{sequence:06d}.parquet"


def part_rank(name: str) -> int | None:
    """The rank in a part's name; None where the name is not ours."""
    match = PART_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def next_sequence(folder: Place, rank: int) -> int:
    """The first number above every part of this rank. Numbers are never used twice: a part may name another as
    replaced long after that one is gone."""
    matches = (PART_NAME.fullmatch(name) for name in storage.names(folder))
    return max((int(match.group(2)) for match in matches if match and int(match.group(1)) == rank), default=-1) + 1


def list_parts(folder: Place) -> dict[str, PartFile]:
    """The part files of a table's folder, by name, in order of rank and sequence; empty without a folder."""
    found = storage.snapshots(folder, ".parquet")
    return {
        name: PartFile(name=name, size=found[name].size, mtime_ns=found[name].mtime_ns)
        for name in sorted(found, key=_place)
    }


def read_footer(path: Place, stored: Stored | None = None) -> Footer:
    """The footer of one part; `stored` as the listing told it, so that a small part is fetched but once.

    Raises:
        FileNotFoundError: the part is gone (replaced meanwhile).
        StorageError: the object store cannot be reached.
        pa.ArrowException, OSError, ValueError: it is no whole Parquet file.
    """
    return Footer(storage.parquet_metadata(path, stored))


def write_part(path: Place, table: str, rows: pa.Table, *, replaces: Iterable[str] = ()) -> None:
    """Write one complete part, which is whole or not there: see `storage.write`.

    Args:
        path: the part's final path; its folder is created.
        table: the table's name, which gives the order of rows and where row groups start.
        rows: all rows of the part, with the columns of `table`.
        replaces: names of parts that this one replaces from the moment it has its name.
    """
    storage.make_folder(path.parent)
    rows, starts = _arrange(table, rows)
    keys = [name for name in _KEY_COLUMNS if name in rows.column_names]
    replaced = sorted(replaces)

    def serialise(target: Any) -> None:
        # Statistics of the keys only: those of floats would hold NaN, and every one makes the footer longer.
        with pq.ParquetWriter(
            target,
            rows.schema,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            write_statistics=keys,
            write_page_checksum=True,  # `verify` finds a changed byte by it
            **_encodings(rows.schema),
        ) as writer:
            for start, stop in zip(starts, [*starts[1:], rows.num_rows], strict=True):
                writer.write_table(rows.slice(start, stop - start), row_group_size=max(1, stop - start))
            if replaced:
                writer.add_key_value_metadata({_REPLACES_KEY: json.dumps(replaced).encode()})

    storage.write(path, serialise)


def remove_parts(folder: Place, names: Iterable[str]) -> None:
    """Delete replaced parts; one that cannot be deleted stays, and stays ignored."""
    storage.remove(folder, names)


def leftovers(folder: Place, rank: int | None = None) -> list[str]:
    """Names of the temporary files that a killed writer of this rank (None = of any) left behind, or a live one has.

    An object store knows none.
    """
    if storage.is_remote(folder):
        return []
    return [
        name
        for name in storage.names(folder)
        if name.startswith(".part-") and name.endswith(".tmp")
        if rank is None or part_rank(name[1:].rsplit(".", 2)[0]) == rank
    ]


def remove_leftovers(folder: Place, rank: int | None = None) -> None:
    """Delete what a killed writer of this rank (None = of any) left half-done: temporary files."""
    storage.remove(folder, leftovers(folder, rank))


def _place(name: str) -> tuple[int, int, str]:
    match = PART_NAME.fullmatch(name)
    return (int(match.group(1)), int(match.group(2)), name) if match else (0, -1, name)


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """Byte planes for lists of floats and for expert ids, differences for running token numbers, else dictionaries.

    A sixth less for rounded weights; ids take what their entropy says, not the bits of the largest; faster, too.
    """
    leaves = {field.name: field.name for field in schema}
    planes = []
    for field in schema:
        if pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type):
            leaves[field.name] = f"{field.name}.list.element"
            if pa.types.is_floating(field.type.value_type) or field.name == "experts":
                planes.append(leaves.pop(field.name))
    encodings = dict.fromkeys(planes, "BYTE_STREAM_SPLIT")
    if leaves.pop("token", None):
        encodings["token"] = "DELTA_BINARY_PACKED"
    return {"use_dictionary": list(leaves.values()), "column_encoding": encodings}


def _arrange(table: str, rows: pa.Table) -> tuple[pa.Table, list[int]]:
    """Rows in the table's order, and the row numbers at which row groups start."""
    order, breaks = _ORDER[table]
    rows = rows.combine_chunks()
    keys = {name: _ranks(rows[name]) for name in order}
    if not _in_order([keys[name] for name in order]):  # as one process writes them they are
        places = np.lexsort([keys[name] for name in reversed(order)])
        rows = rows.take(pa.array(places)).combine_chunks()
        keys = {name: ranks[places] for name, ranks in keys.items()}
    new_key = _changes([keys[name] for name in breaks], rows.num_rows)
    new_segment = _changes([keys["segment"]], rows.num_rows)
    longest = MAX_GROUP_ROWS
    if table == "layer_stats" and rows.num_rows:
        widest = max(1, pc.max(pc.list_value_length(rows["load"])).as_py() or 1)
        longest = max(MIN_GROUP_ROWS, min(longest, _MAX_GROUP_VALUES // widest))
    shortest = _MIN_GROUP_ROWS_OF.get(table, MIN_GROUP_ROWS)
    starts = [0]
    for row in np.flatnonzero(new_key).tolist():
        if row - starts[-1] >= shortest or new_segment[row]:
            starts.append(row)
    pieces: list[int] = []
    for start, stop in zip(starts, [*starts[1:], rows.num_rows], strict=True):
        pieces.extend(range(start, max(stop, start + 1), longest))
    return rows, pieces


def _ranks(column: pa.ChunkedArray) -> np.ndarray:
    """Integers that stand in the order of the column's values, (rows,); nulls last."""
    if pa.types.is_integer(column.type) and not column.null_count:
        return column.to_numpy()
    if not column.null_count and len(column) and pc.min_max(column)["min"] == pc.min_max(column)["max"]:
        return np.zeros(len(column), dtype=np.int64)  # a part of one phase, as most are
    encoded = column.combine_chunks().dictionary_encode()
    values = encoded.dictionary.to_pylist()
    rank_of = np.array([sorted(values).index(value) for value in values] + [len(values)])
    return rank_of[encoded.indices.fill_null(len(values)).to_numpy()]


def _in_order(keys: Sequence[np.ndarray]) -> bool:
    """Whether rows of these keys, the first one first, are sorted."""
    pairs = max(0, len(keys[0]) - 1)
    equal, fewer = np.ones(pairs, dtype=bool), np.zeros(pairs, dtype=bool)
    for ranks in keys:
        fewer |= equal & (ranks[1:] < ranks[:-1])
        equal &= ranks[1:] == ranks[:-1]
    return not fewer.any()


def _changes(keys: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Where any of these keys differs from the row before (row 0 is no change), bool (rows,)."""
    changed = np.zeros(num_rows, dtype=bool)
    for ranks in keys:
        changed[1:] |= ranks[1:] != ranks[:-1]
    return changed
