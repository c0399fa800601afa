"""What an adapter is: how to read one family of routers.

Shapes: B batch, S sequence, T = B*S tokens, E experts, K choices a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moe_core.routing import NO_CHOICE, Routing

ScoreFunction = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one router did in one forward, cut off from autograd, over the tokens it saw, flattened.

    routing: ids and weights are those that the model used. losses: those of this router, coefficient included, by
    the names "aux_loss" and "z_loss"; a family that computes none has none. batch_shape: (B, S) where the module
    saw it, None where its input came flattened.
    """

    routing: Routing
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    batch_shape: tuple[int, int] | None = None


class RouterAdapter:
    """How to read one family of routers; subclass it and `register_adapter` an instance.

    classes: names of the module classes it reads, matched against a module's class and the classes that one derives
    from (by name, so that nothing need be imported). reads_block: True where these modules are whole MoE blocks,
    False where they are the routers inside them.
    """

    classes: tuple[str, ...] = ()
    reads_block: bool = False

    def bind(self, module: nn.Module, block: nn.Module | None) -> RouterAdapter:
        """The adapter of this one router; `block` is the module that holds it. By default the same for all."""
        return self

    def describe(self, module: nn.Module, model: nn.Module) -> dict[str, Any]:
        """What the manifest says of this router; an entry that is left out or None is not known.

        Keys: num_experts, top_k (None where it varies from forward to forward), num_shared_experts, latent_size,
        score_function, balancer, expert_d_ff, activation.
        """
        raise NotImplementedError(f"{type(self).__name__} has no describe()")

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Observation:
        """What a forward hook of the module was given, as an Observation. Called during training: no
        synchronisation with the device, no gradient. Raises ValueError for an output it does not understand.
        """
        raise NotImplementedError(f"{type(self).__name__} has no read()")

    def coefficients(self, module: nn.Module) -> Mapping[str, float]:
        """The factor in each of the observation's losses, by name; {} where there are none."""
        return {}


def batch_shape_of(x: Tensor) -> tuple[int, int]:
    """(B, S) of activations (..., S, width): leading dimensions count as batch, a lone vector as one token."""
    *leading, _width = x.shape
    *batch, length = leading or [1]
    rows = 1
    for size in batch:
        rows *= size
    return rows, length


def observed_routing(
    module: nn.Module,
    *,
    logits_TE: Tensor,
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    score_function: ScoreFunction = "softmax",
    expert_bias_E: Tensor | None = None,
    kept_TK: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    unsorted: bool = False,
) -> Routing:
    """The Routing of a router that is not ours, from the tensors that it returned.

    Any float and integer types; nothing of autograd is kept. Logits whose rows are all >= 0 and sum to 1 are
    probabilities under a wrong name and turned back. Rows with NaN or too few finite logits count as invalid, as
    ours do. The bias is copied: it changes in place later. num_groups, top_groups: where the bias acts on a choice
    of groups too. unsorted: ids come in no order and are put in that of their selection scores. No synchronisation
    with the device. Raises ValueError, naming the module's class, for shapes that do not fit together.
    """
    given = {"logits_TE": logits_TE, "weights_TK": weights_TK, "expert_ids_TK": expert_ids_TK}
    wrong = next((name for name, value in given.items() if not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise ValueError(
            f"{type(module).__name__}: {wrong} is {given[wrong]!r}, but a tensor is wanted; what a router does not "
            "return, its adapter computes again from the router's input (args) and weights"
        )
    T, K = expert_ids_TK.shape if expert_ids_TK.dim() == 2 else (-1, -1)
    whole = not (expert_ids_TK.is_floating_point() or expert_ids_TK.dtype == torch.bool)
    if logits_TE.dim() != 2 or len(logits_TE) != T or weights_TK.shape != expert_ids_TK.shape or not whole:
        raise ValueError(
            f"{type(module).__name__} gives logits {tuple(logits_TE.shape)}, weights {tuple(weights_TK.shape)} and "
            f"{expert_ids_TK.dtype} ids {tuple(expert_ids_TK.shape)}, which is not the routing of the same tokens"
        )
    tolerance = 1e-4 if logits_TE.dtype == torch.float32 else 1e-2
    logits_TE, ids_TK = logits_TE.detach().float(), expert_ids_TK.detach().long()
    logits_TE = _true_logits(logits_TE, score_function, tolerance)
    scores_TE = logits_TE.softmax(-1) if score_function == "softmax" else logits_TE.sigmoid()
    bias_E = None if expert_bias_E is None else expert_bias_E.detach().float().clone()
    invalid_T = logits_TE.isnan().any(-1) | (logits_TE == torch.inf).any(-1) | (logits_TE.isfinite().sum(-1) < K)
    ids_TK = ids_TK.masked_fill(invalid_T[:, None], NO_CHOICE)
    weights_TK = weights_TK.detach().float().masked_fill(invalid_T[:, None], 0)
    kept_TK = None if kept_TK is None else kept_TK.detach()
    if unsorted:
        corrected_TE = scores_TE if bias_E is None else scores_TE + bias_E
        chosen_TK = corrected_TE.gather(1, ids_TK.clamp_min(0))
        order_TK = torch.argsort(chosen_TK, dim=-1, descending=True, stable=True)
        ids_TK, weights_TK = ids_TK.gather(1, order_TK), weights_TK.gather(1, order_TK)
        kept_TK = None if kept_TK is None else kept_TK.gather(1, order_TK)
    in_groups = bias_E is not None and top_groups < num_groups
    return Routing(
        logits_TE=logits_TE,
        scores_TE=scores_TE.masked_fill(invalid_T[:, None], 0),
        expert_ids_TK=ids_TK,
        weights_TK=weights_TK,
        kept_TK=kept_TK,
        invalid_T=invalid_T,
        expert_bias_E=bias_E,
        selection_TE=_in_best_groups(scores_TE, num_groups, top_groups) if in_groups else None,
    )


def _true_logits(given_TE: Tensor, score_function: ScoreFunction, tolerance: float) -> Tensor:
    """The values as given or, where they are probabilities, what the score function makes those of."""
    are_probabilities = (given_TE >= 0).all() & ((given_TE.sum(-1) - 1).abs() < tolerance).all()
    probs_TE = given_TE.clamp(torch.finfo(torch.float32).tiny, 1 - torch.finfo(torch.float32).eps)
    turned_TE = probs_TE.log() if score_function == "softmax" else probs_TE.logit()
    return torch.where(are_probabilities, turned_TE, given_TE)


def _in_best_groups(scores_TE: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """The scores, -inf outside each token's best groups; a group's score is the sum of its two best (DeepSeek-V3)."""
    scores_TGM = scores_TE.unflatten(-1, (num_groups, -1))
    group_scores_TG = scores_TGM.topk(min(2, scores_TGM.shape[-1]), dim=-1).values.sum(-1)
    lost_TG = torch.ones_like(group_scores_TG, dtype=torch.bool)
    lost_TG = lost_TG.scatter(-1, group_scores_TG.topk(top_groups, dim=-1).indices, False)
    return scores_TGM.masked_fill(lost_TG[..., None], -torch.inf).flatten(-2)
