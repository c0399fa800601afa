"""Experts of a run on ranks: what the slowest rank costs, contiguous against a plan.

Shapes: S recorded steps, E experts, R ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from app.figures.inputs import LoadSeries
from app.words import count, value
from moe_core import metrics
from moe_core.placement import Placement, balanced_placement, contiguous_placement

CONTIGUOUS, PLANNED = "contiguous", "planned"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One layer on R ranks, both ways.

    series      its loads; by_name: "contiguous" and "planned", each a placement
    window      recorded steps at the end whose summed load the plan is made for
    """

    series: LoadSeries
    by_name: dict[str, Placement]
    window: int

    def rank_series(self, name: str) -> LoadSeries:
        """Loads of the ranks over the steps, as the figures take them: a rank may get everything, so k = 1."""
        loads_SR = self.by_name[name].rank_loads(self.series.load_SE)
        return replace(self.series, run=name, load_SE=loads_SR, top_k=1)

    def cost_S(self, name: str) -> NDArray[np.float64]:
        """The slowest rank over a perfect split, each step; NaN without tokens."""
        return np.asarray(metrics.slowest_rank_cost(self.by_name[name].rank_loads(self.series.load_SE)))

    def cost(self, name: str) -> float:
        """The mean of the steps of the window: each step waits for its own slowest rank."""
        cost_S = self.cost_S(name)[-self.window :]
        known = cost_S[np.isfinite(cost_S)]
        return float(known.mean()) if known.size else float("nan")


def rank_choices(experts: Sequence[int]) -> list[int]:
    """Numbers of ranks on which every layer's experts can stand: 2 and more, each with at least one expert.

    With some number of spare replicas every rank of every layer has as many slots.
    """
    fewest = min(experts, default=0)
    return [ranks for ranks in (2, 4, 8, 16, 32, 64, 128, 256) if ranks <= fewest and spare_choices(experts, ranks)]


def spare_choices(experts: Sequence[int], ranks: int, most: int = 4) -> list[int]:
    """Numbers of spare replicas with which every rank of every layer has as many slots: about `most` a rank."""
    alike = [spares for spares in range((most + 1) * ranks) if all((one + spares) % ranks == 0 for one in experts)]
    return alike[: most + 1]


def place(series: LoadSeries, ranks: int, spares: int, window: int) -> Placed:
    """A layer contiguous, and by a plan for the load of its last `window` recorded steps."""
    load_E = np.asarray(metrics.window_load(series.load_SE, window), dtype=np.float64)
    return Placed(
        series=series,
        by_name={
            CONTIGUOUS: contiguous_placement(series.num_experts, ranks),
            PLANNED: balanced_placement(load_E, ranks, spares),
        },
        window=window,
    )


def headline(one: Placed, ranks: int, spares: int) -> str:
    """The answer in words for one layer."""
    before, after = one.cost(CONTIGUOUS), one.cost(PLANNED)
    if not np.isfinite(before):
        return f"No load of layer {one.series.label} in the window, so nothing can be said of its placement"
    spare = f"and {count(spares, 'spare replica')} " if spares else ""
    return (
        f"On {ranks} ranks the slowest works {value(before)} times a perfect split in layer {one.series.label}; "
        f"there with a plan {spare}{value(after)} times"
    )


def worst_words(placed: Sequence[Placed]) -> str:
    """Which layer waits longest contiguous, and which by the plan; "" for one layer."""
    known = [one for one in placed if np.isfinite(one.cost(CONTIGUOUS))]
    if len(placed) < 2 or not known:
        return ""
    before, after = (max(known, key=lambda one: one.cost(name)) for name in (CONTIGUOUS, PLANNED))
    return (
        f"Slowest of {len(placed)} layers: layer {before.series.label} with {value(before.cost(CONTIGUOUS))} times "
        f"contiguous, layer {after.series.label} with {value(after.cost(PLANNED))} times by the plan."
    )


def costs_table(placed: Sequence[Placed]) -> pd.DataFrame:
    """A row for each layer: the slowest rank's cost over the window both ways, and balancedness, 1 / cost of it."""
    rows = []
    for one in placed:
        loads_E = metrics.window_load(one.series.load_SE, one.window)
        row: dict[str, float | str] = {"layer": one.series.label}
        for name, placement in one.by_name.items():
            row[f"slowest rank, {name}"] = one.cost(name)
            row[f"balancedness of the summed load, {name}"] = float(
                metrics.rank_balancedness(placement.rank_loads(loads_E)[None])
            )
        rows.append(row)
    return pd.DataFrame(rows)


def balancedness(placed: Sequence[Placed], name: str) -> float:
    """Mean / max of the rank loads per layer and step of the window, then the mean over layers, then over steps.

    NaN where layers were recorded at different steps.
    """
    loads = [one.by_name[name].rank_loads(one.series.load_SE)[-one.window :] for one in placed]
    if len({one.shape for one in loads}) != 1:
        return float("nan")
    balance_S = np.asarray(metrics.rank_balancedness(np.stack(loads, axis=1)))
    known = balance_S[np.isfinite(balance_S)]
    return float(known.mean()) if known.size else float("nan")


def plan_document(run: str, placed: Sequence[Placed]) -> dict[str, object]:
    """For programs: the run, and for each layer `Placement.as_json` of its plan with the steps it is made for."""
    layers = []
    for one in placed:
        steps = one.series.steps_S[-one.window :]
        about = {"layer": one.series.label, "first_step": int(steps[0]), "last_step": int(steps[-1])}
        layers.append(about | one.by_name[PLANNED].as_json())
    return {"run": run, "layers": layers}


def slots_table(placed: Placed) -> pd.DataFrame:
    """Who holds what in one layer: a row for each rank, with its experts and its load in the window both ways."""
    load_E = np.asarray(metrics.window_load(placed.series.load_SE, placed.window), dtype=np.float64)
    frame = pd.DataFrame({"rank": np.arange(placed.by_name[PLANNED].num_ranks)})
    for name, placement in placed.by_name.items():
        held = [", ".join(map(str, row[row >= 0])) for row in placement.experts_RS]
        frame[f"experts, {name}"] = held
        frame[f"load / perfect split, {name}"] = metrics.load_ratio(placement.rank_loads(load_E))
    return frame
