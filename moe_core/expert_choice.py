"""Expert choice: experts choose their tokens, not tokens their experts.

Shapes: T tokens, E experts, K slots a token, C tokens an expert takes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .routers import Router, ScoreFunction
from .routing import NO_CHOICE, Routing, top_k_by_lowest_id


class ExpertChoiceRouter(Router):
    """A linear router whose experts each take their best ceil(T c / E) tokens (arXiv 2202.09368, section 3.2).

    The load is even by construction; a token may get any number of experts, none included, and passes through the
    residual where it gets none.

    It looks ahead: an expert ranks all tokens of the batch at once, so that a token's experts depend on later tokens
    of its sequence (and on other sequences). In a causal language model that leaks the future into training, and
    generation, token by token, cannot repeat the choice. Use it in encoders, or knowingly.

    top_k: c, the experts that a token gets on average. T counts real, valid tokens.
    max_experts_per_token: the K of the Routing. Where more experts take a token, its best scores stay. By default K
        is the largest number of experts that any token of this batch got (at least 1), so that it changes from batch
        to batch; a fixed one suits a recorder or a compiler.
    score_function, routed_scaling_factor, bias, init_std: as in TopKRouter. Weights are the scores themselves.

    `expert_ids_TK` holds each token's experts, best score first, -1 in unused slots. Tokens of equal score are
    taken in their order; a token's experts of equal score stand lowest id first. Rows with NaN, +inf or no finite
    logit at all are invalid: they and masked tokens are taken by no expert; an expert with logit -inf never takes
    the token. A selection bias cannot change what an expert's own ranking says: `expert_bias` is a ValueError, and
    layers refuse balancers that own one.

    Raises ValueError for numbers that do not fit together, naming them.
    """

    takes_expert_bias = False

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: ScoreFunction = "softmax",
        max_experts_per_token: int | None = None,
        routed_scaling_factor: float = 1.0,
        bias: bool = False,
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
        if max_experts_per_token is not None and not 1 <= max_experts_per_token <= num_experts:
            raise ValueError(
                f"max_experts_per_token={max_experts_per_token} is not between 1 and num_experts={num_experts}"
            )
        self.max_experts_per_token = max_experts_per_token

    def route_logits(
        self, logits_TE: Tensor, expert_bias: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Routing:
        """The decision part of `forward`, on logits (T, E) from anywhere."""
        self._check_inputs(logits_TE, expert_bias, token_mask)
        if expert_bias is not None:
            raise ValueError("expert_bias is given, but under expert choice it moves no expert's ranking of its tokens")
        logits_TE = logits_TE.float()
        token_mask = None if token_mask is None else token_mask.bool()

        impossible_TE = logits_TE == -math.inf
        invalid_T = (logits_TE.isnan() | (logits_TE == math.inf)).any(-1) | impossible_TE.all(-1)
        scores_TE = self._scores(torch.where(invalid_T[:, None], 0, logits_TE))
        unrouted_T = invalid_T if token_mask is None else invalid_T | ~token_mask
        ranked_TE = scores_TE.detach().masked_fill(impossible_TE | unrouted_T[:, None], -math.inf)

        num_taken = -(-int((~unrouted_T).sum()) * self.top_k // self.num_experts)  # ceil(T c / E) in whole numbers
        order_TE = torch.sort(ranked_TE, dim=0, descending=True, stable=True).indices
        taken_TE = torch.zeros_like(impossible_TE).scatter_(0, order_TE[:num_taken], True)
        ranked_TE = ranked_TE.masked_fill(~taken_TE, -math.inf)
        slots = self.max_experts_per_token
        if slots is None:
            experts_T = (ranked_TE != -math.inf).sum(-1)
            slots = max(1, int(experts_T.max())) if len(experts_T) else 1
        values_TK, ids_TK = top_k_by_lowest_id(ranked_TE, slots)
        unused_TK = values_TK == -math.inf
        weights_TK = scores_TE.gather(-1, ids_TK) * self.routed_scaling_factor
        return Routing(
            logits_TE=logits_TE,
            scores_TE=torch.where(invalid_T[:, None], 0, scores_TE),
            expert_ids_TK=ids_TK.masked_fill(unused_TK, NO_CHOICE),
            weights_TK=weights_TK.masked_fill(unused_TK, 0),
            token_mask_T=token_mask,
            invalid_T=invalid_T,
        )
