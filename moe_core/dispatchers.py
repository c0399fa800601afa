"""Dispatchers: run each token through its experts and add the results. Same result, different speed.

Shapes: T tokens, D width, K choices a token, N = T*K assignments, E experts.
Every dispatcher is `y_TD = dispatcher(x_TD, routing, experts)` with `experts[e]` a callable (N, D) -> (N, D).
Assignments without an expert (-1) or dropped by capacity add nothing. Experts without tokens are not called, so that
their gradient stays None; an ExpertBank may ask for zeros instead (`zero_idle_gradients`).

| name | how | use it |
|---|---|---|
| naive | loop over slots and experts, boolean masks | as the reference, easy to check by eye |
| masked | loop over experts, one index_add each | for second derivatives, or experts of any kind, simply |
| sorted | assignments sorted by expert, contiguous slices; on an ExpertBank one hand-written pass (fused.py) | on CPU |
| grouped | the sorted layout through `torch.nn.functional.grouped_mm` (grouped.py) | on GPU |

Sums over a token's experts run in the dtype of the weights (float32) or of x, whichever is wider. All are
deterministic. Under torch.compile the dispatch itself runs eagerly, as one graph break: how many tokens an expert
gets is known at run time only. Under autocast, sorted falls back to calling the experts one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .experts import ExpertBank
from .fused import can_fuse, fused_experts, zeros_for_sum
from .grouped import can_group, grouped_experts
from .routers import check_choice
from .routing import NO_CHOICE, Routing, count_load


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


@dataclass(frozen=True)
class SortedAssignments:
    """The assignments of one forward, sorted by expert.

    order_N int64: places in the flattened (T, K), stably sorted by expert, those without an expert last.
    load_E int64: how many each expert got.
    """

    order_N: Tensor
    load_E: Tensor


def sort_assignments(ids_TK: Tensor, num_experts: int) -> SortedAssignments:
    """Sort by expert: ids [[2, 0], [0, 2], [2, 1]] give order [1, 2, 5, 0, 3, 4] and load [2, 1, 3]."""
    ids_N = ids_TK.reshape(-1)
    last_N = ids_N.masked_fill(ids_N == NO_CHOICE, num_experts)
    load_E = torch.bincount(last_N, minlength=num_experts + 1)[:num_experts]
    return SortedAssignments(torch.argsort(last_N, stable=True), load_E)


@torch.compiler.disable
def naive_dispatch(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Loop over slots and experts with boolean masks: the reference, easy to check by eye."""
    ids_TK = effective_ids(routing)
    # tied to the weights, so that a batch of nothing but padding can be differentiated as any other
    y_TD = zeros_for_sum(x_TD, routing.weights_TK) + 0 * routing.weights_TK.sum()
    for k in range(routing.top_k):
        for e in range(len(experts)):
            mask_T = ids_TK[:, k] == e
            if mask_T.any():
                weighted_ND = experts[e](x_TD[mask_T]) * routing.weights_TK[mask_T, k, None]
                y_TD = y_TD.index_put((mask_T.nonzero().squeeze(-1),), weighted_ND.to(y_TD.dtype), accumulate=True)
    return _with_idle_gradients(y_TD.to(x_TD.dtype), experts, ids_TK)


