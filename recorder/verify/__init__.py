"""Is a run whole? Every part read to its last byte, and its rows held against each other and against run.json."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pyarrow as pa

from recorder import storage
from recorder.catalog import TableReader
from recorder.manifest import RunUnreadableError, leftover_manifests, read_manifest
from recorder.parts import leftovers, part_rank
from recorder.schema import SCHEMAS, TABLES
from recorder.storage import Place, StorageError, Where
from recorder.verify.across import Across
from recorder.verify.expected import Expected
from recorder.verify.findings import Findings, Problem
from recorder.verify.rows import Checker

__all__ = ["Problem", "Report", "verify_run"]

#: `steps` first: a writer puts them down last, so that what is there then has its other rows already.
_ORDER = ("steps", "layer_stats", "decisions", "tokens", "events")
_BATCH_ROWS = 1 << 17
_ATTEMPTS = 100
_MOST_NAMED = 32  # ranks without parts that are named one by one


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `verify_run` read and found.

    `notes` are no faults: what an unfinished run has lost, and what a killed process left lying about.
    """

    path: Place
    run_id: str
    status: str
    parts: int
    rows: int
    size: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def summary(self) -> str:
        """One line for a run without problems."""
        read = f"{self.parts} parts, {self.rows:,} rows, {self.size / 1e6:.1f} MB"
        return f"{self.path} ({self.status}): {read} read to the last byte, nothing wrong"

    def as_json(self) -> dict[str, Any]:
        """As plain values, for `routescope verify --json`."""
        return {
            "run_id": self.run_id,
            "path": str(self.path),
            "status": self.status,
            "ok": not self.problems,
            "parts": self.parts,
            "rows": self.rows,
            "bytes": self.size,
            "problems": [{"file": problem.file, "problem": problem.text} for problem in self.problems],
            "notes": list(self.notes),
        }


def verify_run(path: Where) -> Report:
    """Read every part of a run, batch by batch, and check its rows.

    Found are: parts that cannot be read or are of another schema; keys that are there twice; numbers of experts, ids,
    choices, loads and token numbers that do not go together, within a table, between tables or with run.json; steps
    without the rows of a router; ranks without parts. What an interrupted writer had not finished is no fault. The
    run may be one that is being written. Memory holds one batch and some hundred bytes a step, router and rank.

    Raises:
        RunNotFoundError: no run at this path.
    """
    path = storage.locate(path)
    findings = Findings()
    try:
        manifest = read_manifest(path)
    except RunUnreadableError as error:
        text = str(error).removeprefix(f"{path / 'run.json'} ").removeprefix(f"{path}: run.json ")
        problem = Problem(file="run.json", text=text)
        unread = {"run_id": path.name, "status": "unreadable", "parts": 0, "rows": 0, "size": 0}
        return Report(path=path, problems=(problem,), notes=(), **unread)  # type: ignore[arg-type]
    expected = Expected(manifest)
    expected.check_manifest(findings)
    readers: dict[str, TableReader] = {}
    digests: dict[str, pd.DataFrame] = {}
    parts = rows = size = 0
    writers: set[int] = set()
    for table in _ORDER:
        readers[table] = reader = TableReader(path / table, table)
        digests[table], found = _read_table(reader, expected)
        findings.update(found)
        for line in reader.problems:
            file, _, text = line.partition(": ")
            findings.add(file, text)
        writers |= _silent_writers(reader, digests[table])
        parts += len(reader.live())
        rows += sum(footer.num_rows for _, footer in reader.live())
        size += reader.size
    Across(expected, findings, readers, digests).check()
    notes = _notes(path, expected) + _told_by_the_recorder(readers["events"])
    for fault in _wrong_ranks(expected, digests, writers):
        if expected.closed:
            findings.add("run.json", fault)
        else:
            notes.append(fault)
    return Report(
        path=path,
        run_id=str(manifest.get("run_id") or path.name),
        status=expected.status,
        parts=parts,
        rows=rows,
        size=size,
        problems=findings.problems(("run.json", *TABLES)),
        notes=tuple(notes),
    )


def _read_table(reader: TableReader, expected: Expected) -> tuple[pd.DataFrame, Findings]:
    """The digest of all live parts of a table; begun anew where a compaction replaced parts meanwhile."""
    for _ in range(_ATTEMPTS):
        findings = Findings()
        checker = Checker(reader.table, expected, findings)
        digests = [_named(checker.digest(SCHEMAS[reader.table].empty_table(), ""), "", 0)]
        try:
            for file, _ in reader.live():
                place = f"{reader.table}/{file.name}"
                try:
                    for batch in _batches(reader.folder / file.name):
                        digests.append(_named(checker.digest(batch, file.name), place, part_rank(file.name) or 0))
                except _UnreadableError as error:
                    findings.add(place, f"cannot be read: {error}")
        except FileNotFoundError:
            reader.relist()
            continue
        return pd.concat(digests, ignore_index=True), findings
    raise FileNotFoundError(f"parts of {reader.folder} vanish faster than they can be read")


class _UnreadableError(Exception):
    """A part that is damaged past its footer."""


def _batches(path: Place) -> Iterator[pa.Table]:
    try:
        with storage.parquet_file(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                yield pa.Table.from_batches([batch])
    except (FileNotFoundError, StorageError):
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _UnreadableError(next(iter(str(error).splitlines()), type(error).__name__)) from None


def _named(digest: pd.DataFrame, file: str, writer: int) -> pd.DataFrame:
    return digest.assign(file=file, writer=writer)


def _silent_writers(reader: TableReader, digest: pd.DataFrame) -> set[int]:
    """Ranks that have parts but no rows: an empty share, or parts that cannot be read."""
    return {part_rank(name) or 0 for name in reader.files} - set(digest["writer"])


def _wrong_ranks(expected: Expected, digests: dict[str, pd.DataFrame], silent: set[int]) -> list[str]:
    """Ranks of the last segment against run.json's world_size."""
    if expected.world_size is None:
        return []
    wrote: set[int] = set()
    for digest in digests.values():
        wrote |= set(digest.loc[digest["segment"] == expected.segment, "writer"].tolist())
    if not wrote:
        return []
    told = f"world_size is {expected.world_size}"
    foreign = sorted(rank for rank in wrote if rank >= expected.world_size)
    told_of = [f"{told}, but rank {rank} has parts" for rank in foreign]
    there = sum(rank < expected.world_size for rank in wrote | silent)
    if expected.world_size - there > _MOST_NAMED:  # a manifest can say any number
        return [f"{told}, but {expected.world_size - there} ranks have no parts", *told_of]
    missing = sorted(set(range(expected.world_size)) - wrote - silent)
    return [f"{told}, but rank {rank} has no parts" for rank in missing] + told_of


def _told_by_the_recorder(events: TableReader) -> list[str]:
    """What the recorder itself could not do: rows that were never written cannot be missed."""
    rows = events.whole().to_pandas()
    told = rows[rows["kind"].isin(["recorder_error", "decisions_dropped"])]
    return [
        f"{len(group)} events {kind}, the first at step {group['step'].iloc[0]}: {group['message'].iloc[0]}"
        for kind, group in told.groupby("kind")
    ]


def _notes(path: Place, expected: Expected) -> list[str]:
    notes = []
    if expected.status == "unfinished":
        notes.append("the run was never closed: what was not yet written when it stopped is lost")
    if expected.status != "running":
        left = [f"{table}/{name}" for table in TABLES for name in leftovers(path / table)]
        left += leftover_manifests(path)
        if left:
            notes.append(f"{len(left)} temporary files were left by a killed process: `compact` removes them")
    return notes
