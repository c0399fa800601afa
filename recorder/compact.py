"""Many small parts into few, such that a crash at any moment loses and doubles nothing."""

from collections.abc import Iterable

import pyarrow as pa

from recorder import storage
from recorder.parts import (
    Footer,
    PartFile,
    list_parts,
    next_sequence,
    part_name,
    part_rank,
    read_footer,
    remove_parts,
    write_part,
)
from recorder.schema import conform, part_problem, unify_schema
from recorder.storage import Place, StorageError

#: A compacted part is made of parts of at most this many bytes in memory (as Parquet pages) and rows together.
MAX_BYTES = 256 << 20
MAX_ROWS = 4_000_000
_THREADS_FROM_BYTES = 1 << 20


def compact_table(folder: Place, table: str, rank: int, *, max_rows: int = MAX_ROWS) -> None:
    """Join one rank's parts of a table into few.

    Each new part names in its footer the parts it replaces and everything those had replaced; it counts, and they
    do not, from its rename on. Only then are they deleted. Parts that cannot be read are left as they are.
    No other process may write parts of this rank meanwhile.

    Args:
        folder: the table's folder; nothing happens without one.
        table: one of `schema.TABLES`.
        rank: whose parts.
        max_rows: rows a new part may hold; a single part that has more stays as it is.
    """
    listed = list_parts(folder)
    mine = [name for name in listed if part_rank(name) == rank]
    found = storage.each(folder, lambda name: _sound_footer(folder / name, listed[name], table), mine)
    footers = {name: footer for name, footer in zip(mine, found, strict=True) if footer is not None}
    replaced = frozenset[str]().union(*(footer.replaces for footer in footers.values()))
    remove_parts(folder, replaced)  # left by a crash between a rename and its deletions
    live = {name: footer for name, footer in footers.items() if name not in replaced}
    sequence = next_sequence(folder, rank)
    for batch in _batches(live, max_rows):
        schema = unify_schema(table, [live[name].schema for name in batch])
        pieces = storage.each(folder, lambda name: _read(folder / name, listed[name]), batch)
        rows = pa.concat_tables([conform(piece, schema) for piece in pieces])
        gone = frozenset(batch).union(*(live[name].replaces for name in batch))
        write_part(folder / part_name(rank, sequence), table, rows, replaces=gone)
        sequence += 1
        remove_parts(folder, gone)


def _sound_footer(path: Place, file: PartFile, table: str) -> Footer | None:
    """The footer of a part of this table; None where the file is no such thing."""
    try:
        footer = read_footer(path, file.stored)
    except StorageError:  # says nothing about the part
        raise
    except (pa.ArrowException, OSError, ValueError):
        return None
    return footer if part_problem(table, footer.schema) is None else None


def _read(path: Place, file: PartFile) -> pa.Table:
    with storage.parquet_file(path, stored=file.stored) as part:
        return part.read(use_threads=file.size > _THREADS_FROM_BYTES)


def _batches(live: dict[str, Footer], max_rows: int) -> Iterable[list[str]]:
    """Neighbouring parts that fit one new part together, where there are at least two."""
    batch: list[str] = []
    rows = size = 0
    for name, footer in live.items():
        part_size = sum(
            footer.metadata.row_group(group).total_byte_size for group in range(footer.metadata.num_row_groups)
        )
        if batch and (rows + footer.num_rows > max_rows or size + part_size > MAX_BYTES):
            if len(batch) > 1:
                yield batch
            batch, rows, size = [], 0, 0
        batch.append(name)
        rows += footer.num_rows
        size += part_size
    if len(batch) > 1:
        yield batch