@torch.compiler.disable
def masked_dispatch(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Loop over experts: find each one's assignments, run it, add its rows to their tokens."""
    ids_TK = effective_ids(routing)
    # tied to the weights, so that a batch of nothing but padding can be differentiated as any other
    y_TD = zeros_for_sum(x_TD, routing.weights_TK) + 0 * routing.weights_TK.sum()
    for e in range(len(experts)):
        token_N, slot_N = (ids_TK == e).nonzero(as_tuple=True)
        if len(token_N):
            weighted_ND = experts[e](x_TD.index_select(0, token_N)) * routing.weights_TK[token_N, slot_N, None]
            y_TD = y_TD.index_add(0, token_N, weighted_ND.to(y_TD.dtype))
    return _with_idle_gradients(y_TD.to(x_TD.dtype), experts, ids_TK)


@torch.compiler.disable
def sorted_dispatch(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """Sort the assignments by expert and run contiguous slices.

    On an ExpertBank, all of it in one hand-written pass (`fused_experts`), wherever that gives the same. Elsewhere the
    slices are called one by one, put back by the inverse permutation and summed over k.
    """
    ids_TK = effective_ids(routing)
    assignments = sort_assignments(ids_TK, len(experts))
    counts = assignments.load_E.tolist()
    if isinstance(experts, ExpertBank) and can_fuse(x_TD, experts):
        y_TD = fused_experts(x_TD, routing.weights_TK, assignments.order_N, counts, experts)
    else:
        y_TD = _called_in_order(x_TD, routing, assignments.order_N, counts, experts)
    return _with_idle_gradients(y_TD, experts, ids_TK)


@torch.compiler.disable
def grouped_dispatch(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """The sorted layout, all experts in one `torch.nn.functional.grouped_mm` per product.

    Where that cannot run (see `can_group`), the same as `sorted_dispatch`.
    """
    ids_TK = effective_ids(routing)
    if not (isinstance(experts, ExpertBank) and can_group(x_TD, ids_TK.numel(), experts)):
        return sorted_dispatch(x_TD, routing, experts)
    assignments = sort_assignments(ids_TK, len(experts))
    x_sorted_ND, inverse_N = _gather_sorted(x_TD, assignments.order_N, routing.top_k)
    # grouped_mm leaves rows past the last expert's as it found them, in outputs and in gradients
    unrouted_N1 = torch.arange(ids_TK.numel(), device=x_TD.device)[:, None] >= assignments.load_E.sum()
    y_sorted_ND = grouped_experts(x_sorted_ND.masked_fill(unrouted_N1, 0), assignments.load_E, unrouted_N1, experts)
    return _combine(y_sorted_ND.masked_fill(unrouted_N1, 0), routing, inverse_N).to(x_TD.dtype)


def auto_dispatch(x_TD: Tensor, routing: Routing, experts: Experts) -> Tensor:
    """The fastest: sorted on CPU, grouped elsewhere.

    Measured on CPU, forward and backward, over widths 64 to 512, 8 to 128 experts and 1 to 4096 tokens: sorted came
    first everywhere or within a fifth of a millisecond of the first (`benchmarks/dispatch.py`, `routescope bench
    dispatch`). Elsewhere the loop over experts would be one small launch after another, which grouped_mm avoids.
    """
    return (sorted_dispatch if x_TD.device.type == "cpu" else grouped_dispatch)(x_TD, routing, experts)


DISPATCHERS: dict[str, Dispatcher] = {
    "naive": naive_dispatch,
    "masked": masked_dispatch,
    "sorted": sorted_dispatch,
    "grouped": grouped_dispatch,
}
DISPATCHER_NAMES = ("auto", *DISPATCHERS)


def make_dispatcher(name: str = "auto") -> Dispatcher:
    """The dispatcher of that name; "auto" chooses the fastest by itself.

    Raises ValueError for an unknown name.
    """
    check_choice("dispatcher", name, DISPATCHER_NAMES)
    return auto_dispatch if name == "auto" else DISPATCHERS[name]


def _called_in_order(x_TD: Tensor, routing: Routing, order_N: Tensor, counts: list[int], experts: Experts) -> Tensor:
    x_sorted_ND, inverse_N = _gather_sorted(x_TD, order_N, routing.top_k)
    slices = x_sorted_ND.split([*counts, len(order_N) - sum(counts)])
    outputs = [experts[e](x_ND) for e, x_ND in enumerate(slices[:-1]) if len(x_ND)]
    # rows without an expert are 0, in the dtype of the others, which autocast may have chosen
    outputs.append(torch.zeros_like(slices[-1], dtype=outputs[0].dtype if outputs else None))
    return _combine(torch.cat(outputs), routing, inverse_N).to(x_TD.dtype)


def _gather_sorted(x_TD: Tensor, order_N: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Each assignment's token, sorted by expert (N, D), and the permutation back, int64 (N,)."""
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return _Gather.apply(x_TD, order_N // top_k, inverse_N), inverse_N


def _combine(y_sorted_ND: Tensor, routing: Routing, inverse_N: Tensor) -> Tensor:
    """Put the experts' rows back in the order of tokens, weight them and sum over k: (T, D)."""
    T, K = routing.expert_ids_TK.shape
    y_TKD = y_sorted_ND.index_select(0, inverse_N).view(T, K, y_sorted_ND.shape[-1])
    return (y_TKD * routing.weights_TK.unsqueeze(-1)).sum(1)


class _Gather(torch.autograd.Function):
    """x_TD[token_N], with a gradient summed by the inverse permutation: no scatter, so in one fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.shape = x_TD.shape
        return x_TD.index_select(0, token_N)

    @staticmethod
    def backward(ctx: Any, d_sorted_ND: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        T, D = ctx.shape
        return d_sorted_ND.index_select(0, inverse_N).view(T, len(inverse_N) // max(T, 1), D).sum(1), None, None


def _with_idle_gradients(y_TD: Tensor, experts: Experts, ids_TK: Tensor) -> Tensor:
    """The same y, from which the parameters of experts without tokens get zeros, where the bank asks for that."""
    if not (isinstance(experts, ExpertBank) and experts.zero_idle_gradients and torch.is_grad_enabled()):
        return y_TD
    load = count_load(ids_TK, len(experts)).tolist()
    idle = [p for e, n in enumerate(load) if n == 0 for p in experts[e].parameters() if p.requires_grad]
    return _ZeroGradients.apply(y_TD, *idle) if idle else y_TD


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, *idle: Tensor) -> Tensor:
        ctx.save_for_backward(*idle)
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, d_y_TD: Tensor) -> tuple[Tensor, ...]:
        return d_y_TD, *(torch.zeros_like(p) for p in ctx.saved_tensors)
