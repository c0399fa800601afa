"""From the decisions of routers to their rows of the `layer_stats` table: sums on the device, means on the host.

Routers alike are summed together, in one pass over stacked tensors, and nothing is read back from the device: what
leaves it is a few numbers an expert.

Shapes: R routers alike, T tokens, E experts, K choices a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_core.routing import NO_CHOICE, Routing, top_k_by_lowest_id

_COUNTS = ("tokens", "invalid", "rerouted", "nowhere")


@dataclass(frozen=True, kw_only=True)
class Alike:
    """What must agree for routers to be stacked; T aside, also for their sums to be added up."""

    num_experts: int
    has_kept: bool
    has_bias: bool
    losses: tuple[str, ...]
    device: torch.device

    @staticmethod
    def of(routing: Routing, losses: Mapping[str, Tensor]) -> Alike:
        return Alike(
            num_experts=routing.num_experts,
            has_kept=routing.kept_TK is not None,
            has_bias=routing.expert_bias_E is not None,
            losses=tuple(losses),
            device=routing.expert_ids_TK.device,
        )


@dataclass(kw_only=True)
class Stacked:
    """The decisions of R routers about the same T tokens; ids are -1 and weights 0 where a token does not count."""

    expert_ids_RTK: Tensor
    weights_RTK: Tensor
    kept_RTK: Tensor | None

    @staticmethod
    def of(routings: Sequence[Routing], real_T: Tensor | None) -> Stacked:
        """real_T: the recorder's own mask, on top of what the routers were told."""
        ids_RTK = torch.stack([routing.expert_ids_TK for routing in routings])
        weights_RTK = torch.stack([routing.weights_TK for routing in routings]).float()
        if real_T is not None:
            padding_T1 = ~real_T[:, None]
            ids_RTK = ids_RTK.masked_fill_(padding_T1, NO_CHOICE)
            weights_RTK = weights_RTK.masked_fill_(padding_T1, 0)
        kept = [routing.kept_TK for routing in routings if routing.kept_TK is not None]
        return Stacked(expert_ids_RTK=ids_RTK, weights_RTK=weights_RTK, kept_RTK=torch.stack(kept) if kept else None)


def sum_up(
    routings: Sequence[Routing],
    stacked: Stacked,
    real_T: Tensor | None,
    losses: Sequence[Mapping[str, Tensor]],
) -> tuple[Tensor, Tensor]:
    """int64 and float64 sums of each router, (R, any), in the order in which `stats_row` reads them.

    losses: weighted by the tokens that count, for their mean over micro-batches.
    """
    R, T, _ = stacked.expert_ids_RTK.shape
    E = routings[0].num_experts
    device = stacked.expert_ids_RTK.device
    sum_type = torch.float32 if device.type == "mps" else torch.float64  # which has no float64
    scores_RTE = torch.stack([routing.scores_TE for routing in routings])
    smallest = torch.finfo(torch.float32).tiny  # 0 / 0 in an invalid row gives 0
    probs_RTE = scores_RTE.div_(scores_RTE.sum(-1, keepdim=True).clamp_min_(smallest))
    routed_RT, invalid_R = _routed(routings, real_T)
    if routed_RT is not None:
        probs_RTE = probs_RTE.masked_fill_(~routed_RT[..., None], 0)
        tokens_R = routed_RT.sum(-1)
    else:
        tokens_R = torch.full((R,), T, device=device)
    rerouted_R = _rerouted(routings, stacked) if routings[0].expert_bias_E is not None else torch.zeros_like(tokens_R)
    # slot 0 for no choice, the last for an id that no expert has: on a device that would end the training
    slots_RN = (stacked.expert_ids_RTK.clamp(NO_CHOICE, E) + 1).view(R, -1)
    strange_RTK = (stacked.expert_ids_RTK < NO_CHOICE) | (stacked.expert_ids_RTK >= E)
    nowhere_R = strange_RTK.sum((1, 2))
    counts = [torch.stack([tokens_R, invalid_R, rerouted_R, nowhere_R], -1), _count(slots_RN, E)]
    if stacked.kept_RTK is not None:
        counts.append(_count(slots_RN.masked_fill(stacked.kept_RTK.reshape(R, -1), 0), E))
    mass_RE = torch.zeros(R, E + 2, dtype=sum_type, device=device)
    mass_RE = mass_RE.scatter_add_(1, slots_RN, stacked.weights_RTK.view(R, -1).to(sum_type))[:, 1:-1]
    # p ln p with 0 ln 0 = 0; torch.special.entr is the same, three times slower
    entropy_RTE = probs_RTE.clamp_min(smallest).log_().mul_(probs_RTE).neg_()
    sums = [
        entropy_RTE.sum((1, 2), dtype=sum_type)[:, None],
        probs_RTE.sum(1, dtype=sum_type),
        mass_RE,
    ]
    for name in losses[0]:
        loss_R = torch.stack([of_router[name].to(device=device, dtype=sum_type) for of_router in losses])
        sums.append(torch.where(tokens_R > 0, loss_R * tokens_R, 0)[:, None])
    return torch.cat(counts, -1), torch.cat(sums, -1)


