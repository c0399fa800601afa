"""Counts that add up: what one task of the analysis hands back, and what the whole run's result is a sum of.

Each count is an array under a key: which table, phase, layer and router it belongs to, and a `detail` (a domain, the
next router). Two of one key are added cell by cell, the smaller one filled up with zeros; so a count may grow (more
positions, experts nobody knew of). Counts by token id, of which there may be very many, are kept sparse.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

#: How many keys wait before they are counted; and how wide a span of them is counted cell by cell.
_PENDING = 1 << 21
_DENSE_CELLS = 4

_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("phase", pa.string()),
        ("layer", pa.int32()),
        ("router", pa.int32()),
        ("detail", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("cells", pa.list_(pa.int64())),
        ("whole", pa.list_(pa.int64())),
        ("real", pa.list_(pa.float64())),
        ("texts", pa.list_(pa.string())),
    ]
)


class Key(NamedTuple):
    """Whose count it is."""

    name: str
    phase: str
    layer: int
    router: int
    detail: str = ""


class Sparse:
    """How often each of many integers (cells of a large array) was seen."""

    def __init__(self, cells: np.ndarray | None = None, counts: np.ndarray | None = None) -> None:
        self._cells = np.empty(0, dtype=np.int64) if cells is None else cells  # ascending
        self._counts = np.empty(0, dtype=np.int64) if counts is None else counts
        self._pending: list[np.ndarray] = []
        self._waiting = 0

    def see(self, cells: np.ndarray) -> None:
        """Count these, each once."""
        self._pending.append(cells)
        self._waiting += len(cells)
        if self._waiting >= _PENDING:
            self._settle()

    def add(self, other: "Sparse") -> None:
        """Add what the other has counted."""
        cells, counts = other.items()
        self._settle()
        self._merge(cells, counts)

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """The cells seen, ascending, and how often, int64."""
        self._settle()
        return self._cells, self._counts

    def _settle(self) -> None:
        if self._pending:
            seen = np.concatenate(self._pending)
            self._pending, self._waiting = [], 0
            self._merge(*_counted(seen))

    def _merge(self, cells: np.ndarray, counts: np.ndarray) -> None:
        if not len(self._cells) or not len(cells):
            self._cells, self._counts = (self._cells, self._counts) if len(self._cells) else (cells, counts)
            return
        # two sorted runs: a stable sort merges them in one pass
        both = np.concatenate([self._cells, cells])
        order = np.argsort(both, kind="stable")
        both = both[order]
        starts = np.flatnonzero(np.append(True, both[1:] != both[:-1]))
        self._cells = both[starts]
        self._counts = np.add.reduceat(np.concatenate([self._counts, counts])[order], starts)


class Counts:
    """Arrays and sparse counts by key, and the text of each token id."""

    def __init__(self) -> None:
        self.arrays: dict[Key, np.ndarray] = {}
        self.sparse: dict[Key, Sparse] = {}
        self.texts: dict[int, str] = {}

    def add(self, key: Key, counts: np.ndarray) -> None:
        """Add an array: int64, or float64 where it is no count."""
        there = self.arrays.get(key)
        if there is None:
            self.arrays[key] = counts
        elif there.shape == counts.shape:
            self.arrays[key] = there + counts
        else:
            shape = tuple(np.maximum(there.shape, counts.shape))
            self.arrays[key] = _filled_up(there, shape) + _filled_up(counts, shape)

    def see(self, key: Key, cells: np.ndarray) -> None:
        """Count the cells of a sparse count, each once."""
        self.sparse.setdefault(key, Sparse()).see(cells)

    def merge(self, other: "Counts") -> None:
        """Add all of another's counts."""
        for key, counts in other.arrays.items():
            self.add(key, counts)
        for key, sparse in other.sparse.items():
            self.sparse.setdefault(key, Sparse()).add(sparse)
        self.texts = other.texts | self.texts

    def named(self, name: str) -> Iterator[tuple[Key, np.ndarray]]:
        """The arrays of one name, by phase, layer, router and detail."""
        for key in sorted(key for key in self.arrays if key.name == name):
            yield key, self.arrays[key]

    def __getstate__(self) -> pa.Table:
        """As it travels between processes: the same as it is stored."""
        return self.as_table()

    def __setstate__(self, table: pa.Table) -> None:
        self.__init__()  # type: ignore[misc]
        self._fill(table)

    def as_table(self) -> pa.Table:
        """All of it as one Arrow table, to be stored or sent."""
        rows = []
        for key, counts in sorted(self.arrays.items()):
            values = "real" if counts.dtype.kind == "f" else "whole"
            rows.append(key._asdict() | {"shape": counts.shape, values: counts.ravel()})
        for key, sparse in sorted(self.sparse.items()):
            cells, times = sparse.items()
            rows.append(key._asdict() | {"cells": cells, "whole": times})
        if self.texts:
            key = Key("texts", "", -1, -1)
            rows.append(key._asdict() | {"cells": list(self.texts), "texts": list(self.texts.values())})
        return pa.Table.from_pylist(rows, schema=_SCHEMA)

    @classmethod
    def from_table(cls, table: pa.Table) -> "Counts":
        """What `as_table` gave."""
        counts = cls()
        counts._fill(table)
        return counts

    def _fill(self, table: pa.Table) -> None:
        lists = {name: table[name].combine_chunks() for name in ("shape", "cells", "whole", "real", "texts")}
        names = table.select(list(Key._fields)).to_pylist()
        for row, fields in enumerate(names):
            key = Key(**fields)

            def values(name: str, row: int = row) -> np.ndarray | None:
                item = lists[name][row]
                return item.values.to_numpy(zero_copy_only=False) if item.is_valid else None

            shape, cells, whole = values("shape"), values("cells"), values("whole")
            if shape is not None:
                flat = whole if whole is not None else values("real")
                assert flat is not None
                self.arrays[key] = flat.reshape(shape)
            elif whole is not None:
                self.sparse[key] = Sparse(cells, whole)
            else:
                assert cells is not None
                self.texts = dict(zip(cells.tolist(), lists["texts"][row].as_py(), strict=True))


def _counted(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values, ascending, and how often each is there."""
    if not len(seen):
        return seen, seen
    low = int(seen.min())
    if int(seen.max()) - low < _DENSE_CELLS * len(seen):  # counting beats sorting
        times = np.bincount(seen - low)
        found = np.flatnonzero(times)
        return found + low, times[found]
    seen = np.sort(seen)
    starts = np.flatnonzero(np.append(True, seen[1:] != seen[:-1]))
    return seen[starts], np.diff(np.append(starts, len(seen)))


def _filled_up(counts: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    larger = np.zeros(shape, dtype=counts.dtype)
    larger[tuple(slice(length) for length in counts.shape)] = counts
    return larger
