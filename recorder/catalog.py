"""The parts of one table as a reader sees them: which count, which are bad, and their rows as one Arrow table."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recorder import storage
from recorder.parts import Footer, PartFile, list_parts, part_rank, read_footer
from recorder.schema import conform, only, part_problem, unify_schema
from recorder.storage import Place, StorageError

#: Columns that an older writer may lack or leave null, and what that means.
_DEFAULTS = {"phase": "train", "rank": 0, "segment": 0}
_ATTEMPTS = 100
_THREADS_FROM_BYTES = 1 << 20
_LATEST_BYTES = 16 << 20  # so much of what was read last is kept
#: Such a failure to read tells nothing about the part: it has gone, or the object store cannot be reached.
_NOT_THE_PARTS_FAULT = (FileNotFoundError, StorageError)

Result = TypeVar("Result")


class KeyRange(NamedTuple):
    """Steps `low` to `high` of one segment; `phase` is None where they are of several phases."""

    phase: str | None
    segment: int
    low: int
    high: int


class TableReader:
    """Owns what is known of one table's folder: the listing, the footers, and the rows of parts once read.

    Parts never change, so all of it is kept by (name, size, mtime). A part that vanishes while it is read has
    been replaced by a compaction: the folder is listed again and the read repeated.

    Args:
        folder: the table's folder; it need not exist.
        table: one of `schema.TABLES`.
    """

    def __init__(self, folder: Place, table: str) -> None:
        self.folder = folder
        self.table = table
        self.files: dict[str, PartFile] = {}
        self._footers: dict[PartFile, Footer] = {}
        self._bad: dict[PartFile, str] = {}
        self._ranges: dict[tuple[PartFile, bool], list[KeyRange]] = {}
        self._live: list[PartFile] | None = None
        self._schema = unify_schema(table, [])
        self._whole: pa.Table | None = None
        self._latest: tuple[Hashable, list[pa.Table]] = (None, [])  # row groups read last, and which
        self._joined: tuple[list[PartFile], pa.Table] = ([], self._schema.empty_table())
        self.relist()

    def relist(self) -> bool:
        """Look at the folder again; True when its parts have changed."""
        files = list_parts(self.folder)
        if files == self.files:
            return False
        self.files = files
        known = set(files.values())
        self._footers = {file: footer for file, footer in self._footers.items() if file in known}
        self._bad = {file: reason for file, reason in self._bad.items() if file in known}
        self._ranges = {place: ranges for place, ranges in self._ranges.items() if place[0] in known}
        self._live = self._whole = None
        return True

    @property
    def problems(self) -> list[str]:
        """One line for each part that cannot be read."""
        self.live()
        return [f"{self.table}/{file.name}: {self._bad[file]}" for file in self.files.values() if file in self._bad]

    @property
    def size(self) -> int:
        """Bytes of the parts that count, as stored."""
        return sum(file.size for file, _ in self.live())

    def live(self) -> list[tuple[PartFile, Footer]]:
        """The parts that count, in order: readable, of this table, not replaced by another."""
        if self._live is None:
            self._repeat(self._load_footers)
        assert self._live is not None
        return [(file, self._footers[file]) for file in self._live]

    def whole(self) -> pa.Table:
        """All rows of the table. Kept; parts already read are not read again."""
        self.live()
        if self._whole is None:
            self._whole = self._repeat(self._read_whole)
        return self._whole

    def scan(self, columns: list[str] | None = None, *, phase: str | None = None, **equals: int | None) -> pa.Table:
        """Rows with these values (None = any); row groups that cannot hold any are not read.

        Args:
            columns: the columns wanted (all when None); those compared must be among them.
            phase: train, probe, eval or generate.
            equals: integer key columns and the values they must have.
        """
        return self._repeat(lambda: self._scan(columns, phase, equals))

    def key_ranges(self, *, exact: bool = False) -> list[KeyRange]:
        """Which steps the parts hold, mostly from their footers alone.

        Args:
            exact: give every step by itself (low = high) and its phase; otherwise ranges, phase None where mixed.
        """
        return self._repeat(lambda: self._key_ranges(exact))

    def ranks(self) -> set[int]:
        """The ranks that wrote parts, by their names; a part with a name not ours counts as rank 0."""
        return {part_rank(name) or 0 for name in self.files}

    def _key_ranges(self, exact: bool) -> list[KeyRange]:
        found: list[KeyRange] = []
        for file, footer in self.live():
            if (file, exact) not in self._ranges:
                self._ranges[file, exact] = self._part_ranges(file, footer, exact)
            found.extend(self._ranges[file, exact])
        return found

    def _part_ranges(self, file: PartFile, footer: Footer, exact: bool) -> list[KeyRange]:
        groups = footer.groups
        low, high = groups.low["step"], groups.high["step"]
        settled = (groups.low["segment"] == groups.high["segment"]) & (low >= 0)
        if exact:
            settled &= (low == high) & np.array([phase is not None for phase in groups.phase], dtype=bool)
        ranges = [
            KeyRange(groups.phase[group], int(groups.low["segment"][group]), int(low[group]), int(high[group]))
            for group in np.flatnonzero(settled).tolist()
        ]
        unsettled = np.flatnonzero(~settled).tolist()
        if unsettled:
            names = ["step", "phase", "segment"]
            schema = only(self._schema, names)
            there = [name for name in ("phase",) if name in footer.schema.names]
            rows = _where_it_changes(self._read(file, unsettled, names, read_dictionary=there))
            rows = fill_defaults(conform(rows, schema))
            keys = ["phase", "segment", *(["step"] if exact else [])]
            extremes = rows.group_by(keys).aggregate([("step", "min"), ("step", "max")]).to_pylist()
            ranges += [
                KeyRange(row["phase"], row["segment"], int(row["step_min"]), int(row["step_max"]))
                for row in extremes
                if row["step_min"] is not None
            ]
        return ranges

    def _repeat(self, read: Callable[[], Result]) -> Result:
        vanished = 0
        while True:
            try:
                return read()
            except _PartIsBadError:
                self._live = self._whole = None
            except FileNotFoundError:
                vanished += 1
                if not self.relist() and vanished > _ATTEMPTS:
                    raise

    def _load_footers(self) -> None:
        new = [file for file in self.files.values() if file not in self._footers and file not in self._bad]
        storage.each(self.folder, self._load_footer, new)
        good = [file for file in self.files.values() if file in self._footers and file not in self._bad]
        replaced = frozenset[str]().union(*(self._footers[file].replaces for file in good))
        live: list[PartFile] = []
        schemas: list[pa.Schema] = []
        whole_schema = unify_schema(self.table, [])
        for file in good:
            if file.name in replaced:
                continue
            schema = self._footers[file].schema
            if schema not in schemas:
                try:
                    whole_schema = unify_schema(self.table, [*schemas, schema])
                except TypeError as error:
                    self._bad[file] = f"columns do not go with the other parts: {error}"
                    continue
                schemas.append(schema)
            live.append(file)
        # A bad part that a compaction replaced is no loss: do not report it.
        self._bad = {file: reason for file, reason in self._bad.items() if file.name not in replaced}
        self._live, self._schema = live, whole_schema

    def _load_footer(self, file: PartFile) -> None:
        try:
            footer = read_footer(self.folder / file.name, file.stored)
        except _NOT_THE_PARTS_FAULT:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            self._bad[file] = first_line(error)
            return
        reason = part_problem(self.table, footer.schema)
        if reason is None:
            self._footers[file] = footer
        else:
            self._bad[file] = reason

    def _read_whole(self) -> pa.Table:
        live = [file for file, _ in self.live()]
        joined, rows = self._joined
        if live[: len(joined)] != joined:  # some were replaced
            joined, rows = [], self._schema.empty_table()
        pieces = storage.each(self.folder, lambda file: self._read(file, None, None), live[len(joined) :])
        rows = pa.concat_tables([conform(piece, self._schema) for piece in (rows, *pieces)]).combine_chunks()
        self._joined = (live, rows)
        return fill_defaults(rows)

    def _scan(self, columns: list[str] | None, phase: str | None, equals: dict[str, int | None]) -> pa.Table:
        filtered = phase is not None or any(value is not None for value in equals.values())
        live = self.live()
        schema = only(self._schema, columns)
        wanted: list[tuple[PartFile, tuple[int, ...] | None]] = []
        for file, footer in live:
            groups = tuple(footer.groups.select(phase=phase, **equals)) if filtered else None
            if groups is None or groups:
                wanted.append((file, groups))
        place = (tuple(wanted), None if columns is None else tuple(columns))
        if place != self._latest[0]:
            self._latest = (None, [])
            pieces = storage.each(self.folder, lambda part: self._read(*part, columns), wanted)
            if filtered and sum(piece.nbytes for piece in pieces) <= _LATEST_BYTES:
                self._latest = (place, pieces)
        else:  # of the same row groups another layer is wanted
            pieces = self._latest[1]
        rows = fill_defaults(pa.concat_tables([schema.empty_table(), *(conform(piece, schema) for piece in pieces)]))
        mask: Any = None
        for name, value in {"phase": phase, **equals}.items():
            if value is not None:
                test = pc.equal(rows[name], value)
                mask = test if mask is None else pc.and_(mask, test)
        return rows if mask is None else rows.filter(mask)

    def _read(
        self, file: PartFile, groups: Sequence[int] | None, columns: list[str] | None, **options: Any
    ) -> pa.Table:
        """Rows of one part; `groups` None = all. options: of `storage.parquet_file`."""
        try:
            footer = self._footers[file]
            with storage.parquet_file(self.folder / file.name, footer.metadata, file.stored, **options) as part:
                if columns is not None:
                    columns = [name for name in columns if name in footer.schema.names]
                threads = file.size > _THREADS_FROM_BYTES
                if groups is None:
                    return part.read(columns, use_threads=threads)
                return part.read_row_groups(groups, columns, use_threads=threads)
        except _NOT_THE_PARTS_FAULT:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            self._bad[file] = first_line(error)
            raise _PartIsBadError from None


class _PartIsBadError(Exception):
    """A part turned out to be damaged past its footer; it is noted, the read starts again without it."""


def _where_it_changes(rows: pa.Table) -> pa.Table:
    """The rows that differ from the one before, and the first. rows: of numbers and dictionaries."""
    changes = np.zeros(rows.num_rows, dtype=bool)
    changes[:1] = True
    for column in rows.columns:
        whole = column.combine_chunks()
        values = (whole.indices if pa.types.is_dictionary(whole.type) else whole).to_numpy(zero_copy_only=False)
        changes[1:] |= values[1:] != values[:-1]
    return rows.take(np.flatnonzero(changes))


def fill_defaults(rows: pa.Table) -> pa.Table:
    """Rows with defaults in place of nulls where an older writer gave no phase, rank or segment."""
    for name, default in _DEFAULTS.items():
        if name in rows.column_names and rows[name].null_count:
            filled = pc.fill_null(rows[name], pa.scalar(default, rows.schema.field(name).type))
            rows = rows.set_column(rows.schema.get_field_index(name), name, filled)
    return rows


def first_line(error: BaseException) -> str:
    """What an error says, cut to a line; its type where it says nothing."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
