"""What a notebook asks of a run: metrics and whole-run answers as pandas objects with names and units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from moe_core import metrics
from recorder.schema import PHASES, lists_to_matrix

if TYPE_CHECKING:
    from recorder.analysis import Analysis
    from recorder.reader import Run

#: Metrics of one step's load that `metric` gives, and their units.
METRICS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "max_violation": (metrics.max_violation, "share above uniform"),
    "load_cv": (metrics.load_cv, "1"),
    "load_entropy": (metrics.load_entropy, "1"),
    "effective_experts": (metrics.effective_experts, "experts"),
    "gini": (metrics.gini, "1"),
    "min_load": (metrics.min_load, "assignments"),
    "max_load": (metrics.max_load, "assignments"),
    "dead_experts": (metrics.dead_experts, "experts"),
    "idle_experts": (metrics.idle_experts, "experts"),
}
#: Columns of `layer_stats` that `metric` gives as they were recorded.
RECORDED = {"router_entropy": "1", "aux_loss": "1 (uniform = 1)", "z_loss": "1"}
#: Counts of `layer_stats` that `metric` gives over the assignments of the step.
SHARES = {"drop_rate": ("dropped", metrics.drop_rate), "rerouted_share": ("rerouted", metrics.rerouted_share)}


class RunMetrics:
    """The methods of `Run` that answer questions; `Run` gives the rows.

    `layer` is the index in the whole model; `router` is needed only where a layer has several. All that lean on
    decisions count every recorded one: from the results that `routescope analyse` kept with the run where they are
    up to date, and otherwise in memory, once.
    """

    @property
    def _run(self) -> Run:
        return cast("Run", self)

    def analysis(self) -> Analysis:
        """The counts of all decisions; nothing is written."""
        from recorder.analysis import analyse

        if "analysis" not in self._run._kept:
            self._run._kept["analysis"] = analyse(self._run, keep=False)
        analysis: Analysis = self._run._kept["analysis"]
        return analysis

    def metric(
        self, name: str, layer: int | None = None, phase: str = "train", router: int | None = None, window: int = 1
    ) -> pd.Series | pd.DataFrame:
        """A metric of each recorded step, undefined = NaN.

        Args:
            name: one of METRICS, RECORDED or SHARES: `max_violation`, `router_entropy`, `drop_rate` ...
            layer: None = all.
            phase: train, probe, eval or generate.
            router: needed where the layer has several.
            window: recorded steps, up to each, whose loads are summed first; for metrics of a load only.

        Returns:
            A Series by step; for all layers a frame with a column for each, named by its index, and where layers have
            several routers by (layer, router). The unit is in `.attrs["unit"]`.

        Raises:
            ValueError: an unknown metric, phase or layer, or several routers and none named.
        """
        known = [*METRICS, *RECORDED, *SHARES]
        if name not in known:
            raise ValueError(f"unknown metric {name!r}; there are {', '.join(known)}")
        if window != 1 and name not in METRICS:
            raise ValueError(f"window={window}: {name} is no metric of a load")
        if layer is not None:
            return self._metric(name, layer, phase, router, window)
        places = self._places(phase)
        several = len({place[0] for place in places}) < len(places)
        columns = {
            (place if several else place[0]): self._metric(name, place[0], phase, place[1], window) for place in places
        }
        frame = pd.DataFrame(columns)
        frame.columns.names = ["layer", "router"] if several else ["layer"]
        frame.index.name = "step"
        frame.attrs = {"name": name, "unit": _unit(name)}
        return frame

    def coactivation(
        self, layer: int, phase: str = "train", router: int | None = None, step: int | None = None
    ) -> pd.DataFrame:
        """Of the tokens that chose an expert (row), the share that chose another too (column): N_ab / N_a.

        Args:
            step: of one recorded step alone; None = of the whole run.

        Returns:
            (E, E), 1 on the diagonal; NaN in the row of an expert that nobody chose.

        Raises:
            ValueError: an unknown phase or layer, or several routers and none named.
        """
        if step is None:
            rows = self._rows("coactivation", layer, phase, router)
            together = lists_to_matrix(rows["together"])
        else:
            _check(phase)
            decisions = self._run.decisions(step, layer, phase, router)
            ids_TK = lists_to_matrix(decisions["experts"])
            if not len(ids_TK):
                raise ValueError(f"{self._run.run_id} has no decisions of step {step}, layer {layer}, phase {phase}")
            num_experts = max(self._run._num_experts(layer, router), int(ids_TK.max()) + 1)
            together = metrics.count_coactivation(ids_TK, num_experts)
        return _square(metrics.coactivation(together), "expert", "with expert", "share of the row's tokens")

    def transitions(self, layer: int, phase: str = "train", router: int | None = None) -> pd.DataFrame:
        """Of the choices of an expert (row), the share that went on to each expert of the next MoE layer (column).

        Returns:
            (E, E of the next), rows summing to 1, NaN where there was none; the next layer is in
            `.attrs["next_layer"]`, its router's number in `.attrs["next_router"]`. Empty for the last layer.

        Raises:
            ValueError: an unknown phase or layer, or several routers and none named.
        """
        rows = self._rows("transitions", layer, phase, router, there=False)
        if not len(rows):
            return pd.DataFrame()
        frame = _square(
            metrics.transition(lists_to_matrix(rows["to"])),
            f"expert of layer {layer}",
            f"expert of layer {rows['next_layer'].iloc[0]}",
            "share of the row's choices",
        )
        frame.attrs |= {name: int(rows[name].iloc[0]) for name in ("next_layer", "next_router")}
        return frame

    def domain_specialisation(self, layer: int, phase: str = "train", router: int | None = None) -> pd.DataFrame:
        """Share of a domain's tokens (row) that use each expert (column); empty where no domains were recorded.

        Returns:
            (D, E), rows summing to k; the share without specialisation, k / E, is in `.attrs["baseline"]`.

        Raises:
            ValueError: an unknown phase or layer, or several routers and none named.
        """
        rows = self._rows("domains", layer, phase, router, there=False)
        if not len(rows):
            return pd.DataFrame()
        load, tokens = lists_to_matrix(rows["load"]), rows["tokens"].to_numpy()
        share = metrics.domain_specialisation(load, tokens)
        frame = _square(share, "domain", "expert", "share of the domain's tokens")
        frame.index = pd.Index(rows["domain"].tolist(), name="domain")
        frame.attrs["baseline"] = float(load.sum() / tokens.sum() / load.shape[1]) if tokens.sum() else np.nan
        return frame

    def vocabulary(
        self,
        layer: int,
        phase: str = "train",
        router: int | None = None,
        min_occurrences: int = metrics.MIN_OCCURRENCES,
    ) -> pd.DataFrame:
        """Where the occurrences of each token id went.

        Returns:
            A row for each token id: token_id, text, occurrences, main_expert, share (of the occurrences that went to
            the main expert; null below `min_occurrences`), experts and counts (lists, most first).

        Raises:
            ValueError: an unknown phase or layer, or several routers and none named.
        """
        rows = self._rows("vocabulary", layer, phase, router, there=False)
        main, most = (_firsts(rows[name]) for name in ("experts", "counts"))
        share = metrics.vocab_specialisation(most[:, None], rows["occurrences"].to_numpy(np.int64), min_occurrences)
        rows = rows.assign(
            main_expert=pd.Series(main, index=rows.index, dtype="int64[pyarrow]"),
            share=pd.Series(pa.array(share, from_pandas=True), index=rows.index, dtype="double[pyarrow]"),
        )
        rows.attrs = {"unit": "share of the token id's occurrences"}
        return rows[["token_id", "text", "occurrences", "main_expert", "share", "experts", "counts"]]

    def repeat_rate(self, phase: str = "train") -> pd.DataFrame:
        """How often a token's first choice is that of the token before it in its sequence.

        Returns:
            A row for each router: layer, router, repeats, pairs, repeat_rate and chance (what independent neighbours
            would show); empty where no tokens were recorded.
        """
        _check(phase)
        rows = self.analysis().frame("repeats", phase=phase)
        loads = self.analysis().frame("loads", phase=phase).set_index(["layer", "router"])
        places = list(zip(rows["layer"], rows["router"], strict=True))
        chance = [float(metrics.repeat_chance(loads.loc[place, "first_choices"])) for place in places]
        rate = metrics.repeat_rate(rows["repeats"].to_numpy(np.int64), rows["pairs"].to_numpy(np.int64))
        return rows.drop(columns="phase").assign(repeat_rate=rate, chance=np.array(chance, dtype=np.float64))

    def drops_by_position(self, layer: int, phase: str = "train", router: int | None = None) -> pd.DataFrame:
        """Share of assignments that capacity dropped, by position in the sequence (the index).

        Returns:
            assignments, dropped, drop_rate; empty where nothing could be dropped.

        Raises:
            ValueError: an unknown phase or layer, or several routers and none named.
        """
        rows = self._rows("positions", layer, phase, router, there=False)
        frame = rows.set_index("position")[["assignments", "dropped"]]
        return frame.assign(
            drop_rate=metrics.drop_rate(*(frame[name].to_numpy(np.int64) for name in ("dropped", "assignments")))
        )

    def saturation(self, layer: int | None = None, router: int | None = None) -> pd.Series | pd.DataFrame:
        """Mean overlap of each probe's choices with the final probe's, by probe step: 1 is settled.

        Returns:
            A Series; for all layers a frame with a column for each. Empty where no probes were recorded.

        Raises:
            ValueError: an unknown layer, or several routers and none named.
        """
        return self._settling("saturation", layer, router)

    def churn(self, layer: int | None = None, router: int | None = None) -> pd.Series | pd.DataFrame:
        """Share of choices that changed since the probe before, by probe step; NaN at the first.

        Returns and raises as `saturation`.
        """
        return self._settling("churn", layer, router)

    def last_fluctuation(self, layer: int, router: int | None = None) -> pd.DataFrame:
        """For each token of the probe, the last probe at which its first choice was not its final one.

        Returns:
            rank, token, last_fluctuation (a step; null = the final choice at every probe), expert_there (its first
            choice at that probe; null = none) and final_expert. Tokens without a final choice are left out.

        Raises:
            ValueError: an unknown layer, or several routers and none named.
        """
        rows = self._rows("fluctuation", layer, "probe", router, there=False)
        return rows[["rank", "token", "last_fluctuation", "expert_there", "final_expert"]]

    def _settling(self, name: str, layer: int | None, router: int | None) -> pd.Series | pd.DataFrame:
        if layer is not None:
            rows = self._rows("settling", layer, "probe", router, there=False)
            values = rows[name].to_numpy(dtype=np.float64, na_value=np.nan)
            series = pd.Series(values, index=pd.Index(rows["step"].to_numpy(np.int64), name="step"), name=name)
            series.attrs["unit"] = "share of choices"
            return series
        rows = self.analysis().frame("settling")
        places = sorted({(int(a), int(b)) for a, b in zip(rows["layer"], rows["router"], strict=True)})
        several = len({place[0] for place in places}) < len(places)
        frame = pd.DataFrame({(p if several else p[0]): self._settling(name, *p) for p in places})
        frame.columns.names = ["layer", "router"] if several else ["layer"]
        frame.attrs = {"name": name, "unit": "share of choices"}
        return frame

    def _metric(self, name: str, layer: int, phase: str, router: int | None, window: int) -> pd.Series:
        loads = self._run.load(layer, phase, router)
        steps = pd.Index(self._run.load_steps(layer, phase, router), name="step")
        if name in METRICS:
            values = METRICS[name][0](loads if window == 1 else metrics.rolling_window_load(loads, window))
        else:
            rows = self._run.layer_stats(layer, phase, router)
            if name in RECORDED:
                values = rows[name].to_numpy(dtype=np.float64, na_value=np.nan)
            else:
                column, share = SHARES[name]
                values = share(_sums(rows[column]), loads.sum(axis=1))
        series = pd.Series(values, index=steps, name=name)
        series.attrs["unit"] = _unit(name)
        return series

    def _places(self, phase: str) -> list[tuple[int, int]]:
        _check(phase)
        rows = self._run.layer_stats(phase=phase)
        return sorted(
            {(int(a), int(b)) for a, b in rows[["layer", "router"]].drop_duplicates().itertuples(index=False)}
        )

    def _rows(self, table: str, layer: int, phase: str, router: int | None, *, there: bool = True) -> pd.DataFrame:
        """A table's rows of one router; `there`: it must have some."""
        _check(phase)
        rows = self.analysis().frame(table, phase=phase, layer=layer, router=router)
        routers = sorted(rows["router"].unique().tolist())
        if len(routers) > 1:
            raise ValueError(f"layer {layer} has routers {routers}: name one")
        known = {int(item["index"]) for item in self._run.moe_layers if item.get("index") is not None}
        if not len(rows) and known and layer not in known:
            raise ValueError(f"layer {layer} is no MoE layer of {self._run.run_id}; those are {sorted(known)}")
        if there and not len(rows):
            raise ValueError(f"{self._run.run_id} has no decisions of layer {layer} in phase {phase}")
        return rows


def _check(phase: str) -> None:
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")


def _firsts(lists: pd.Series) -> np.ndarray:
    """The first of each list in a column."""
    return np.asarray(pc.list_element(pa.array(lists, from_pandas=True), 0).to_numpy(), dtype=np.int64)


def _unit(name: str) -> str:
    return METRICS[name][1] if name in METRICS else RECORDED.get(name, "share of assignments")


def _square(values: np.ndarray, rows: str, columns: str, unit: str) -> pd.DataFrame:
    frame = pd.DataFrame(values)
    frame.index.name, frame.columns.name = rows, columns
    frame.attrs["unit"] = unit
    return frame


def _sums(column: Iterable[Any]) -> np.ndarray:
    """Of lists or numbers, float64; NaN where there is none."""
    values = [np.nan if value is None or value is pd.NA else float(np.sum(value)) for value in column]
    return np.array(values, dtype=np.float64)


__all__ = ["METRICS", "RECORDED", "SHARES", "RunMetrics"]
