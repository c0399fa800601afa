"""Expert capacity: how many assignments an expert takes, and which are dropped beyond that.

Shapes: T tokens, E experts, K choices a token, N = T*K assignments.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from .choices import DropPolicy
from .routers import check_choice
from .routing import NO_CHOICE, Routing, count_load


def expert_capacity(
    num_tokens: int, num_experts: int, top_k: int, capacity_factor: float, min_capacity: int = 4
) -> int:
    """Assignments an expert may take: clamp(ceil(T k / E * capacity_factor), min_capacity, T).

    (GShard, arXiv 2006.16668; Switch, arXiv 2101.03961.) T counts real tokens. Raises ValueError for a factor
    that is not positive and finite.
    """
    if not (math.isfinite(capacity_factor) and capacity_factor > 0):
        raise ValueError(f"capacity_factor={capacity_factor} is not a positive, finite number")
    wanted = math.ceil(num_tokens * top_k / num_experts * capacity_factor)
    return min(max(wanted, min_capacity), num_tokens)


def drop_over_capacity(routing: Routing, capacity: int, policy: DropPolicy = "position") -> Routing:
    """The same routing with `kept_TK` marking what fits: at most `capacity` assignments an expert.

    position: all first choices before all second choices, earlier tokens first.
    probs: the highest weight wins; equal weights by position.

    A dropped assignment keeps its id and is still counted in the load; it adds nothing to the output.
    Raises ValueError for an unknown policy.
    """
    check_choice("drop policy", policy, get_args(DropPolicy))
    T, K = routing.expert_ids_TK.shape
    # slot-major order: first choices of all tokens, then second choices
    ids_N = routing.expert_ids_TK.T.reshape(-1)
    if policy == "probs":
        by_weight_N = torch.argsort(routing.weights_TK.detach().T.reshape(-1), descending=True, stable=True)
    else:
        by_weight_N = torch.arange(T * K, device=ids_N.device)
    # a stable sort by expert keeps the order of preference within each expert
    by_expert_N = by_weight_N[torch.argsort(ids_N[by_weight_N], stable=True)]
    sorted_ids_N = ids_N[by_expert_N]
    first_N = torch.searchsorted(sorted_ids_N, sorted_ids_N)  # where each expert's group starts
    place_N = torch.arange(T * K, device=ids_N.device) - first_N
    kept_N = torch.empty(T * K, dtype=torch.bool, device=ids_N.device)
    kept_N[by_expert_N] = (place_N < capacity) & (sorted_ids_N != NO_CHOICE)
    return replace(routing, kept_TK=kept_N.view(K, T).T)


def dropped_load(routing: Routing) -> Tensor | None:
    """int64 (E,): dropped assignments per expert; None where capacity was off."""
    if routing.kept_TK is None:
        return None
    dropped_TK = torch.where(routing.kept_TK, NO_CHOICE, routing.expert_ids_TK)
    return count_load(dropped_TK, routing.num_experts)
