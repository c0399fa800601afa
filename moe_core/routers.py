"""Routers: from a token's vector to its experts and their weights.

Shapes: T tokens, D model width, E experts, K choices a token, R ranked choices (K + 1, for the threshold),
G groups of experts, M experts in a group.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor, nn

from .choices import ScoreFunction
from .routing import NO_CHOICE, Routing, top_k_by_lowest_id

NARROW = 8  # experts, up to which a softmax over columns is quicker than one over rows


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise a ValueError that names the value and the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, allowed))}")


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise a ValueError unless 1 <= top_k <= num_experts."""
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts}, but a router needs at least 1 expert")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} is not between 1 and num_experts={num_experts}")


class Router(nn.Module):
    """What all routers share: a linear map to float32 logits and a score function. `route_logits` decides.

    weight (E, D), drawn normal with standard deviation `init_std`; bias (E,), zero at first, where bias=True
    (GPT-OSS). It is learned, part of the logits, and no selection bias.
    takes_expert_bias: whether a selection bias can change the decision.
    """

    takes_expert_bias = True
    num_groups = 1

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: ScoreFunction = "softmax",
        routed_scaling_factor: float = 1.0,
        bias: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_top_k(top_k, num_experts)
        check_choice("score_function", score_function, get_args(ScoreFunction))
        if not math.isfinite(routed_scaling_factor):
            raise ValueError(f"routed_scaling_factor={routed_scaling_factor} is not a finite number")
        self.d_model, self.num_experts, self.top_k = d_model, num_experts, top_k
        self.score_function: ScoreFunction = score_function
        self.routed_scaling_factor, self.init_std = routed_scaling_factor, init_std
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, normal with standard deviation `init_std`; a bias starts at zero."""
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_TD: Tensor, expert_bias: Tensor | None = None, token_mask: Tensor | None = None) -> Routing:
        """Route x_TD (T, D), with a selection bias (E,) and a token mask (T,), True = a real token."""
        if x_TD.ndim != 2 or x_TD.shape[-1] != self.d_model:
            raise ValueError(f"x has shape {tuple(x_TD.shape)}, but the router wants (tokens, d_model={self.d_model})")
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            # one pass over x where isfinite takes five; NaN is handed on, and is not below infinity either
            finite_T1 = torch.linalg.vector_norm(x_TD.detach(), math.inf, dim=-1, keepdim=True) < math.inf
            # a NaN activation would reach every expert's row of the router's gradient as 0 * NaN
            clean_TD = torch.where(finite_T1, x_TD, 0).float()
            bias_E = None if self.bias is None else self.bias.float()
            logits_TE = nn.functional.linear(clean_TD, self.weight.float(), bias_E)
            logits_TE = logits_TE.masked_fill(~finite_T1, math.nan)
            return self.route_logits(logits_TE, expert_bias, token_mask)

    def route_logits(
        self, logits_TE: Tensor, expert_bias: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Routing:
        """The decision part of `forward`, on logits (T, E) from anywhere."""
        raise NotImplementedError

    def _check_inputs(self, logits_TE: Tensor, expert_bias: Tensor | None, token_mask: Tensor | None) -> None:
        T, E = logits_TE.shape
        if self.num_experts != E:
            raise ValueError(f"logits have {E} experts (shape {(T, E)}), the router has {self.num_experts}")
        if token_mask is not None and token_mask.shape != (T,):
            raise ValueError(f"token_mask has shape {tuple(token_mask.shape)}, but there are {T} tokens: ({T},)")
        if expert_bias is not None and expert_bias.shape != (E,):
            raise ValueError(f"expert_bias has shape {tuple(expert_bias.shape)}, but there are {E} experts: ({E},)")

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self.score_function == "sigmoid":
            return logits_TE.sigmoid()
        if self.num_experts <= NARROW:
            return logits_TE.t().softmax(0).t()  # across tokens: rows this short leave torch's vector loop empty
        return logits_TE.softmax(-1)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"score_function={self.score_function!r}"
        )


class TopKRouter(Router):
    """A linear router that sends each token to its `top_k` best experts.

    score_function: "softmax" over all experts, or "sigmoid" for each on its own (DeepSeek-V3, arXiv 2412.19437).
    softmax_after_top_k: with softmax, normalise over the chosen logits only; selection then adds the bias to the
        logits. The default takes the softmax first.
    renormalize: divide the chosen weights by their sum. Default: yes for top_k > 1, no for top_k = 1, where the
        weight would always be 1 and the router would get no gradient; asking for it there is a ValueError.
    routed_scaling_factor: multiplies the weights, once, here.
    noise_std: standard deviation of normal noise on the logits, in training only. Selection and weights see it;
        `Routing.logits_TE`, and with it aux loss and z-loss, do not.
    num_groups, top_groups: group-limited selection (DeepSeek-V2, arXiv 2405.04434; V3, 2412.19437). The experts
        stand in num_groups groups of consecutive ids; a token chooses among its best `top_groups` groups only. A
        group's score is its best expert's, or with a selection bias the sum of its two best. Off by default.
    bias: a learned bias in the logits (GPT-OSS).
    bias_in_weights: a variant of teaching code, for softmax_after_top_k alone: the softmax over the chosen also
        sees the selection bias. Not the default: the bias is the balancer's tool and gets no gradient, so that in
        the weights it would mix the experts' outputs by how busy they are, not by what the loss asks for, and
        change the model's function at each of its updates. With a bias of zero both are the same.
    init_std: standard deviation of the router's first weights. The smaller, the more even the first probabilities.

    Logits are computed in float32 from float32 copies of activations and weights, also under autocast. The
    selection bias moves the choice only: weights are gathered from the unbiased scores. Equal scores go to the
    lowest expert id, equal groups to the lowest group. Rows with NaN, +inf or fewer than `top_k` finite logits (in
    the chosen groups) get ids -1 and weights 0, as masked tokens do.

    Raises ValueError for numbers that do not fit together, naming them.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: ScoreFunction = "softmax",
        softmax_after_top_k: bool = False,
        renormalize: bool | None = None,
        routed_scaling_factor: float = 1.0,
        noise_std: float = 0.0,
        num_groups: int = 1,
        top_groups: int | None = None,
        bias: bool = False,
        bias_in_weights: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__(
            d_model,
            num_experts,
            top_k,
            score_function=score_function,
            routed_scaling_factor=routed_scaling_factor,
            bias=bias,
            init_std=init_std,
        )
        if softmax_after_top_k and score_function != "softmax":
            raise ValueError(f"softmax_after_top_k=True needs score_function='softmax', not {score_function!r}")
        if bias_in_weights and not softmax_after_top_k:
            raise ValueError(
                "bias_in_weights=True needs softmax_after_top_k=True: added to scores, a bias can make weights negative"
            )
        one_weight_always_1 = top_k == 1 and (bool(renormalize) or softmax_after_top_k)
        if one_weight_always_1:
            raise ValueError(
                "top_k=1 with renormalised weights makes every weight 1, so that the router gets no gradient; "
                "use renormalize=False and softmax_after_top_k=False"
            )
        if not (math.isfinite(noise_std) and noise_std >= 0):
            raise ValueError(f"noise_std={noise_std} is not a finite number of at least 0")
        top_groups = num_groups if top_groups is None else top_groups
        _check_groups(num_groups, top_groups, num_experts, top_k)
        self.num_groups, self.top_groups = num_groups, top_groups
        self.softmax_after_top_k, self.bias_in_weights = softmax_after_top_k, bias_in_weights
        self.renormalize = (top_k > 1) if renormalize is None else renormalize
        self.noise_std = noise_std

    def route_logits(
        self, logits_TE: Tensor, expert_bias: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Routing:
        """The decision part of `forward`, on logits (T, E) from anywhere."""
        self._check_inputs(logits_TE, expert_bias, token_mask)
        logits_TE = logits_TE.float()
        token_mask = None if token_mask is None else token_mask.bool()

        impossible_TE = logits_TE == -math.inf  # an expert that this token must not take
        # A row with NaN, +inf or nothing but -inf. Few passes over (T, E): a small layer spends more on launching
        # them than on the arithmetic; amax hands NaN on.
        invalid_T = ~(logits_TE.detach().amax(-1).abs() < math.inf)
        clean_TE = logits_TE.masked_fill(invalid_T[:, None], 0)
        clean_scores_TE = self._scores(clean_TE)
        noisy = self.noise_std > 0 and self.training
        gate_logits_TE = clean_TE + self.noise_std * torch.randn_like(clean_TE) if noisy else clean_TE
        scores_TE = self._scores(gate_logits_TE) if noisy else clean_scores_TE

        selection_TE = (gate_logits_TE if self.softmax_after_top_k else scores_TE).detach()
        selection_TE = selection_TE.masked_fill(impossible_TE, -math.inf)
        corrected_TE = selection_TE
        if expert_bias is not None:
            expert_bias = expert_bias.detach().float().clone()
            corrected_TE = selection_TE + expert_bias  # the bias affects selection only, never the weights
        if self.top_groups < self.num_groups:
            biased = expert_bias is not None
            corrected_TE = self._in_best_groups(corrected_TE, biased)
            # what the same rule would have ranked with a bias of zero
            selection_TE = self._in_best_groups(selection_TE, biased) if biased else corrected_TE
        num_ranked = min(self.top_k + 1, self.num_experts)
        ranked_TR, ranked_ids_TR = top_k_by_lowest_id(corrected_TE, num_ranked)
        expert_ids_TK = ranked_ids_TR[:, : self.top_k]
        stuck_T = ranked_TR[:, self.top_k - 1] == -math.inf  # fewer than top_k to choose from, in the chosen groups
        invalid_T = invalid_T | stuck_T
        # under group limits the next best is the next best of the chosen groups only: no threshold of the layer
        has_threshold = num_ranked > self.top_k and self.top_groups == self.num_groups
        threshold_T = ranked_TR[:, self.top_k] if has_threshold else None

        if self.softmax_after_top_k:
            chosen_TK = gate_logits_TE.gather(-1, expert_ids_TK).masked_fill(stuck_T[:, None], 0)
            if self.bias_in_weights and expert_bias is not None:
                chosen_TK = chosen_TK + expert_bias[expert_ids_TK]
            weights_TK = chosen_TK.softmax(-1)
        else:
            weights_TK = scores_TE.gather(-1, expert_ids_TK)
            if self.renormalize:
                # the smallest normal number keeps 0 / 0 apart from a real share
                weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        if self.routed_scaling_factor != 1:
            weights_TK = weights_TK * self.routed_scaling_factor

        unrouted_T1 = invalid_T[:, None] if token_mask is None else (invalid_T | ~token_mask)[:, None]
        return Routing(
            logits_TE=logits_TE,
            scores_TE=clean_scores_TE.masked_fill(invalid_T[:, None], 0),
            expert_ids_TK=expert_ids_TK.masked_fill(unrouted_T1, NO_CHOICE),
            weights_TK=weights_TK.masked_fill(unrouted_T1, 0),
            token_mask_T=token_mask,
            invalid_T=invalid_T,
            threshold_T=threshold_T,
            expert_bias_E=expert_bias,
            selection_TE=selection_TE,
        )

    def _in_best_groups(self, ranked_TE: Tensor, biased: bool) -> Tensor:
        """`ranked_TE` with -inf outside each token's best groups; 0 there could win over a negative score."""
        ranked_TGM = ranked_TE.unflatten(-1, (self.num_groups, self.num_experts // self.num_groups))
        counted = min(2 if biased else 1, ranked_TGM.shape[-1])
        group_scores_TG = ranked_TGM.topk(counted, dim=-1).values.sum(-1)
        _, best_groups = top_k_by_lowest_id(group_scores_TG, self.top_groups)
        lost_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(-1, best_groups, False)
        return ranked_TGM.masked_fill(lost_TG.unsqueeze(-1), -math.inf).view_as(ranked_TE)


def _check_groups(num_groups: int, top_groups: int, num_experts: int, top_k: int) -> None:
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide num_experts={num_experts}")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups={top_groups} is not between 1 and num_groups={num_groups}")
    eligible = top_groups * (num_experts // num_groups)
    if eligible < top_k:
        raise ValueError(
            f"top_groups={top_groups} of num_groups={num_groups} leave {eligible} of num_experts={num_experts} "
            f"to choose from, fewer than top_k={top_k}"
        )
