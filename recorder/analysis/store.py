"""Where results of the analysis are kept: `analysis/` in the run's folder, Parquet files only.

`partials/` holds the counts of each job under the job's name, and the folder itself the tables made of their sum. Each
table's footer tells which parts it was made of, by the plan's digest.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recorder import storage
from recorder.analysis.counts import SCHEMA, Counts
from recorder.analysis.tables import BY_TOKEN
from recorder.parts import RowGroups
from recorder.storage import Place, StorageError

FOLDER = "analysis"
_PARTIALS = "partials"
_DIGEST = b"routescope.analysis"
#: How partial results are written: cells ascend, and most counts are small.
_OF_PARTIALS: Mapping[str, Any] = MappingProxyType(
    {
        "compression": "zstd",
        "use_dictionary": ["name", "phase", "detail"],
        "column_encoding": {f"{name}.list.element": "DELTA_BINARY_PACKED" for name in ("cells", "whole")},
    }
)
#: The columns by whose ranges row groups are chosen; of large tables each router has its own.
_PLACE = ("phase", "layer", "router")
#: So many counts of a job are read at once.
_BATCH_ROWS = 16
#: At most so many rows are read at once.
_GROUP_ROWS = 1 << 14


class Store:
    """Results of one run's analysis.

    Args:
        run: the run's folder.
    """

    def __init__(self, run: Place) -> None:
        self._folder = run / FOLDER
        self._partials = self._folder / _PARTIALS

    def partials(self) -> dict[str, int]:
        """When the counts of each job that are there were written, in nanoseconds, by the job's name."""
        there = storage.files(self._partials, ".parquet")
        return {name.removesuffix(".parquet"): stored.mtime_ns for name, stored in there.items()}

    def read_partial(self, name: str) -> Counts | None:
        """The counts of a job; None where they cannot be read and have to be made again."""
        try:
            with storage.parquet_file(self._partials / f"{name}.parquet") as file:
                return Counts.from_batches(file.iter_batches(_BATCH_ROWS, use_threads=False))
        except StorageError:
            raise
        except (OSError, ValueError, pa.ArrowException):
            return None

    def write_partial(self, name: str, counts: Counts) -> None:
        """Keep the counts of a job. Raises OSError where that cannot be done."""
        storage.make_folder(self._folder)
        storage.make_folder(self._partials)

        def write(file: Any) -> None:
            with pq.ParquetWriter(file, SCHEMA, **_OF_PARTIALS) as writer:
                for batch in counts.batches():
                    writer.write_batch(batch)

        storage.write(self._partials / f"{name}.parquet", write)

    def write_tables(self, tables: Mapping[str, pa.Table], digest: str, jobs: Iterable[str]) -> None:
        """Keep the tables, and of the partial results only those of these jobs.

        Raises:
            OSError: that cannot be done.
        """
        storage.make_folder(self._folder)
        for name, table in tables.items():
            marked = table.replace_schema_metadata({_DIGEST: digest.encode()})

            def write(file: Any, name: str = name, marked: pa.Table = marked) -> None:
                with pq.ParquetWriter(file, marked.schema, compression="zstd") as writer:
                    for rows in _by_router(marked) if name in BY_TOKEN else [marked]:
                        writer.write_table(rows, row_group_size=_GROUP_ROWS)

            storage.write(self._folder / f"{name}.parquet", write)
        storage.remove(self._partials, [f"{name}.parquet" for name in self.partials().keys() - set(jobs)])

    def tables_written(self) -> int | None:
        """When the first of the tables that are there was written, in nanoseconds; None where there are none."""
        return min((stored.mtime_ns for stored in storage.files(self._folder, ".parquet").values()), default=None)

    def read_table(
        self,
        name: str,
        digest: str,
        equals: Mapping[str, Any] = MappingProxyType({}),
        columns: Sequence[str] | None = None,
    ) -> pa.Table | None:
        """One of the tables; None where it is not there or was made of other parts.

        Args:
            name: of the table.
            digest: of the plan that it must be of.
            equals: only row groups that may hold rows with these values.
            columns: None = all.
        """
        try:
            with storage.parquet_file(self._folder / f"{name}.parquet") as file:
                if (file.metadata.metadata or {}).get(_DIGEST) != digest.encode():
                    return None
                place = {column: equals[column] for column in _PLACE if column in equals}
                groups = RowGroups(file.metadata).select(**place)
                rows = file.read_row_groups(groups, columns, use_threads=False)
                return rows.replace_schema_metadata(None)
        except StorageError:
            raise
        except (OSError, ValueError, pa.ArrowException):
            return None


def _by_router(table: pa.Table) -> list[pa.Table]:
    """The rows of each router in each phase, which stand together."""
    places = [table[name].combine_chunks().dictionary_encode().indices.to_numpy() for name in _PLACE]
    changes = np.any([place[1:] != place[:-1] for place in places], axis=0)
    ends = [0, *(np.flatnonzero(changes) + 1).tolist(), table.num_rows]
    return [table.slice(start, stop - start) for start, stop in pairwise(ends)]
