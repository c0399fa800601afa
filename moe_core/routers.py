"""Routers: from a token's vector to its experts and their weights.

Shapes: T tokens, D model width, E experts, K choices a token.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from .routing import NO_CHOICE, Routing, top_k_by_lowest_id

ScoreFunction = Literal["softmax", "sigmoid"]


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


class TopKRouter(nn.Module):
    """A linear router that sends each token to its `top_k` best experts.

    score_function: "softmax" over all experts, or "sigmoid" for each on its own (DeepSeek-V3, arXiv 2412.19437).
    softmax_after_top_k: with softmax, normalise over the chosen logits only; selection then adds the bias to the
        logits. The default takes the softmax first.
    renormalize: divide the chosen weights by their sum. Default: yes for top_k > 1, no for top_k = 1, where the
        weight would always be 1 and the router would get no gradient; asking for it there is a ValueError.
    routed_scaling_factor: multiplies the weights, once, here.
    noise_std: standard deviation of normal noise on the logits, in training only. Selection and weights see it;
        `Routing.logits_TE`, and with it aux loss and z-loss, do not.
    init_std: standard deviation of the router's first weights. The smaller, the more even the first probabilities.

    Logits are computed in float32 from float32 copies of activations and weights, also under autocast. The
    selection bias moves the choice only: weights are gathered from the unbiased scores. Equal scores go to the
    lowest expert id. Rows with NaN, +inf or fewer than `top_k` finite logits get ids -1 and weights 0.

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
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        check_top_k(top_k, num_experts)
        check_choice("score_function", score_function, get_args(ScoreFunction))
        if softmax_after_top_k and score_function != "softmax":
            raise ValueError(f"softmax_after_top_k=True needs score_function='softmax', not {score_function!r}")
        one_weight_always_1 = top_k == 1 and (bool(renormalize) or softmax_after_top_k)
        if one_weight_always_1:
            raise ValueError(
                "top_k=1 with renormalised weights makes every weight 1, so that the router gets no gradient; "
                "use renormalize=False and softmax_after_top_k=False"
            )
        if not (math.isfinite(noise_std) and noise_std >= 0):
            raise ValueError(f"noise_std={noise_std} is not a finite number of at least 0")
        self.d_model, self.num_experts, self.top_k = d_model, num_experts, top_k
        self.score_function: ScoreFunction = score_function
        self.softmax_after_top_k = softmax_after_top_k
        self.renormalize = (top_k > 1) if renormalize is None else renormalize
        self.routed_scaling_factor = routed_scaling_factor
        self.noise_std, self.init_std = noise_std, init_std
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, normal with standard deviation `init_std`."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, x_TD: Tensor, expert_bias: Tensor | None = None, token_mask: Tensor | None = None) -> Routing:
        """Route x_TD (T, D), with a selection bias (E,) and a token mask (T,), True = a real token."""
        if x_TD.ndim != 2 or x_TD.shape[-1] != self.d_model:
            raise ValueError(f"x has shape {tuple(x_TD.shape)}, but the router wants (tokens, d_model={self.d_model})")
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            finite_T1 = x_TD.isfinite().all(dim=-1, keepdim=True)
            # a NaN activation would reach every expert's row of the router's gradient as 0 * NaN
            clean_TD = torch.where(finite_T1, x_TD, 0).float()
            logits_TE = nn.functional.linear(clean_TD, self.weight.float())
            logits_TE = logits_TE.masked_fill(~finite_T1, math.nan)
            return self.route_logits(logits_TE, expert_bias, token_mask)

    def route_logits(
        self, logits_TE: Tensor, expert_bias: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Routing:
        """The decision part of `forward`, on logits (T, E) from anywhere."""
        T, E = logits_TE.shape
        if self.num_experts != E:
            raise ValueError(f"logits have {E} experts (shape {(T, E)}), the router has {self.num_experts}")
        if token_mask is not None:
            if token_mask.shape != (T,):
                raise ValueError(f"token_mask has shape {tuple(token_mask.shape)}, but there are {T} tokens: ({T},)")
            token_mask = token_mask.bool()
        if expert_bias is not None and expert_bias.shape != (E,):
            raise ValueError(f"expert_bias has shape {tuple(expert_bias.shape)}, but there are {E} experts: ({E},)")
        logits_TE = logits_TE.float()

        impossible_TE = logits_TE == -math.inf  # an expert that this token must not take
        bad_TE = logits_TE.isnan() | (logits_TE == math.inf)
        invalid_T = bad_TE.any(-1) | ((~impossible_TE).sum(-1) < self.top_k)
        clean_TE = torch.where(invalid_T[:, None], 0, logits_TE)
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
        num_ranked = min(self.top_k + 1, E)
        ranked_TR, ranked_ids_TR = top_k_by_lowest_id(corrected_TE, num_ranked)
        expert_ids_TK = ranked_ids_TR[:, : self.top_k]
        threshold_T = ranked_TR[:, self.top_k] if num_ranked > self.top_k else None

        if self.softmax_after_top_k:
            weights_TK = gate_logits_TE.gather(-1, expert_ids_TK).softmax(-1)
        else:
            weights_TK = scores_TE.gather(-1, expert_ids_TK)
            if self.renormalize:
                # the smallest normal number keeps 0 / 0 apart from a real share
                weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        weights_TK = weights_TK * self.routed_scaling_factor

        unrouted_T1 = invalid_T[:, None] if token_mask is None else (invalid_T | ~token_mask)[:, None]
        return Routing(
            logits_TE=logits_TE,
            scores_TE=torch.where(invalid_T[:, None], 0, clean_scores_TE),
            expert_ids_TK=expert_ids_TK.masked_fill(unrouted_T1, NO_CHOICE),
            weights_TK=torch.where(unrouted_T1, 0, weights_TK),
            token_mask_T=token_mask,
            invalid_T=invalid_T,
            threshold_T=threshold_T,
            expert_bias_E=expert_bias,
            selection_TE=selection_TE,
        )

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(-1) if self.score_function == "softmax" else logits_TE.sigmoid()

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"score_function={self.score_function!r}"
        )
