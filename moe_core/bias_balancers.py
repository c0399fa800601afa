"""Balancers that act through a bias on the selection, without a loss: sign bias and quantile bias.

Shapes: T tokens that count, on this rank or on all, E experts, K choices a token, H bins of a histogram.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .balancer_base import Balancer, PastForwards, check_coefficient
from .distributed import max_over_ranks, rows_of_all_ranks, sum_over_ranks
from .routers import Router, check_choice
from .routing import Routing

QuantileUpdate = Literal["forward", "step"]
QuantileMethod = Literal["exact", "histogram"]


class BiasBalancer(Balancer):
    """What balancers with a selection bias share: the float32 buffer `expert_bias` (E,), zero at first."""

    expert_bias: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))

    def bind(self, router: Router) -> None:
        if not router.takes_expert_bias:
            raise ValueError(
                f"balancer {self.name!r} moves a selection bias, which has no effect on a {type(router).__name__}"
            )

    def selection_bias(self, x_TD: Tensor) -> Tensor | None:
        return self.expert_bias


class SignBiasBalancer(BiasBalancer):
    """After each optimizer step: b += delta - mean(delta), delta = rate * sign(mean(count) - count).

    Auxiliary-loss-free balancing (Wang et al., arXiv 2408.15664; DeepSeek-V3, 2412.19437). count: assignments of
    training forwards since the last step, over all micro-batches and ranks. They are summed over ranks at each
    forward, not at the step: every rank's buffers are equal at any moment then, so that whichever rank saves them
    saves them all, and DistributedDataParallel, which copies rank 0's buffers to the others, changes nothing.
    """

    name = "sign-bias"
    count: Tensor

    def __init__(self, num_experts: int, rate: float = 1e-3) -> None:
        super().__init__(num_experts)
        self.rate = check_coefficient("bias rate", rate)
        self.register_buffer("count", torch.zeros(num_experts, dtype=torch.int64))

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        if self.counts_this_forward:
            self.count += sum_over_ranks(routing.load())

    @torch.no_grad()
    def step(self) -> None:
        # integer comparison: 30001 and 30000 are told apart however large the counts grow
        delta_E = self.rate * torch.sign(self.count.sum() - self.count * len(self.count)).float()
        self.expert_bias += delta_E - delta_E.mean()
        self.count.zero_()


class QuantileBalancer(BiasBalancer):
    """A bias set anew from each batch so that every expert would take its K/E of the tokens.

    Route with the old bias; with s the scores that selection ranked and alpha_t the (K+1)-th highest corrected
    score of token t, r = alpha_t - s; bias_i = the K/E quantile ("higher") of r[:, i] over the batch; then
    bias -= mean(bias). The batch's quantile replaces the old bias; it is no moving average.

    update: "forward" replaces the bias in every training-mode forward, also under `no_grad`, never in eval; each
        micro-batch refreshes it. "step" replaces it once per optimizer step, by the mean over the micro-batches
        since the last one, and needs `attach_balancers`.
    method: "exact", or "histogram": the quantile from `num_bins` bins for each expert, which span its smallest to its
        largest observed r; each entry is then within one bin of the exact one. Over several ranks, the batch is that
        of all ranks, and all end with the same bias: exact gathers every rank's r (T E numbers a rank), the
        histogram sums E num_bins counts.

    Needs num_experts > top_k. Raises ValueError otherwise, for unknown names and for a num_bins below 1; refuses
    group-limited routing, where the (K+1)-th score of the chosen groups can be -inf, and expert choice.
    """

    name = "quantile"
    bias_sum: Tensor
    num_updates: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        update: QuantileUpdate = "forward",
        method: QuantileMethod = "exact",
        num_bins: int = 1024,
    ) -> None:
        super().__init__(num_experts)
        if top_k >= num_experts:
            raise ValueError(
                f"the quantile balancer needs num_experts > top_k, not num_experts={num_experts}, top_k={top_k}: "
                "with every expert chosen there is no threshold to move"
            )
        check_choice("update", update, get_args(QuantileUpdate))
        check_choice("method", method, get_args(QuantileMethod))
        if num_bins < 1:
            raise ValueError(f"num_bins={num_bins} is below 1")
        self.top_k, self.update, self.method, self.num_bins = top_k, update, method, num_bins
        if update == "step":
            self.name = "quantile-step"
            self.register_buffer("bias_sum", torch.zeros(num_experts, dtype=torch.float32))
            self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))
        self._past = PastForwards()

    def bind(self, router: Router) -> None:
        super().bind(router)
        if router.num_groups > 1:
            raise ValueError(
                f"balancer {self.name!r} refuses group-limited routing (num_groups={router.num_groups}): the next "
                "best score is that of the chosen groups only, and can be -inf; use sign-bias or num_groups=1"
            )

    def selection_bias(self, x_TD: Tensor) -> Tensor | None:
        if self.update == "step" or not self.training:
            return self.expert_bias  # stands still until the optimizer step
        if self.counts_this_forward:
            self._past.note(x_TD, self.expert_bias)
            return self.expert_bias
        # the bias has moved since the first pass
        noted_E = self._past.recall(x_TD)
        return self.expert_bias if noted_E is None else noted_E

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        if not self.counts_this_forward:
            return
        if routing.threshold_T is None:
            raise ValueError("the quantile balancer needs a routing with thresholds: top-k, without groups")
        counted_T = routing.routed_T & routing.threshold_T.isfinite()
        r_TE = (routing.threshold_T[:, None] - routing.unbiased_selection_TE)[counted_T]
        # an impossible expert (score -inf) counts as its token's worst: an infinite quantile would spoil every bias
        worst_T1 = r_TE.masked_fill(r_TE == torch.inf, -torch.inf).amax(-1, keepdim=True)
        r_TE = torch.minimum(r_TE, worst_T1)
        if self.method == "exact":
            bias_E = _exact_quantile(rows_of_all_ranks(r_TE), self.top_k)
        else:
            bias_E = _histogram_quantile(r_TE, self.top_k, self.num_bins)
        if bias_E is None:  # no tokens on any rank
            return
        bias_E = bias_E - bias_E.mean()
        if self.update == "forward":
            self.expert_bias.copy_(bias_E)
        else:
            self.bias_sum += bias_E
            self.num_updates += 1

    @torch.no_grad()
    def step(self) -> None:
        self._past.clear()
        if self.update == "step" and self.num_updates > 0:
            self.expert_bias.copy_(self.bias_sum / self.num_updates)
            self.bias_sum.zero_()
            self.num_updates.zero_()


def _rank(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Place, from 0, of the "higher" K/E quantile among num_tokens: ceil(q (n - 1)) in whole numbers."""
    return -(-top_k * (num_tokens - 1) // num_experts)


def _exact_quantile(r_TE: Tensor, top_k: int) -> Tensor | None:
    """float32 (E,): the K/E quantile of each column, one of its values; None without rows.

    `torch.quantile` refuses more than 2^24 rows, and interpolates in float where this counts.
    """
    num_tokens, num_experts = r_TE.shape
    if num_tokens == 0:
        return None
    return r_TE.kthvalue(_rank(num_tokens, top_k, num_experts) + 1, dim=0).values


def _histogram_quantile(r_TE: Tensor, top_k: int, num_bins: int) -> Tensor | None:
    """float32 (E,): the middle of the bin that holds each column's quantile, over the rows of all ranks."""
    num_experts = r_TE.shape[1]
    ends_2E = torch.stack([-r_TE.amin(0), r_TE.amax(0)]) if len(r_TE) else r_TE.new_full((2, num_experts), -torch.inf)
    ends_2E = max_over_ranks(ends_2E)
    lowest_E = -ends_2E[0]
    width_E = (ends_2E[1] - lowest_E) / num_bins
    bin_TE = ((r_TE - lowest_E) / width_E.clamp_min(torch.finfo(torch.float32).tiny)).long().clamp(0, num_bins - 1)
    first_bin_E = torch.arange(num_experts, device=r_TE.device) * num_bins
    count_EH = torch.bincount((first_bin_E + bin_TE).view(-1), minlength=num_experts * num_bins)
    count_EH = sum_over_ranks(count_EH).view(num_experts, num_bins)
    num_tokens = int(count_EH[0].sum())
    if num_tokens == 0:
        return None
    bin_E = (count_EH.cumsum(-1) <= _rank(num_tokens, top_k, num_experts)).sum(-1)
    return lowest_E + (bin_E + 0.5) * width_E
