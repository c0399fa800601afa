"""Read a run: manifest, tables as pandas frames on Arrow dtypes, loads as arrays. Loads no torch.

Shapes: E experts, K top-k, T tokens.
"""

import json
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from recorder import merge, storage
from recorder.about import About, read_about
from recorder.catalog import TableReader
from recorder.listing import RunInfo, list_runs
from recorder.manifest import (
    MANIFEST_NAME,
    STALE_AFTER_S,
    RunExistsError,
    RunNotFoundError,
    RunUnreadableError,
    read_manifest,
    run_status,
)
from recorder.run_metrics import RunMetrics
from recorder.schema import PHASES, SCHEMAS, TABLES, lists_to_matrix, only
from recorder.storage import Place

#: Up to this size on disk all of `layer_stats` is kept in memory; above, only the layers asked for.
_WHOLE_STATS_BYTES = 32 << 20
_KEPT_LAYERS = 8
#: Tables whose rows tell where a segment starts; an event may lie before or after.
_STEP_TABLES = ("steps", "layer_stats", "decisions", "tokens")

_MAIN_PHASES = ("train", "generate", "eval", "probe")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One stretch of a run between two starts: the steps it recorded that no later segment replaced.

    `last_step` is below `first_step` where a later segment replaced all of it.
    """

    segment: int
    first_step: int
    last_step: int


class Run(RunMetrics):
    """One recorded run, finished or still growing.

    What has been read is kept until `refresh`, so calls may be repeated freely; frames are the caller's own.

    Args:
        path: the run's folder, or its URI in an object store.

    Attributes:
        path: the folder, as a Path or a `storage.ObjectPath`.
        manifest: the content of run.json.
        about: the name, notes and tags that people gave it (about.json).
        fingerprint: hashable identity of run.json, about.json and all part files, for caches.

    Raises:
        RunNotFoundError: no run at this path.
        RunUnreadableError: its run.json cannot be used.
        StorageError: the object store cannot be reached; so from every method that reads.
    """

    def __init__(self, path: str | Place) -> None:
        self.path = storage.locate(path)
        self._manifest_stamp: Hashable = None
        self.about: About = read_about(self.path)
        self.manifest: dict[str, Any] = self._read_manifest()
        readers = storage.each(self.path, lambda table: TableReader(self.path / table, table), TABLES)
        self._tables = dict(zip(TABLES, readers, strict=True))
        self.fingerprint: Hashable = self._identity()
        self._kept: dict[Hashable, Any] = {}
        self._layers: OrderedDict[Hashable, pa.Table] = OrderedDict()

    def __repr__(self) -> str:
        steps = "no steps yet" if self.last_step is None else f"last step {self.last_step}"
        sizes = sorted({(layer.get("num_experts"), layer.get("top_k")) for layer in self.moe_layers}, key=str)
        of = ", ".join(f"E={num_experts} k={top_k}" for num_experts, top_k in sizes)
        return f"<Run {self.run_id!r} ({self.name}): {self.status}, {steps}; {len(self.moe_layers)} MoE layers {of}>"

    @property
    def run_id(self) -> str:
        """The run's id: the folder's name unless the manifest gives one."""
        return str(self.manifest.get("run_id") or self.path.resolve().name)

    @property
    def name(self) -> str:
        """The run's name for people: what they renamed it to, else the manifest's."""
        return self.about.name or str(self.manifest.get("name") or self.run_id)

    @property
    def status(self) -> str:
        """running, finished, cancelled, failed, or unfinished: says running, but nobody writes any more."""
        return run_status(self.manifest)

    @property
    def config(self) -> dict[str, Any]:
        """The training configuration, flat."""
        config = self.manifest.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def domains(self) -> list[str]:
        """Names of the corpus' domains."""
        return list(self.manifest.get("domains") or [])

    @property
    def moe_layers(self) -> list[dict[str, Any]]:
        """The manifest's MoE layers, in model order; one entry a router."""
        layers = (self.manifest.get("model") or {}).get("layers") or []
        return [layer for layer in layers if layer.get("kind", "moe") == "moe"]

    @property
    def phases(self) -> list[str]:
        """The phases with a recorded load, in the order of `schema.PHASES`; told by the files' statistics."""
        if "phases" not in self._kept:
            table = self._tables["layer_stats"]
            found = {item.phase for item in table.key_ranges()}
            if None in found and table.size <= _WHOLE_STATS_BYTES:  # which is read anyway
                found = set(table.whole()["phase"].unique().to_pylist())
            elif None in found:
                found = {item.phase for item in table.key_ranges(exact=True)}
            self._kept["phases"] = [phase for phase in PHASES if phase in found]
        return list(self._kept["phases"])

    @property
    def main_phase(self) -> str:
        """The phase to judge the run by: train; where no load of it was recorded, generate, eval or probe."""
        return next((phase for phase in _MAIN_PHASES if phase in self.phases), "train")

    @property
    def problems(self) -> list[str]:
        """One line for each part that cannot be read; everything else is."""
        return [line for table in TABLES for line in self._tables[table].problems]

    @property
    def ranks(self) -> int:
        """How many ranks wrote rows."""
        return max(1, len(set[int]().union(*(self._tables[table].ranks() for table in TABLES))))

    @property
    def segment_starts(self) -> dict[int, int]:
        """First step of each segment that holds rows; of earlier ones, what lies at or after it does not count."""
        return {segment: first for segment, (first, _) in self._segment_ranges().items()}

    @property
    def segments(self) -> list[Segment]:
        """The stretches between resumes that hold rows, in order."""
        found = self._segment_ranges()
        numbers = sorted(found)
        return [
            Segment(
                segment=number,
                first_step=found[number][0],
                last_step=min([found[number][1], *(found[later][0] - 1 for later in numbers if later > number)]),
            )
            for number in numbers
        ]

    @property
    def last_step(self) -> int | None:
        """The greatest step of the latest segment; None before the first."""
        segments = self.segments
        if segments:
            return segments[-1].last_step
        last_step = self.manifest.get("last_step")
        return last_step if isinstance(last_step, int) else None

    def refresh(self) -> bool:
        """Look for new parts and a new manifest; True when anything changed.

        Raises:
            RunNotFoundError, RunUnreadableError: the run has gone or broken since.
        """
        self.manifest = self._read_manifest()
        self.about = read_about(self.path)
        storage.each(self.path, TableReader.relist, self._tables.values())
        fingerprint = self._identity()
        changed = fingerprint != self.fingerprint
        self.fingerprint = fingerprint
        if changed:
            self._kept.clear()
            self._layers.clear()
        return changed

    def steps(self, phase: str | None = None) -> pd.DataFrame:
        """One row a step and phase, sorted by step.

        Args:
            phase: train, probe, eval or generate; None = all.

        Raises:
            ValueError: an unknown phase.
        """
        _check_phase(phase)
        return self._frame(("steps", phase), lambda: _equal(self._steps(), phase=phase))

    def layer_stats(
        self, layer: int | None = None, phase: str | None = "train", router: int | None = None
    ) -> pd.DataFrame:
        """One row a step and router, sorted by step, layer and router.

        Args:
            layer: index in the whole model; None = all.
            phase: train, probe, eval or generate; None = all.
            router: needed only to tell routers of one layer apart; None = all.

        Raises:
            ValueError: an unknown phase.
        """
        _check_phase(phase)
        return self._frame(("layer_stats", layer, phase, router), lambda: self._layer_stats(layer, phase, router))

    def decisions(self, step: int, layer: int, phase: str = "train", router: int | None = None) -> pd.DataFrame:
        """One row a token, sorted by rank and token; `experts`, `weights` and `kept` are lists of length K.

        Args:
            step: a step of `decision_steps`; any other gives an empty frame.
            layer: index in the whole model.
            phase: train, probe, eval or generate.
            router: needed where the layer has several.

        Raises:
            ValueError: an unknown phase, or several routers and none named.
        """
        _check_phase(phase)
        rows = self._tables["decisions"].scan(step=step, layer=layer, phase=phase, router=router)
        rows = merge.drop_superseded(rows, self.segment_starts)
        _check_one_router(rows, layer)
        rows = merge.sort_rows(rows, "rank", "token")
        for name in ("experts", "weights", "kept"):
            rows = rows.set_column(rows.schema.get_field_index(name), name, _fixed(rows[name]))
        return _to_pandas(rows)

    def tokens(self, step: int, phase: str = "train") -> pd.DataFrame:
        """The tokens of one step's decisions, sorted by rank and token; empty where none were recorded.

        Raises:
            ValueError: an unknown phase.
        """
        _check_phase(phase)
        rows = merge.drop_superseded(self._tables["tokens"].scan(step=step, phase=phase), self.segment_starts)
        return _to_pandas(merge.sort_rows(rows, "rank", "token"))

    def table(self, name: str) -> TableReader:
        """The parts of one table, for whoever reads all of them once."""
        return self._tables[name]

    def incomplete_steps(self, phase: str = "train") -> pd.DataFrame:
        """Steps whose loads come from fewer ranks than other steps of their segment, sorted: step, ranks, of_ranks.

        There a load that falls is no real fall: a rank was killed, or (while the run is being written) has not
        written these steps yet.

        Raises:
            ValueError: an unknown phase.
        """
        _check_phase(phase)
        return self._frame(("incomplete_steps", phase), lambda: merge.incomplete_steps(self._rank_rows(phase)))

    def _rank_rows(self, phase: str) -> pa.Table:
        columns = ["step", "phase", "segment", "rank"]
        if self.ranks == 1:  # nothing to compare, and nothing to read
            return only(SCHEMAS["layer_stats"], columns).empty_table()
        rows = self._tables["layer_stats"].scan(columns, phase=phase)
        return merge.drop_superseded(rows, self.segment_starts)

    def events(self) -> pd.DataFrame:
        """What happened, sorted by step and segment."""
        return self._frame(
            "events",
            lambda: merge.sort_rows(
                merge.drop_superseded(self._tables["events"].whole(), self.segment_starts), "step", "segment"
            ),
        )

    def load(self, layer: int, phase: str = "train", router: int | None = None) -> np.ndarray:
        """Assignments per expert and recorded step.

        Args:
            layer: index in the whole model.
            phase: train, probe, eval or generate.
            router: needed where the layer has several.

        Returns:
            int64 (steps, E), rows as in `load_steps`; (0, E) before the first step. float64 only where a
            foreign writer recorded fractions.

        Raises:
            ValueError: an unknown phase, several routers and none named, or a layer that is no MoE layer.
        """
        rows = self._one_router(layer, phase, router)
        if not rows.num_rows:
            return np.zeros((0, self._num_experts(layer, router)), dtype=np.int64)
        loads = lists_to_matrix(rows["load"])
        whole = loads.astype(np.int64)
        return whole if np.array_equal(whole, loads) else loads.astype(np.float64)

    def load_steps(self, layer: int, phase: str = "train", router: int | None = None) -> np.ndarray:
        """The steps of `load`'s rows, int64 (steps,), ascending."""
        return np.array(self._one_router(layer, phase, router)["step"].to_numpy(), dtype=np.int64)

    def decision_steps(self, phase: str = "train") -> np.ndarray:
        """Steps that have decisions, int64, ascending; read from the files' statistics where they suffice.

        Raises:
            ValueError: an unknown phase.
        """
        _check_phase(phase)
        key = ("decision_steps", phase)
        if key not in self._kept:
            ranges = [item for item in self._tables["decisions"].key_ranges(exact=True) if item.phase == phase]
            steps = np.array([item.low for item in ranges], dtype=np.int64)
            segments = np.array([item.segment for item in ranges], dtype=np.int64)
            self._kept[key] = np.unique(steps[merge.kept_rows(steps, segments, self.segment_starts)])
        return np.array(self._kept[key])

    def _steps(self) -> pa.Table:
        if "steps" not in self._kept:
            rows = merge.drop_superseded(self._tables["steps"].whole(), self.segment_starts)
            if self.ranks > 1:
                rows = merge.merge_step_ranks(rows)
            self._kept["steps"] = merge.sort_rows(rows, "step", "phase")
        return self._kept["steps"]

    def _layer_stats(self, layer: int | None, phase: str | None, router: int | None) -> pa.Table:
        table = self._tables["layer_stats"]
        if layer is None or table.size <= _WHOLE_STATS_BYTES:
            if "layer_stats" not in self._kept:
                self._kept["layer_stats"] = self._finish_stats(table.whole())
            rows = self._kept["layer_stats"]
            if layer is None:
                return merge.sort_rows(_equal(rows, phase=phase, router=router), "step", "phase", "layer", "router")
            low, high = np.searchsorted(rows["layer"].to_numpy(), [layer, layer + 1]).tolist()
            return _equal(rows.slice(low, high - low), phase=phase, router=router)
        if layer not in self._layers:
            self._layers[layer] = self._finish_stats(table.scan(layer=layer))
            if len(self._layers) > _KEPT_LAYERS:
                self._layers.popitem(last=False)
        self._layers.move_to_end(layer)
        return _equal(self._layers[layer], phase=phase, router=router)

    def _finish_stats(self, rows: pa.Table) -> pa.Table:
        rows = merge.drop_superseded(rows, self.segment_starts)
        if rows["router"].null_count:
            rows = self._name_routers(rows)
        if self.ranks > 1:
            rows = merge.merge_layer_ranks(rows)
        return merge.sort_rows(rows, "layer", "step", "phase", "router")

    def _name_routers(self, rows: pa.Table) -> pa.Table:
        """A writer that numbers no routers has one a layer: take the manifest's number, or else the layer's."""
        by_layer = {layer.get("index"): layer.get("router") for layer in self.moe_layers}
        layers = rows["layer"].to_pylist()
        numbers = [layer if by_layer.get(layer) is None else by_layer[layer] for layer in layers]
        filled = pc.coalesce(rows["router"], pa.array(numbers, rows.schema.field("router").type))
        return rows.set_column(rows.schema.get_field_index("router"), "router", filled)

    def _one_router(self, layer: int, phase: str, router: int | None) -> pa.Table:
        _check_phase(phase)
        rows = self._layer_stats(layer, phase, router)
        _check_one_router(rows, layer)
        known = [item.get("index") for item in self.moe_layers]
        if not rows.num_rows and known and layer not in known:
            raise ValueError(f"layer {layer} is no MoE layer of {self.run_id}; those are {known}")
        return rows

    def _num_experts(self, layer: int, router: int | None) -> int:
        for item in self.moe_layers:
            if item.get("index") == layer and router in (None, item.get("router")):
                return int(item.get("num_experts") or 0)
        return 0

    def _segment_ranges(self) -> dict[int, tuple[int, int]]:
        """First and last step of each segment, as recorded."""
        if "segments" not in self._kept:
            found: dict[int, tuple[int, int]] = {}
            resumed = self.manifest.get("segment") != 0
            for table in _STEP_TABLES:
                if found and not resumed:
                    break
                for item in self._tables[table].key_ranges():
                    low, high = found.get(item.segment, (item.low, item.high))
                    found[item.segment] = (min(low, item.low), max(high, item.high))
            self._kept["segments"] = found
        found = self._kept["segments"]
        return found

    def _frame(self, key: Hashable, build: Any) -> pd.DataFrame:
        place = ("frame", key)
        if place not in self._kept:
            self._kept[place] = _to_pandas(build())
        frame: pd.DataFrame = self._kept[place]
        return frame.copy(deep=False)  # copy-on-write keeps the kept one as it is

    def _read_manifest(self) -> dict[str, Any]:
        # Before reading: if the file is replaced in between, the next refresh sees that.
        stamp = storage.stamp(self.path / MANIFEST_NAME)
        manifest = read_manifest(self.path)
        self._manifest_stamp = json.dumps(manifest) if stamp is None else stamp
        return manifest

    def _identity(self) -> Hashable:
        parts = tuple(
            (table, file.name, file.size, file.mtime_ns)
            for table in TABLES
            for file in self._tables[table].files.values()
        )
        return (str(self.path), self._manifest_stamp, self.about, parts)


