"""The experts' work as one autograd function: what `sorted_dispatch` runs on an ExpertBank.

Shapes: T tokens, K choices a token, N = T*K assignments, C of them in one chunk, D width, F expert width, H width of
the first product, E experts.

Why by hand: autograd would keep a copy of each token for each of its experts, every product and every factor of the
activation, all N rows long, and go through main memory for each. Here a chunk of experts, as many as the cache holds,
is gathered, multiplied, activated, weighted and added to its tokens before the next. Kept for the backward pass are
the first product (N, H) and the experts' outputs (N, D); the gather and the activation are done again.

The results do not depend on scheduling: chunks are added one after another, in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .experts import ExpertBank, FeedForward

CHUNK_BYTES = 2**21  # of first products: on 2 cores with 1 MiB of L2 each as fast as any from 1 to 4 MiB


def can_fuse(x_TD: Tensor, experts: ExpertBank) -> bool:
    """Whether `fused_experts` gives what calling the experts one by one would give.

    Not so for banks without one `kind`, for parameters of another dtype than x, and under autocast, which chooses
    dtypes product by product.
    """
    return (
        experts.kind is not None
        and not torch.is_autocast_enabled(x_TD.device.type)
        and all(weight.dtype == x_TD.dtype for role in experts.weights_by_role() for weight in role)
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
    parameters = [weight for role in experts.weights_by_role() for weight in role]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weights_TK, *parameters))
    # Elsewhere than on CPU additions to one token from two experts at once would come in any order: one by one there.
    h_bytes = parameters[0].shape[0] * x_TD.element_size()
    rows = CHUNK_BYTES // h_bytes if x_TD.device.type == "cpu" else 0
    return _FusedExperts.apply(
        x_TD, weights_TK, order_N, _chunks(counts, rows), (len(experts), kind), needs_grad, *parameters
    )


@dataclass(frozen=True)
class _Chunk:
    """Neighbouring experts: their rows among the sorted assignments, which experts, and how many rows of each."""

    rows: slice
    experts: tuple[int, ...]
    counts: tuple[int, ...]


def _chunks(counts: Sequence[int], max_rows: int) -> tuple[_Chunk, ...]:
    """Experts that have rows, as many in a chunk as stay within max_rows, at least one."""
    chunks: list[_Chunk] = []
    inside: list[int] = []
    start = end = 0
    for expert, count in enumerate([*counts, max_rows + 1]):  # the last one closes the last chunk
        if inside and end - start + count > max_rows:
            chunks.append(_Chunk(slice(start, end), tuple(inside), tuple(counts[e] for e in inside)))
            inside, start = [], end
        if count:
            inside.append(expert)
            end += count
    return tuple(chunks)


def _products(x_CD: Tensor, chunk: _Chunk, matrices: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Tensor:
    """Each row times its expert's matrix, plus its bias where there are any."""
    out = x_CD.new_empty(len(x_CD), matrices[0].shape[1])
    for expert, x_nD, out_n in zip(chunk.experts, x_CD.split(chunk.counts), out.split(chunk.counts), strict=True):
        if biases:
            torch.addmm(biases[expert], x_nD, matrices[expert], out=out_n)
        else:
            torch.mm(x_nD, matrices[expert], out=out_n)
    return out


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        order_N: Tensor,
        chunks: tuple[_Chunk, ...],
        experts: tuple[int, type[FeedForward]],
        needs_grad: bool,
        *parameters: Tensor,
    ) -> Tensor:
        num_experts, kind = ctx.experts = experts
        ctx.chunks = chunks
        w_in, w_out, b_in, b_out = _by_role(parameters, num_experts)
        w_in_t, w_out_t = [w.t() for w in w_in], [w.t() for w in w_out]
        token_N = order_N // weights_TK.shape[1]
        weights_N1 = weights_TK.reshape(-1, 1).index_select(0, order_N)
        sum_TD = zeros_for_sum(x_TD, weights_TK)
        # one tensor a chunk: the allocator hands those out again, where one of all N rows would be new pages
        kept: list[Tensor] = []
        for chunk in chunks:
            token_C = token_N[chunk.rows]
            h_CH = _products(x_TD.index_select(0, token_C), chunk, w_in_t, b_in)
            y_CD = _products(kind.activate(h_CH), chunk, w_out_t, b_out)
            sum_TD.index_add_(0, token_C, (y_CD * weights_N1[chunk.rows]).to(sum_TD.dtype))
            if needs_grad:
                kept += (h_CH, y_CD)
        if needs_grad:
            ctx.save_for_backward(x_TD, weights_TK, order_N, token_N, weights_N1, *parameters, *kept)
        return sum_TD.to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, order_N, token_N, weights_N1, *rest = ctx.saved_tensors
        needs_x, needs_weights, _, _, _, _, *needs_parameters = ctx.needs_input_grad
        parameters, kept = rest[: len(needs_parameters)], iter(rest[len(needs_parameters) :])
        num_experts, kind = ctx.experts
        w_in, w_out, _, _ = _by_role(parameters, num_experts)
        d_parameters: list[Tensor | None] = [None] * len(parameters)
        d_weights_N = torch.zeros_like(weights_N1[:, 0])
        d_x_TD = zeros_for_sum(x_TD, weights_TK) if needs_x else None
        for chunk, h_CH, y_CD in zip(ctx.chunks, kept, kept, strict=True):
            token_C = token_N[chunk.rows]
            d_y_CD = d_sum_TD.index_select(0, token_C)
            if needs_weights:
                d_weights_N[chunk.rows] = (d_y_CD * y_CD).sum(-1, dtype=d_weights_N.dtype)
            d_y_CD.mul_(weights_N1[chunk.rows])
            a_CF, d_h_CH = kind.activate_backward(h_CH, _products(d_y_CD, chunk, w_out))
            x_CD = x_TD.index_select(0, token_C)
            pieces = (t.split(chunk.counts) for t in (d_h_CH, x_CD, d_y_CD, a_CF))
            for expert, d_h_nH, x_nD, d_y_nD, a_nF in zip(chunk.experts, *pieces, strict=True):
                products = ((d_h_nH, x_nD), (d_y_nD, a_nF), (d_h_nH, None), (d_y_nD, None))  # w_in, w_out, biases
                for at, (d_out, given) in zip(range(expert, len(parameters), num_experts), products, strict=False):
                    if needs_parameters[at]:
                        d_parameters[at] = d_out.sum(0) if given is None else torch.mm(d_out.t(), given)
            if d_x_TD is not None:
                d_x_TD.index_add_(0, token_C, _products(d_h_CH, chunk, w_in).to(d_x_TD.dtype))
            del d_y_CD, a_CF, d_h_CH, x_CD, pieces  # before the next chunk makes its own
        d_weights_TK = torch.empty_like(d_weights_N).index_copy_(0, order_N, d_weights_N).view_as(weights_TK)
        return (
            None if d_x_TD is None else d_x_TD.to(x_TD.dtype),
            d_weights_TK if needs_weights else None,
            *(None,) * 4,
            *d_parameters,
        )


def _by_role(parameters: Sequence[Tensor], num_experts: int) -> tuple[Sequence[Tensor], ...]:
    """Of all experts the W_in, W_out, b_in and b_out; the last two empty without biases."""
    roles = [parameters[start : start + num_experts] for start in range(0, 4 * num_experts, num_experts)]
    return tuple(roles)


def zeros_for_sum(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
    """Where weighted rows are added up: shaped like x, in its dtype or that of the weights, whichever is wider."""
    return torch.zeros_like(x_TD, dtype=torch.promote_types(x_TD.dtype, weights_TK.dtype))
