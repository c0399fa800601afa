"""Many small parts into few, such that a crash at any moment loses and doubles nothing."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from recorder import storage
from recorder.manifest import STALE_AFTER_S, RunExistsError, leftover_manifests, read_manifest, run_status
from recorder.parts import (
    Footer,
    PartFile,
    list_parts,
    next_sequence,
    part_name,
    part_rank,
    read_footer,
    remove_leftovers,
    remove_parts,
    write_part,
)
from recorder.schema import TABLES, conform, part_problem, unify_schema
from recorder.storage import Place, StorageError

#: A compacted part is made of parts of at most this many bytes (as Parquet pages) and rows together: what a process
#: that closes its run has to hold in memory, some three times over.
MAX_BYTES = 64 << 20
MAX_ROWS = 1 << 20
_THREADS_FROM_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """How many part files a run had and has, and their bytes on disk."""

    parts_before: int
    parts_after: int
    bytes_before: int
    bytes_after: int


def compact_run(path: Place) -> Compaction:
    """Join the small parts that a run which ended without being closed has left, and delete its temporary files.

    A resume of the run waits until this is done, where there are locks: in an object store, see to it that nobody
    resumes the run meanwhile. Interrupted at any moment, the run reads as before.

    Raises:
        RunExistsError: somebody still writes to it.
        RunNotFoundError, RunUnreadableError: no run there, or none that can be read.
        OSError: a part cannot be written; the run reads as before.
    """
    read_manifest(path)  # a folder without a run cannot be locked either
    with storage.lock(path):
        manifest = read_manifest(path)  # whoever held the lock may have resumed the run
        if run_status(manifest) == "running":
            writer = (manifest.get("process") or {}).get("pid")
            by = f" by process {writer}" if writer else ""
            raise RunExistsError(f"{path} is still being written{by}; a run compacts itself when it ends")
        before = _all_parts(path)
        refuse_other_ranks_at_work(path, manifest)
        storage.remove(path, leftover_manifests(path))
        for table in TABLES:
            remove_leftovers(path / table)
            for rank in sorted({rank for name in list_parts(path / table) if (rank := part_rank(name)) is not None}):
                compact_table(path / table, table, rank)
        after = _all_parts(path)
    return Compaction(
        parts_before=len(before),
        parts_after=len(after),
        bytes_before=sum(part.size for part in before),
        bytes_after=sum(part.size for part in after),
    )


def _all_parts(path: Place) -> list[PartFile]:
    return [part for table in TABLES for part in list_parts(path / table).values()]


def refuse_other_ranks_at_work(path: Place, manifest: dict[str, object]) -> None:
    """run.json tells of rank 0 alone: where that one was killed, the others may still be writing.

    Raises:
        RunExistsError: a part of another rank is younger than `STALE_AFTER_S`.
    """
    if manifest.get("status") != "running":
        return
    newest = max(
        (part for part in _all_parts(path) if part_rank(part.name)), key=lambda part: part.mtime_ns, default=None
    )
    age = time.time() - newest.mtime_ns / 1e9 if newest else STALE_AFTER_S
    if newest is not None and age < STALE_AFTER_S:
        raise RunExistsError(
            f"rank {part_rank(newest.name)} wrote to {path} {age:.0f} s ago and may still be at it; "
            f"try again after {STALE_AFTER_S:.0f} s without a new part"
        )


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
        read = storage.each(folder, lambda name: _read(folder / name, listed[name]), batch)
        pieces = {name: rows for name, rows in zip(batch, read, strict=True) if rows is not None}
        if len(pieces) < 2:
            continue
        try:
            schema = unify_schema(table, [rows.schema for rows in pieces.values()])
        except TypeError:  # parts that do not go together: readers name them
            continue
        rows = pa.concat_tables([conform(piece, schema) for piece in pieces.values()])
        gone = frozenset(pieces).union(*(live[name].replaces for name in pieces))
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


def _read(path: Place, file: PartFile) -> pa.Table | None:
    """All rows of a part; None where it is damaged past its footer."""
    try:
        with storage.parquet_file(path, stored=file.stored, page_checksum_verification=True) as part:
            return part.read(use_threads=file.size > _THREADS_FROM_BYTES)
    except StorageError:
        raise
    except (pa.ArrowException, OSError, ValueError):
        return None


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
