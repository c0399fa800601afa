"""Experts on ranks (devices): which rank holds which expert, and what a load costs there. Numpy only.

A *slot* holds one copy of one expert. A *replica* is one of several copies; the assignments of an expert are split
evenly among its replicas.

Shapes: E experts, R ranks, S slots a rank; `...` any leading axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_core.metrics_of_loads import FloatArray, at_least

EMPTY = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Which expert each slot holds.

    Attributes:
        num_experts: E.
        experts_RS: (R, S) int64, the expert in each slot of each rank; -1 = an empty slot.
    """

    num_experts: int
    experts_RS: NDArray[np.int64]

    def __post_init__(self) -> None:
        strange = self.experts_RS[(self.experts_RS < EMPTY) | (self.experts_RS >= self.num_experts)]
        if strange.size:
            raise ValueError(
                f"expert {strange[0]} is outside 0..{self.num_experts - 1} (num_experts={self.num_experts})"
            )
        missing = np.flatnonzero(self.replicas == 0).tolist()
        if missing:
            raise ValueError(f"experts {missing} of {self.num_experts} are on no rank")

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.experts_RS.shape[0])

    @property
    def replicas(self) -> NDArray[np.int64]:
        """Copies of each expert, (E,) int64."""
        held = self.experts_RS[self.experts_RS != EMPTY]
        return np.bincount(held, minlength=self.num_experts).astype(np.int64)

    def rank_loads(self, load: ArrayLike) -> FloatArray:
        """Assignments that each rank works on; an expert's are split evenly among its replicas.

        Args:
            load: (..., E) assignments per expert.

        Returns:
            (..., R) float64.

        Raises:
            ValueError: a load of another number of experts.
        """
        load = np.asarray(load, dtype=np.float64)
        if load.ndim == 0 or load.shape[-1] != self.num_experts:
            raise ValueError(f"the placement is of {self.num_experts} experts, the load has shape {load.shape}")
        # one empty expert more, which empty slots (-1) point at
        share = np.concatenate([load / self.replicas, np.zeros((*load.shape[:-1], 1))], axis=-1)
        return share[..., self.experts_RS].sum(axis=-1)

    def as_json(self) -> dict[str, Any]:
        """For programs: {num_experts, num_ranks, slots_per_rank, replicas, ranks: expert ids of each rank}."""
        return {
            "num_experts": self.num_experts,
            "num_ranks": self.num_ranks,
            "slots_per_rank": int(self.experts_RS.shape[1]),
            "replicas": self.replicas.tolist(),
            "ranks": [row[row != EMPTY].tolist() for row in self.experts_RS],
        }

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> Placement:
        """What `as_json` gave.

        Raises:
            ValueError: it is no such plan.
        """
        try:
            experts_RS = np.full((len(plan["ranks"]), plan["slots_per_rank"]), EMPTY, dtype=np.int64)
            for rank, experts in enumerate(plan["ranks"]):
                experts_RS[rank, : len(experts)] = experts
            return cls(num_experts=plan["num_experts"], experts_RS=experts_RS)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no plan of a placement: {error!r}") from None


