"""From the decisions of one router in one step to its row of the `layer_stats` table.

Shapes: T tokens, E experts, K choices a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_core.capacity import dropped_load
from moe_core.routing import Routing, full_probabilities, rerouted_assignments


def layer_stats(
    routings: Sequence[Routing], losses: Sequence[Mapping[str, Tensor]], coefficients: Mapping[str, float]
) -> dict[str, Any]:
    """The numbers of one router over the micro-batches of one step, as `RunWriter.log_layer_stats` takes them.

    routings, losses: one per micro-batch; losses carry their coefficient, which is divided out again (an aux loss
    of 1 is uniform), and are null where there is none or its coefficient is 0. Sums run over micro-batches, means
    are weighted by their tokens. tokens counts the routed ones; rows that could not be routed stand in `invalid`.
    The bias is the one that the last micro-batch was routed with.
    """
    tokens_M = [int(routing.routed_T.sum()) for routing in routings]
    tokens = sum(tokens_M)
    num_experts = routings[0].num_experts
    dropped = [dropped_load(routing) for routing in routings]
    rerouted = [rerouted_assignments(routing) for routing in routings]
    bias_E = routings[-1].expert_bias_E
    prob_sum_E, entropy_sum = np.zeros(num_experts), 0.0
    for routing in routings:
        probs_TE = full_probabilities(routing)[routing.routed_T].double()
        prob_sum_E += probs_TE.sum(0).cpu().numpy()
        entropy_sum += float(-torch.special.xlogy(probs_TE, probs_TE).sum())

    def mean_loss(name: str) -> float | None:
        coefficient = coefficients.get(name, 0.0)
        if coefficient == 0 or tokens == 0:
            return None
        weighted = sum(count * float(of_batch[name]) for count, of_batch in zip(tokens_M, losses, strict=True) if count)
        return weighted / tokens / coefficient

    return {
        "tokens": tokens,
        "load": sum(routing.load().cpu().numpy() for routing in routings),
        "gate_mass": sum(_gate_mass(routing) for routing in routings),
        "mean_prob": prob_sum_E / tokens if tokens else np.full(num_experts, math.nan),
        "expert_bias": None if bias_E is None else bias_E.cpu().numpy(),
        "rerouted": None if None in rerouted else sum(count for count in rerouted if count is not None),
        "dropped": None if dropped[0] is None else sum(d.cpu().numpy() for d in dropped if d is not None),
        "invalid": sum(_invalid(routing) for routing in routings),
        "router_entropy": entropy_sum / tokens / math.log(num_experts) if tokens and num_experts > 1 else None,
        "aux_loss": mean_loss("aux_loss"),
        "z_loss": mean_loss("z_loss"),
    }


def _gate_mass(routing: Routing) -> np.ndarray:
    """float64 (E,): the sum of weights per expert, dropped assignments included."""
    ids_N = (routing.expert_ids_TK.reshape(-1) + 1).cpu().numpy()
    weights_N = routing.weights_TK.reshape(-1).double().cpu().numpy()
    return np.bincount(ids_N, weights_N, minlength=routing.num_experts + 1)[1:]


def _invalid(routing: Routing) -> int:
    if routing.invalid_T is None:
        return 0
    invalid_T = routing.invalid_T if routing.token_mask_T is None else routing.invalid_T & routing.token_mask_T
    return int(invalid_T.sum())
