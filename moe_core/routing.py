"""What a router decided: the contract between routers, balancers, capacity, dispatchers and the recorder.

Shapes: T tokens, E experts, K choices a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FEW = 16  # scores a row, up to which one sort is quicker than making pairs of them
NO_CHOICE = -1  # the id of a slot without an expert: padding, an invalid row, an unused slot


@dataclass(frozen=True)
class Routing:
    """The decisions of one router over T tokens.

    logits_TE     float32, raw router logits, before noise and bias
    scores_TE     float32, after the score function, before noise and bias; 0 in invalid rows
    expert_ids_TK int64, wanted experts, best selection score first; -1 = no choice made
    weights_TK    float32, gate values from the unbiased scores; 0 where there is no choice
    kept_TK       bool or None, False where capacity dropped the assignment (its id stays)
    token_mask_T  bool or None, True = a real token
    invalid_T     bool or None, True = a row that could not be routed (NaN, +inf, fewer than K finite logits)
    threshold_T   float32 or None, the (K+1)-th corrected score, where the balancer needs it
    expert_bias_E float32 or None, a copy of the selection bias that this decision used
    selection_TE  float32 or None, what selection ranked before the bias was added, where that is not scores_TE:
                  scores with noise in them, or logits where the softmax comes after top-k
    """

    logits_TE: Tensor
    scores_TE: Tensor
    expert_ids_TK: Tensor
    weights_TK: Tensor
    kept_TK: Tensor | None = None
    token_mask_T: Tensor | None = None
    invalid_T: Tensor | None = None
    threshold_T: Tensor | None = None
    expert_bias_E: Tensor | None = None
    selection_TE: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logits_TE.shape[-1]

    @property
    def top_k(self) -> int:
        """K."""
        return self.expert_ids_TK.shape[-1]

    @property
    def unbiased_selection_TE(self) -> Tensor:
        """float32 (T, E): what selection ranked before the bias was added."""
        return self.scores_TE if self.selection_TE is None else self.selection_TE

    @property
    def routed_T(self) -> Tensor:
        """bool (T,): the tokens that count, neither padding nor invalid."""
        routed_T = torch.ones(self.logits_TE.shape[0], dtype=torch.bool, device=self.logits_TE.device)
        if self.token_mask_T is not None:
            routed_T = routed_T & self.token_mask_T
        if self.invalid_T is not None:
            routed_T = routed_T & ~self.invalid_T
        return routed_T

    def load(self) -> Tensor:
        """int64 (E,): assignments per expert, before capacity drops any; padding and invalid rows not counted."""
        return count_load(self.expert_ids_TK, self.num_experts)


def full_probabilities(routing: Routing) -> Tensor:
    """Each token's distribution over all experts, float32 (T, E), before noise and bias; 0 in invalid rows.

    Softmax scores are one already; sigmoid scores are divided by their row's sum (DeepSeek-V3, arXiv 2412.19437).
    """
    smallest = torch.finfo(torch.float32).tiny  # 0 / 0 in an invalid row gives 0
    return routing.scores_TE / routing.scores_TE.sum(-1, keepdim=True).clamp_min(smallest)


def mean_probabilities(routing: Routing) -> Tensor:
    """P of the aux loss, float32 (E,): `full_probabilities` averaged over the tokens that count; 0 if none does."""
    routed_T = routing.routed_T
    probs_TE = torch.where(routed_T[:, None], full_probabilities(routing), 0)
    return probs_TE.sum(0) / routed_T.sum().clamp_min(1)


def count_load(expert_ids: Tensor, num_experts: int) -> Tensor:
    """Assignments per expert, int64 (num_experts,); ids of -1 are left out (so no slot of theirs is needed)."""
    flat = expert_ids.reshape(-1) + 1
    return torch.bincount(flat, minlength=num_experts + 1)[1:]


def top_k_by_lowest_id(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row and their ids, best first; equal scores go to the lowest id.

    `torch.topk` leaves the order of equal values open, and with it which of them is chosen. Here it ranks pairs of
    score and id, of which no two are equal: the same on every device, and again when activations are recomputed.
    Few scores are sorted, stably, which comes to the same. Scores hold no NaN.
    """
    if scores_TE.shape[-1] <= FEW or scores_TE.dtype != torch.float32:
        values_TE, ids_TE = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
        return values_TE[:, :k], ids_TE[:, :k]
    last = scores_TE.shape[-1] - 1
    # The bits of a float32 rank as an integer does, once those of negative numbers are turned round; + 0 turns -0 to 0.
    bits_TE = (scores_TE.detach() + 0.0).view(torch.int32)
    rank_TE = bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)
    pair_TE = (rank_TE.long() << 32) | torch.arange(last, -1, -1, device=scores_TE.device)
    ids_TK = last - (pair_TE.topk(k).values & 0xFFFFFFFF)
    return scores_TE.gather(-1, ids_TK), ids_TK


def rerouted_assignments(routing: Routing) -> int | None:
    """Assignments that the selection bias changed: chosen experts that the scores alone would not have chosen.

    None when no bias was used.
    """
    if routing.expert_bias_E is None:
        return None
    _, plain_ids_TK = top_k_by_lowest_id(routing.unbiased_selection_TE, routing.top_k)
    same_TK = (routing.expert_ids_TK.unsqueeze(-1) == plain_ids_TK.unsqueeze(-2)).any(-1)
    chosen_TK = routing.expert_ids_TK != NO_CHOICE
    return int((chosen_TK & ~same_TK).sum())


def in_backward() -> bool:
    """True inside a backward pass: there, a forward is a recomputation of activations, not a new one.

    Holds for reentrant and non-reentrant checkpointing alike, where `torch.is_grad_enabled()` tells neither
    apart. Balancers and the recorder ask this before they count.
    """
    return torch._C._current_graph_task_id() != -1
