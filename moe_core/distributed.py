"""Sums over the processes of torch.distributed, for balancers whose layers are trained on several ranks.

Every function is a collective over the default process group: all ranks call it, in the same order. Without a
process group, or in a group of one, each returns what it was given.

Shapes: N rows (T tokens, on one rank or on all), E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist


def world_size() -> int:
    """Ranks in the default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of every rank's x, any shape, without gradient."""
    return _reduced(x, "sum")


def max_over_ranks(x: Tensor) -> Tensor:
    """The elementwise maximum of every rank's x, any shape, without gradient."""
    return _reduced(x, "max")


def _reduced(x: Tensor, how: str) -> Tensor:
    if world_size() == 1:
        return x.detach()
    reduced = x.detach().clone()
    dist.all_reduce(reduced, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
    return reduced


def rows_of_all_ranks(x_NE: Tensor) -> Tensor:
    """Every rank's rows below each other, rank 0 first; ranks may have different numbers of them, also none."""
    if world_size() == 1:
        return x_NE.detach()
    num_rows = x_NE.shape[0]
    rows_R = [torch.zeros(1, dtype=torch.int64, device=x_NE.device) for _ in range(world_size())]
    dist.all_gather(rows_R, torch.tensor([num_rows], device=x_NE.device))
    counts_R = [int(rows) for rows in rows_R]
    # all_gather wants equal shapes: the longest rank's, zeros behind the rows of the others
    padded_NE = x_NE.new_zeros(max(counts_R), *x_NE.shape[1:])
    padded_NE[:num_rows] = x_NE.detach()
    gathered = [torch.empty_like(padded_NE) for _ in counts_R]
    dist.all_gather(gathered, padded_NE)
    return torch.cat([rank_NE[:count] for rank_NE, count in zip(gathered, counts_R, strict=True)])


def token_share(num_tokens: Tensor) -> Tensor:
    """float32 scalar: this rank's tokens over the mean of all ranks; 1 where ranks have equal numbers.

    Data-parallel training averages gradients over ranks. A loss that is a mean over a rank's own tokens, times this
    share, averages to the mean over all tokens, as one process would have it. 0 where no rank has tokens.
    """
    all_tokens = sum_over_ranks(num_tokens)
    return (num_tokens * world_size() / all_tokens.clamp_min(1)).float()
