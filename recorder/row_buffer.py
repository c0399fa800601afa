"""Rows that wait to be written, table by table, and how many of them make one part of bounded size."""

from typing import Any

import numpy as np
import pyarrow as pa

from recorder import buffers, checks
from recorder.schema import TABLES

#: What a row of plain Python values takes beside its arrays: some twenty numbers and the dict that holds them.
_PLAIN_ROW_BYTES = 1024


class RowBuffer:
    """Owns the rows of every table that no part holds yet.

    Args:
        part_bytes: most bytes, as they lie in memory, of the rows that `next_part` hands out. On disk they take less.
    """

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._waiting: dict[str, list[pa.Table | dict[str, Any]]] = {table: [] for table in TABLES}
        self.set_aside: list[str] = []  # what became of rows that no part can hold, for the caller to tell and clear
        self.num_rows = 0
        self.num_bytes = 0

    def add(self, table: str, rows: pa.Table | dict[str, Any]) -> None:
        """Take one row (a dict) or several (a table). Rows of more bytes than a part may have are cut into pieces."""
        if isinstance(rows, dict):
            self._waiting[table].append(rows)
        else:
            pieces = -(-rows.nbytes // self._part_bytes)
            length = -(-rows.num_rows // max(1, pieces))
            self._waiting[table] += [rows.slice(start, length) for start in range(0, rows.num_rows, length)]
        self.num_rows += _count(rows)
        self.num_bytes += _size(rows)

    def next_part(self, table: str, *, rank: int, segment: int) -> tuple[pa.Table, int] | None:
        """The longest waiting rows of a table that fit one part, and how many entries they are; None when none wait.

        They stay until `written`, so that a write that failed is tried again with nothing lost. An entry that Arrow
        refuses (a number of more than 64 bits) is dropped and noted in `set_aside`: it would block all that follow.
        """
        waiting = self._waiting[table]
        limit = len(waiting)
        while waiting:
            entries, size = 1, _size(waiting[0])
            while entries < min(limit, len(waiting)) and size + _size(waiting[entries]) <= self._part_bytes:
                size += _size(waiting[entries])
                entries += 1
            try:
                return buffers.assemble(table, waiting[:entries], rank=rank, segment=segment), entries
            except (ArithmeticError, TypeError, ValueError, pa.ArrowException) as error:
                if entries == 1:
                    count = _count(waiting[0])
                    self.set_aside.append(f"{count} rows of {table} cannot be written: {checks.shown(error, str)}")
                    self.written(table, 1)
                limit = 1  # one by one, so that the others are written
        return None

    def written(self, table: str, entries: int) -> None:
        """Let go of the first entries of a table: a part holds them."""
        for rows in self._waiting[table][:entries]:
            self.num_rows -= _count(rows)
            self.num_bytes -= _size(rows)
        del self._waiting[table][:entries]


def _size(rows: pa.Table | dict[str, Any]) -> int:
    """Bytes that rows take while they wait."""
    if isinstance(rows, dict):
        return _PLAIN_ROW_BYTES + sum(value.nbytes for value in rows.values() if isinstance(value, np.ndarray))
    return int(rows.nbytes)


def _count(rows: pa.Table | dict[str, Any]) -> int:
    return 1 if isinstance(rows, dict) else rows.num_rows
