"""Counts that add up: what one task of the analysis hands back, and what the whole run's result is a sum of.

Each count is an array under a key: which table, phase, layer and router it belongs to, and a `detail` (a domain, the
next router). Two of one key are added cell by cell, the smaller one filled up with zeros; so a count may grow (more
positions, experts nobody knew of). Counts by token id, of which there may be very many, are kept sparse.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

#: So many times as wide as there are cells, a span of them is counted without sorting.
_DENSE_CELLS = 4

SCHEMA = pa.schema(
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
    """How often each of many integers (cells of a large array) was seen.

    Args:
        cells: ascending; none = nothing seen yet.
        counts: how often each was seen.
    """

    def __init__(self, cells: np.ndarray | None = None, counts: np.ndarray | None = None) -> None:
        nothing = np.empty(0, dtype=np.int32)
        self._cells = nothing if cells is None else _narrow(cells)
        self._counts = nothing if counts is None else _narrow(counts)

    def see(self, cells: np.ndarray) -> None:
        """Count these, each once; many at once for speed."""
        self.add(Sparse(*_counted(cells)))

    def add(self, other: "Sparse") -> None:
        """Add what the other has counted."""
        cells, counts = other.items()
        if not len(self._cells) or not len(cells):
            self._cells, self._counts = (self._cells, self._counts) if len(self._cells) else (cells, counts)
            return
        both = np.concatenate([self._cells, cells])
        order = np.argsort(both, kind="stable")  # two sorted runs: it merges them in one pass
        both, times = both[order], np.concatenate([self._counts, counts])[order].astype(np.int64)
        first = np.append(True, both[1:] != both[:-1])
        second = np.flatnonzero(~first)  # no cell is there a third time
        times[second - 1] += times[second]
        self._cells, self._counts = both[first], _narrow(times[first])

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """The cells seen, ascending, and how often; int32, or int64 where the largest takes that."""
        return self._cells, self._counts


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
        """Add all of another's counts, of which it keeps no sparse one: two of all would be much at once."""
        for key, counts in other.arrays.items():
            self.add(key, counts)
        while other.sparse:
            key, sparse = other.sparse.popitem()
            self.sparse.setdefault(key, Sparse()).add(sparse)
        self.texts = other.texts | self.texts

    def named(self, name: str) -> Iterator[tuple[Key, np.ndarray]]:
        """The arrays of one name, by phase, layer, router and detail."""
        for key in sorted(key for key in self.arrays if key.name == name):
            yield key, self.arrays[key]

    def __getstate__(self) -> pa.Table:
        """As it travels between processes: the same as it is stored."""
        return pa.Table.from_batches(self.batches())

    def __setstate__(self, table: pa.Table) -> None:
        self.__init__()  # type: ignore[misc]
        self._fill(table.to_batches())

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All of it in Arrow, to be stored or sent; each sparse count by itself, as they are large."""
        rows = []
        for key, counts in sorted(self.arrays.items()):
            values = "real" if counts.dtype.kind == "f" else "whole"
            rows.append(key._asdict() | {"shape": counts.shape, values: counts.ravel()})
        if self.texts:
            key = Key("texts", "", -1, -1)
            rows.append(key._asdict() | {"cells": list(self.texts), "texts": list(self.texts.values())})
        yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
        for key, sparse in sorted(self.sparse.items()):
            row = pa.RecordBatch.from_pylist([key._asdict()], schema=SCHEMA)
            for name, numbers in zip(("cells", "whole"), sparse.items(), strict=True):
                one = pa.ListArray.from_arrays([0, len(numbers)], pa.array(numbers, pa.int64()))
                row = row.set_column(SCHEMA.get_field_index(name), name, one)
            yield row

    @classmethod
    def from_batches(cls, batches: Iterable[pa.RecordBatch]) -> "Counts":
        """What `batches` gave."""
        counts = cls()
        counts._fill(batches)
        return counts

    def _fill(self, batches: Iterable[pa.RecordBatch]) -> None:
        for batch in batches:
            keys = batch.select(list(Key._fields)).to_pylist()
            for row, fields in enumerate(keys):
                self._fill_one(Key(**fields), {name: batch[name][row] for name in batch.schema.names[len(fields) :]})

    def _fill_one(self, key: Key, lists: dict[str, pa.ListScalar]) -> None:
        texts = lists.pop("texts")
        numbers = {name: item.values.to_numpy(zero_copy_only=False) for name, item in lists.items() if item.is_valid}
        if "shape" in numbers:
            self.arrays[key] = numbers["whole" if "whole" in numbers else "real"].reshape(numbers["shape"])
        elif "whole" in numbers:
            self.sparse[key] = Sparse(numbers["cells"], numbers["whole"])
        else:
            self.texts = dict(zip(numbers["cells"].tolist(), texts.as_py(), strict=True))


def _narrow(numbers: np.ndarray) -> np.ndarray:
    """The same in int32, where they fit: half the memory of what there is most of."""
    fits = not len(numbers) or numbers.max() <= np.iinfo(np.int32).max
    return numbers.astype(np.int32, copy=False) if fits else numbers


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