def stats_row(
    alike: Alike,
    counts: np.ndarray,
    sums: np.ndarray,
    bias_E: np.ndarray | None,
    coefficients: Mapping[str, float],
) -> dict[str, Any]:
    """The numbers of one router over a step, as `RunWriter.log_layer_stats` takes them.

    counts, sums: of `sum_up`, added up over the micro-batches. Losses carry their coefficient, which is divided out
    again (an aux loss of 1 is uniform), and are null where there is none or its coefficient is 0. tokens counts the
    routed ones; rows that could not be routed stand in `invalid`. bias_E: what the last micro-batch was routed with.
    Raises ValueError where ids are those of no expert: what the adapter read is not what the router did.
    """
    E = alike.num_experts
    tokens, invalid, rerouted, nowhere = (int(count) for count in counts[: len(_COUNTS)])
    if nowhere:
        raise ValueError(f"{nowhere} of the expert ids are outside [-1, {E})")
    load, dropped = np.split(counts[len(_COUNTS) :], [E])
    entropy_sum, prob_sum, mass, of_losses = sums[0], sums[1 : E + 1], sums[E + 1 : 2 * E + 1], sums[2 * E + 1 :]
    means = dict(zip(alike.losses, of_losses, strict=True))

    def mean_loss(name: str) -> float | None:
        coefficient = coefficients.get(name, 0.0)
        return None if coefficient == 0 or tokens == 0 or name not in means else means[name] / tokens / coefficient

    return {
        "tokens": tokens,
        "load": load,
        "gate_mass": mass,
        "mean_prob": prob_sum / tokens if tokens else None,
        "expert_bias": bias_E,
        "rerouted": rerouted if alike.has_bias else None,
        "dropped": dropped if alike.has_kept else None,
        "invalid": invalid,
        "router_entropy": entropy_sum / tokens / math.log(E) if tokens and E > 1 else None,
        "aux_loss": mean_loss("aux_loss"),
        "z_loss": mean_loss("z_loss"),
    }


def _routed(routings: Sequence[Routing], real_T: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """bool (R, T): tokens that count, neither padding nor invalid; None = all do. int64 (R,): invalid ones."""
    T, device = routings[0].expert_ids_TK.shape[0], routings[0].expert_ids_TK.device
    everywhere = torch.ones(T, dtype=torch.bool, device=device) if real_T is None else real_T
    real_RT = invalid_RT = None
    if real_T is not None or any(routing.token_mask_T is not None for routing in routings):
        told = [everywhere if r.token_mask_T is None else everywhere & r.token_mask_T for r in routings]
        real_RT = torch.stack(told)
    if any(routing.invalid_T is not None for routing in routings):
        nowhere = torch.zeros_like(everywhere)
        invalid_RT = torch.stack([nowhere if r.invalid_T is None else r.invalid_T for r in routings])
    if invalid_RT is None:
        return real_RT, torch.zeros(len(routings), dtype=torch.int64, device=device)
    if real_RT is None:
        return ~invalid_RT, invalid_RT.sum(-1)
    return real_RT & ~invalid_RT, (invalid_RT & real_RT).sum(-1)


def _rerouted(routings: Sequence[Routing], stacked: Stacked) -> Tensor:
    """int64 (R,): assignments that the selection bias changed, as `moe_core.routing.rerouted_assignments` counts."""
    selection_RTE = torch.stack([routing.unbiased_selection_TE for routing in routings])
    R, T, E = selection_RTE.shape
    K = stacked.expert_ids_RTK.shape[-1]
    _, plain_ids = top_k_by_lowest_id(selection_RTE.view(R * T, E), K)
    plain_RTK = plain_ids.view(R, T, K)
    same_RTK = (stacked.expert_ids_RTK.unsqueeze(-1) == plain_RTK.unsqueeze(-2)).any(-1)
    return ((stacked.expert_ids_RTK != NO_CHOICE) & ~same_RTK).sum((1, 2))


def _count(slots_RN: Tensor, num_experts: int) -> Tensor:
    """int64 (R, E): how often each expert's slot (its id + 1) occurs. A bincount would wait for the device."""
    count = torch.zeros(slots_RN.shape[0], num_experts + 2, dtype=torch.int64, device=slots_RN.device)
    return count.scatter_add_(1, slots_RN, torch.ones_like(slots_RN))[:, 1:-1]
