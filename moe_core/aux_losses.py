"""Balancers that act through the loss: the Switch auxiliary loss and the router z-loss.

Shapes: T tokens, E experts, K choices a token, B sequences of S tokens each (T = B*S; the whole batch as one
sequence where the level says so).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .balancer_base import Balancer, PastForwards, check_coefficient
from .distributed import sum_over_ranks, token_share, world_size
from .routers import Router, check_choice
from .routing import NO_CHOICE, Routing, count_load, full_probabilities

AuxLevel = Literal["batch", "sequence", "global"]
ZLevel = Literal["batch", "global"]


class SwitchAuxLoss(Balancer):
    """coefficient * E * sum_i f_i P_i (Switch Transformer, arXiv 2101.03961, eq. 4 to 6).

    f_i = assignments of expert i / (T K), P_i = mean over tokens of the full distribution, before noise and bias.
    A uniform load gives the coefficient itself, for every E and K. An all-padding batch gives 0. The gradient flows
    through P alone.

    level: where f and P are taken.
        "batch": over the tokens of this forward, on this rank.
        "sequence": over each sequence, then averaged over the sequences with tokens (DeepSeek-V3, arXiv
            2412.19437, eq. 17 to 20). Works on what the layer says of its sequences.
        "global": f over all ranks and over the micro-batches since the last optimizer step, this one included
            (arXiv 2501.11873); P over this forward's tokens. Each rank's loss is weighted by its share of the tokens,
            so that averaged gradients, as data-parallel training has them, are those of one process, whatever the
            number of ranks; and it is a mean, so that dividing by the number of micro-batches as for any other loss
            keeps accumulation from growing it. Needs `attach_balancers`, which clears the counts at each optimizer
            step. In evaluation f is the forward's own.
    soft: P in place of f, E * sum_i P_i^2: a form of teaching code. It evens out probabilities, not loads, and a
        router sure of its choices satisfies it no better than an undecided one. Not at the global level.

    Raises ValueError for a bad coefficient, an unknown level, a soft global loss, and in `losses` for a sequence
    level without num_sequences.
    """

    count: Tensor | None

    def __init__(self, coefficient: float = 1e-2, level: AuxLevel = "batch", *, soft: bool = False) -> None:
        super().__init__()
        check_choice("aux loss level", level, get_args(AuxLevel))
        if soft and level == "global":
            raise ValueError("a soft aux loss has no level='global': it counts no assignments; choose 'batch'")
        self.coefficient = check_coefficient("aux loss coefficient", coefficient)
        self.level, self.soft = level, soft
        self.name = "-".join(["soft"] * soft + [level] * (level != "batch") + ["aux"])
        self.register_buffer("count", None)  # of all ranks since the last optimizer step; global level only
        self._past = PastForwards()

    @property
    def coefficients(self) -> dict[str, float]:
        return {"aux_loss": self.coefficient}

    def bind(self, router: Router) -> None:
        if self.level == "global" and self.count is None:
            self.count = torch.zeros(router.num_experts, dtype=torch.int64, device=router.weight.device)

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        if self.level != "global" or not self.counts_this_forward:
            return
        load_E, tokens = routing.load(), routing.routed_T.sum()
        if self.count is None:  # in no layer
            self.count = torch.zeros_like(load_E)
        total = sum_over_ranks(torch.cat([load_E, tokens[None]]))
        self.count += total[:-1]
        f_E = self.count / self.count.sum().clamp_min(1)
        share = tokens * world_size() / total[-1:].clamp_min(1)
        self._past.note(routing.logits_TE, torch.cat([f_E, share]))

    def losses(self, routing: Routing, num_sequences: int | None = None) -> dict[str, Tensor]:
        if self.level != "sequence":
            num_sequences = 1
        elif num_sequences is None:
            raise ValueError("an aux loss of level='sequence' needs num_sequences, which MoELayer passes on")
        f_BE, P_BE, has_tokens_B = _shares_by_sequence(routing, num_sequences)
        if self.soft:
            f_BE = P_BE
        share: Tensor | float = 1.0
        noted = self._past.recall(routing.logits_TE) if self.level == "global" and self.training else None
        if noted is not None:
            f_BE, share = noted[None, :-1], noted[-1]
        balance_B = routing.num_experts * (f_BE * P_BE).sum(-1)  # 0 in a sequence without tokens
        balance = balance_B.sum() / has_tokens_B.sum().clamp_min(1) * share
        return {"aux_loss": self.coefficient * balance}

    def step(self) -> None:
        self._past.clear()
        if self.count is not None:
            self.count.zero_()


def _shares_by_sequence(routing: Routing, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """f and P of each sequence, float32 (B, E), and whether it has a token that counts, bool (B,)."""
    T, E, B = len(routing.logits_TE), routing.num_experts, num_sequences
    if T % max(B, 1):
        raise ValueError(f"num_sequences={B} does not divide the {T} tokens into sequences of one length")
    S = T // max(B, 1)
    sequence_T1 = torch.arange(B, device=routing.logits_TE.device).repeat_interleave(S)[:, None]
    ids_TK = torch.where(routing.expert_ids_TK == NO_CHOICE, NO_CHOICE, sequence_T1 * E + routing.expert_ids_TK)
    load_BE = count_load(ids_TK, B * E).view(B, E)
    f_BE = load_BE / load_BE.sum(-1, keepdim=True).clamp_min(1)

    routed_T = routing.routed_T
    probs_TE = torch.where(routed_T[:, None], full_probabilities(routing), 0)
    tokens_B1 = routed_T.view(B, S).sum(-1, keepdim=True)
    P_BE = probs_TE.view(B, S, E).sum(1) / tokens_B1.clamp_min(1)
    return f_BE, P_BE, tokens_B1[:, 0] > 0


class RouterZLoss(Balancer):
    """coefficient * mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5), before noise.

    level: "batch", the mean over this rank's tokens, or "global": weighted by the rank's share of all ranks' tokens,
    so that averaged gradients are those of one process where ranks have different numbers of tokens; in evaluation
    the same as "batch".

    Raises ValueError for a bad coefficient or an unknown level.
    """

    def __init__(self, coefficient: float = 1e-3, level: ZLevel = "batch") -> None:
        super().__init__()
        check_choice("z-loss level", level, get_args(ZLevel))
        self.coefficient = check_coefficient("z-loss coefficient", coefficient)
        self.level = level
        self.name = "z" if level == "batch" else "global-z"
        self._past = PastForwards()

    @property
    def coefficients(self) -> dict[str, float]:
        return {"z_loss": self.coefficient}

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        if self.level == "global" and self.counts_this_forward:
            self._past.note(routing.logits_TE, token_share(routing.routed_T.sum()))

    def losses(self, routing: Routing, num_sequences: int | None = None) -> dict[str, Tensor]:
        routed_T = routing.routed_T
        # masked before the logsumexp: a NaN row would send NaN back through the mask
        logits_TE = torch.where(routed_T[:, None], routing.logits_TE, 0)
        squared_T = torch.where(routed_T, logits_TE.logsumexp(-1) ** 2, 0)
        loss = self.coefficient * squared_T.sum() / routed_T.sum().clamp_min(1)
        share = self._past.recall(routing.logits_TE) if self.level == "global" and self.training else None
        return {"z_loss": loss if share is None else loss * share}

    def step(self) -> None:
        self._past.clear()
