"""What one part file of `layer_stats` adds to the counts of the run: every step, not only those with decisions."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recorder import storage
from recorder.analysis.counts import Counts, Key
from recorder.catalog import fill_defaults
from recorder.merge import drop_superseded
from recorder.parts import PartFile
from recorder.schema import SCHEMAS, conform, lists_to_matrix, only
from recorder.storage import Place

_BATCH_ROWS = 1 << 12
_COLUMNS = ["step", "phase", "layer", "router", "tokens", "load", "router_entropy", "rank", "segment"]


@dataclass(frozen=True, kw_only=True)
class StatsTask:
    """One task: parts of `layer_stats`."""

    run: Place
    parts: tuple[PartFile, ...]
    segment_starts: Mapping[int, int]
    router_of_layer: Mapping[int, int]

    def count(self) -> Counts:
        """Read the parts once and sum.

        Raises:
            OSError, ValueError, pa.ArrowException: a part cannot be read.
        """
        counts = Counts()
        schema = only(SCHEMAS["layer_stats"], _COLUMNS)
        for part in self.parts:
            with storage.parquet_file(self.run / "layer_stats" / part.name, stored=part.stored) as file:
                there = [name for name in _COLUMNS if name in file.schema_arrow.names]
                for batch in file.iter_batches(_BATCH_ROWS, columns=there, use_threads=False):
                    rows = fill_defaults(conform(pa.Table.from_batches([batch]), schema))
                    self._count(counts, drop_superseded(rows, self.segment_starts))
        return counts

    def _count(self, counts: Counts, rows: pa.Table) -> None:
        keys = ["phase", "layer", "router"]
        for place in rows.select(keys).group_by(keys).aggregate([]).to_pylist():
            mask = pc.equal(rows["layer"], place["layer"])
            for name in ("phase", "router"):
                same = pc.is_null(rows[name]) if place[name] is None else pc.equal(rows[name], place[name])
                mask = pc.and_kleene(mask, same)
            mine = rows.filter(mask)
            layer = place["layer"]
            router = self.router_of_layer.get(layer, layer) if place["router"] is None else place["router"]
            of = (place["phase"], layer, router)
            load = lists_to_matrix(mine["load"]).sum(axis=0)
            tokens = pc.fill_null(mine["tokens"], 0).to_numpy().astype(np.int64)
            entropy = mine["router_entropy"].to_numpy()  # null and NaN alike: nothing to average
            known = np.isfinite(entropy)
            counts.add(Key("stats_load", *of), np.rint(load).astype(np.int64))
            counts.add(Key("stats_tokens", *of), np.array([tokens.sum(), tokens[known].sum()]))
            counts.add(Key("stats_entropy", *of), np.array([(entropy[known] * tokens[known]).sum()]))
