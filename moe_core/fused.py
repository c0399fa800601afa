"""The experts' work as one autograd function: what `sorted_dispatch` runs on an ExpertBank.

Shapes: T tokens, K choices a token, N = T*K assignments, n assignments of one expert, D width, F expert width,
H width of the first product, E experts.

Why by hand: autograd would keep a copy of each token for each of its experts, every product and every factor of the
activation, all N rows long, and go through main memory for each. Here one expert's rows are gathered, multiplied,
activated, weighted and added to their tokens while they are still in cache. Kept for the backward pass are the first
product (N, H) and the experts' outputs (N, D); the gather and the activation are done again.

The results do not depend on scheduling: experts add to their tokens one after another, in the order of their ids,
and a token's experts are distinct, so that no two rows of one addition meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .experts import ExpertBank, FeedForward


def can_fuse(x_TD: Tensor, experts: ExpertBank) -> bool:
    """Whether `fused_experts` gives what calling the experts one by one would give.

    Not so for banks without one `kind`, for parameters of another dtype than x, and under autocast, which chooses
    dtypes product by product.
    """
    return (
        experts.kind is not None
        and not torch.is_autocast_enabled(x_TD.device.type)
        and all(parameter.dtype == x_TD.dtype for parameter in experts.parameters())
    )


def fused_experts(
    x_TD: Tensor, weights_TK: Tensor, order_N: Tensor, counts: Sequence[int], experts: ExpertBank
) -> Tensor:
    """Each token's weighted sum over its experts, (T, D); first derivatives only.

    order_N: the assignments, as places in the flattened (T, K), sorted by expert, those without an expert last.
    counts: assignments of each expert.
    """
    kind = experts.kind
    assert kind is not None  # see can_fuse
    parameters = [weight for weights in experts.weights() for weight in weights]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weights_TK, *parameters))
    return _FusedExperts.apply(x_TD, weights_TK, order_N, tuple(counts), kind, needs_grad, *parameters)


def _slices(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _linear(x_nD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # not functional.linear: one call less on the way, and this one counts
    return torch.mm(x_nD, weight.t()) if bias is None else torch.addmm(bias, x_nD, weight.t())


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        order_N: Tensor,
        counts: tuple[int, ...],
        kind: type[FeedForward],
        needs_grad: bool,
        *parameters: Tensor,
    ) -> Tensor:
        per_expert = len(parameters) // len(counts)
        token_N = order_N // weights_TK.shape[1]
        weights_N1 = weights_TK.reshape(-1, 1).index_select(0, order_N)
        sum_TD = torch.zeros_like(x_TD, dtype=torch.promote_types(x_TD.dtype, weights_TK.dtype))
        # one tensor per expert: the allocator hands those out again, where one of all N rows would be new pages
        kept: list[Tensor] = []
        for expert, mine in _slices(counts):
            w_in_HD, w_out_DF, b_in_H, b_out_D = _of(parameters, expert, per_expert)
            h_nH = _linear(x_TD.index_select(0, token_N[mine]), w_in_HD, b_in_H)
            y_nD = _linear(kind.activate(h_nH), w_out_DF, b_out_D)
            sum_TD.index_add_(0, token_N[mine], (y_nD * weights_N1[mine]).to(sum_TD.dtype))
            if needs_grad:
                kept += (h_nH, y_nD)
        ctx.counts, ctx.kind, ctx.per_expert = counts, kind, per_expert
        if needs_grad:
            ctx.save_for_backward(x_TD, weights_TK, order_N, *parameters, *kept)
        return sum_TD.to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, order_N, *rest = ctx.saved_tensors
        needs_x, needs_weights, _, _, _, _, *needs_parameter = ctx.needs_input_grad
        parameters, kept = rest[: len(needs_parameter)], iter(rest[len(needs_parameter) :])
        token_N = order_N // weights_TK.shape[1]
        weights_N1 = weights_TK.reshape(-1, 1).index_select(0, order_N)
        d_weights_N = torch.zeros_like(weights_N1[:, 0]) if needs_weights else None
        sum_dtype = torch.promote_types(x_TD.dtype, weights_TK.dtype)
        d_x_TD = torch.zeros_like(x_TD, dtype=sum_dtype) if needs_x else None
        d_parameters: list[Tensor | None] = [None] * len(parameters)
        for (expert, mine), h_nH, y_nD in zip(_slices(ctx.counts), kept, kept, strict=True):
            w_in_HD, w_out_DF, b_in_H, b_out_D = _of(parameters, expert, ctx.per_expert)
            at = expert * ctx.per_expert
            d_y_nD = d_sum_TD.index_select(0, token_N[mine])
            if d_weights_N is not None:
                torch.sum(d_y_nD * y_nD, dim=-1, dtype=weights_TK.dtype, out=d_weights_N[mine])
            d_y_nD.mul_(weights_N1[mine])
            a_nF, d_h_nH = ctx.kind.activate_backward(h_nH, torch.mm(d_y_nD, w_out_DF))
            if needs_parameter[at]:
                d_parameters[at] = torch.mm(d_h_nH.t(), x_TD.index_select(0, token_N[mine]))
            if needs_parameter[at + 1]:
                d_parameters[at + 1] = torch.mm(d_y_nD.t(), a_nF)
            if b_in_H is not None and needs_parameter[at + 2]:
                d_parameters[at + 2] = d_h_nH.sum(0)
            if b_out_D is not None and needs_parameter[at + 3]:
                d_parameters[at + 3] = d_y_nD.sum(0)
            if d_x_TD is not None:
                d_x_TD.index_add_(0, token_N[mine], torch.mm(d_h_nH, w_in_HD).to(sum_dtype))
        d_weights_TK = None
        if d_weights_N is not None:
            d_weights_TK = torch.empty_like(d_weights_N).index_copy_(0, order_N, d_weights_N).view_as(weights_TK)
        return None if d_x_TD is None else d_x_TD.to(x_TD.dtype), d_weights_TK, *(None,) * 4, *d_parameters


def _of(
    parameters: Sequence[Tensor], expert: int, per_expert: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """W_in, W_out, b_in and b_out of one expert, the biases None where there are none."""
    w_in_HD, w_out_DF, *biases = parameters[expert * per_expert : (expert + 1) * per_expert]
    b_in_H, b_out_D = biases or (None, None)
    return w_in_HD, w_out_DF, b_in_H, b_out_D
