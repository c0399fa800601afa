"""Dispatchers: run each token through its experts and add the results. Same result, different speed.

Shapes: T tokens, D width, K choices a token, N = T*K assignments, E experts.
Every dispatcher is `y_TD = dispatcher(x_TD, routing, experts)` with `experts[e]` a callable (N, D) -> (N, D).
Assignments without an expert (-1) or dropped by capacity add nothing; experts without tokens are not called,
so that their gradient stays None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .routers import check_choice
from .routing import NO_CHOICE, Routing


class Experts(Protocol):
    """A sequence of networks, (N, D) -> (N, D) each: an ExpertBank, or a list of callables."""

    def __len__(self) -> int: ...

    def __getitem__(self, expert: int, /) -> Callable[[Tensor], Tensor]: ...


class Dispatcher(Protocol):
    """What a dispatcher looks like."""

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor: ...


def effective_ids(routing: Routing) -> Tensor:
    """int64 (T, K): the experts that really run; -1 where there is no choice or capacity dropped it."""
    if routing.kept_TK is None:
        return routing.expert_ids_TK
    return torch.where(routing.kept_TK, routing.expert_ids_TK, NO_CHOICE)


def naive_dispatch(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Loop over slots and experts with boolean masks: the reference, easy to check by eye."""
    ids_TK = effective_ids(routing)
    y_TD = torch.zeros_like(x_TD)
    for k in range(routing.top_k):
        for e in range(len(experts)):
            mask_T = ids_TK[:, k] == e
            if mask_T.any():
                weights_N1 = routing.weights_TK[mask_T, k, None].to(x_TD.dtype)
                y_TD = y_TD.index_put((mask_T.nonzero().squeeze(-1),), weights_N1 * experts[e](x_TD[mask_T]), True)
    return y_TD


def sorted_dispatch(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Sort the assignments by expert, run contiguous slices, put them back and sum over k.

    The sort is stable and the combine is an inverse permutation and a sum over (T, K, D), so that the result
    does not depend on scheduling.
    """
    T, K = routing.expert_ids_TK.shape
    ids_N = effective_ids(routing).reshape(T * K)
    order_N = torch.argsort(ids_N, stable=True)  # -1 sorts first, in front of expert 0
    counts = torch.bincount(ids_N + 1, minlength=len(experts) + 1).tolist()
    x_sorted_ND = x_TD[order_N // K]
    slices = x_sorted_ND.split(counts)
    outputs = [torch.zeros_like(slices[0])]
    outputs += [experts[e](x_ND) for e, x_ND in enumerate(slices[1:]) if len(x_ND)]
    y_sorted_ND = torch.cat(outputs)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(T * K, device=order_N.device)
    y_TKD = y_sorted_ND[inverse_N].view(T, K, x_TD.shape[-1])
    return (y_TKD * routing.weights_TK.unsqueeze(-1).to(y_TKD.dtype)).sum(1).to(x_TD.dtype)


DISPATCHERS: dict[str, Dispatcher] = {"naive": naive_dispatch, "sorted": sorted_dispatch}
DISPATCHER_NAMES = ("auto", *DISPATCHERS)


def make_dispatcher(name: str = "auto") -> Dispatcher:
    """The dispatcher of that name; "auto" is the fastest that runs everywhere, sorted.

    Raises ValueError for an unknown name.
    """
    check_choice("dispatcher", name, DISPATCHER_NAMES)
    return DISPATCHERS["sorted" if name == "auto" else name]