def contiguous_placement(num_experts: int, num_ranks: int) -> Placement:
    """Experts in order, as many on each rank: what frameworks do unless told otherwise.

    Where R does not divide E the first ranks hold one more.

    Raises:
        ValueError: not 1 <= num_ranks <= num_experts.
    """
    num_experts = at_least(1, "num_experts", num_experts)
    num_ranks = _at_most(num_experts, "num_ranks", at_least(1, "num_ranks", num_ranks), "num_experts")
    experts_RS = np.full((num_ranks, -(-num_experts // num_ranks)), EMPTY, dtype=np.int64)
    for rank, experts in enumerate(np.array_split(np.arange(num_experts), num_ranks)):
        experts_RS[rank, : len(experts)] = experts
    return Placement(num_experts=num_experts, experts_RS=experts_RS)


def balanced_placement(load: ArrayLike, num_ranks: int, spare_replicas: int = 0) -> Placement:
    """A plan that spreads a load: the busiest experts get replicas, the heaviest replicas find a rank first.

    1. Each spare replica goes to the expert with the greatest load per replica, but never more replicas than there
       are ranks while another expert can take it.
    2. Replicas, heaviest first, each go to the least loaded rank that has a slot left and not that expert. Where no
       such rank is left, a replica of another expert moves out of the way: replicas of one expert share a rank only
       where there are more of them than ranks.

    Equal loads go by the lower number, so that the same input gives the same plan.

    Args:
        load: (E,) assignments per expert of one layer, summed over the window that the plan is for.
        num_ranks: R.
        spare_replicas: copies beyond one of each expert. R must divide E + spare_replicas: every rank has as many
            slots.

    Raises:
        ValueError: a load that is no such array, or numbers that do not go together.

    Source: after the published description of DeepSeek's expert-parallelism load balancer (DeepSeek-V3, 2412.19437,
    section 3.4; github.com/deepseek-ai/EPLB), its global policy.
    """
    load_E = np.asarray(load, dtype=np.float64)
    if load_E.ndim != 1 or not load_E.size:
        raise ValueError(f"load must have shape (experts,), got {load_E.shape}")
    if not np.isfinite(load_E).all() or (load_E < 0).any():
        raise ValueError(f"load must be finite and not negative, got {load_E.tolist()}")
    num_ranks = at_least(1, "num_ranks", num_ranks)
    num_slots = load_E.size + at_least(0, "spare_replicas", spare_replicas)
    if num_slots % num_ranks:
        more = -num_slots % num_ranks
        raise ValueError(
            f"{load_E.size} experts and {spare_replicas} spare replicas do not fill {num_ranks} ranks evenly: "
            f"take spare_replicas={spare_replicas + more}"
        )
    replicas_E = _replicate(load_E, num_slots, num_ranks)
    return Placement(num_experts=load_E.size, experts_RS=_pack(load_E, replicas_E, num_ranks))


def _replicate(load_E: FloatArray, num_slots: int, num_ranks: int) -> NDArray[np.int64]:
    """Replicas of each expert, (E,), num_slots in all."""
    replicas = np.ones(load_E.size, dtype=np.int64)
    for _ in range(num_slots - load_E.size):
        room = replicas < num_ranks
        share = np.where(room if room.any() else True, load_E / replicas, -1.0)
        busiest = np.flatnonzero(share == share.max())
        # experts without any load take turns
        replicas[busiest[replicas[busiest].argmin()]] += 1
    return replicas


def _pack(load_E: FloatArray, replicas_E: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """The replicas in slots, (R, S)."""
    share_E = load_E / replicas_E
    slots = int(replicas_E.sum()) // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = np.zeros(num_ranks)

    def put(expert: int, rank: int) -> None:
        ranks[rank].append(expert)
        loads[rank] += share_E[expert]

    order = np.lexsort((np.arange(load_E.size), -share_E))  # heaviest first, then the lower number
    for expert in np.repeat(order, replicas_E[order]).tolist():
        free = [rank for rank in range(num_ranks) if len(ranks[rank]) < slots]
        fit = [rank for rank in free if expert not in ranks[rank]]
        if not fit:
            swap = _way_out(expert, free, ranks, loads, share_E)
            if swap is not None:
                full, moved, rank = swap
                ranks[full].remove(moved)
                loads[full] -= share_E[moved]
                put(moved, rank)
                fit = [full]
        put(expert, min(fit or free, key=lambda rank: (loads[rank], rank)))
    return np.sort(np.array(ranks, dtype=np.int64), axis=1)


def _way_out(
    expert: int, free: list[int], ranks: list[list[int]], loads: FloatArray, share_E: FloatArray
) -> tuple[int, int, int] | None:
    """(full rank, expert to move from it, rank with a slot left) that makes room for `expert`; None = there is none.

    Of all such moves the one after which the busier of the two ranks is least busy.
    """
    best: tuple[float, int, int, int] | None = None
    for full, held in enumerate(ranks):
        if expert in held:
            continue
        for moved in held:
            for rank in free:
                if moved not in ranks[rank]:
                    there = loads[full] - share_E[moved] + share_E[expert]
                    found = (max(there, loads[rank] + share_E[moved]), full, moved, rank)
                    best = found if best is None or found < best else best
    return None if best is None else best[1:]


def _at_most(most: int, name: str, value: int, of: str) -> int:
    if value > most:
        raise ValueError(f"{name}={value} is more than {of}={most}")
    return value