def _to_pandas(rows: pa.Table) -> pd.DataFrame:
    # Default dtypes would merge null and NaN, and turn a null integer into a float.
    frame: pd.DataFrame = rows.to_pandas(types_mapper=pd.ArrowDtype)
    return frame


def _equal(rows: pa.Table, **values: Any) -> pa.Table:
    for name, value in values.items():
        if value is not None:
            rows = rows.filter(pc.equal(rows[name], value))
    return rows


def _fixed(column: pa.ChunkedArray) -> pa.Array:
    """A list column with a fixed length where all rows have the same, so that it reshapes without a copy."""
    array = column.combine_chunks()
    if not pa.types.is_list(array.type) or not len(array):
        return array
    lengths = pc.unique(array.value_lengths().drop_null()).to_pylist()
    return array.cast(pa.list_(array.type.value_type, lengths[0])) if len(lengths) == 1 else array


def _check_phase(phase: str | None) -> None:
    if phase is not None and phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")


def _check_one_router(rows: pa.Table, layer: int) -> None:
    routers = pc.unique(rows["router"]).to_pylist()
    if len(routers) > 1:
        raise ValueError(f"layer {layer} has routers {sorted(routers, key=str)}: name one")


__all__ = [
    "STALE_AFTER_S",
    "Run",
    "RunExistsError",
    "RunInfo",
    "RunNotFoundError",
    "RunUnreadableError",
    "Segment",
    "list_runs",
]
