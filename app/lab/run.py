"""Routes and balances the lab's batch with moe_core itself, one switch at a time, so that every stage can be seen.

The one module of the app that loads torch, and only when one of its functions is called.

Shapes: T tokens, E experts, K choices a token.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from app.lab.batch import BalancerState, FloatArray
from app.lab.lab import Lab
from app.lab.settings import Settings

if TYPE_CHECKING:
    from moe_core.balancers import Balancer
    from moe_core.routers import Router
    from moe_core.routing import Routing

_RANDOM = threading.Lock()  # torch has one random generator, which the sessions of this server share


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What moe_core made of the batch. Names as in `moe_core.routing.Routing`; -1, 0 and NaN mean the same there.

    selection_TE: what selection ranks before the bias is added, groups not yet looked at; NaN in rows that no expert
    takes. noisy_TE: logits with noise, None without. unscaled_TK: weights before the scaling factor, raw_TK: before
    they were divided by their sum. bias_E: the one used, None = none. capacity: assignments an expert takes, None =
    no limit. probabilities_TE: each token's distribution over all experts, before noise and bias.
    aux_loss, z_loss: with a coefficient of 1, at the level that the balancer says (the batch where it has none).
    loss: what the balancer adds to the training loss, None where it adds nothing; gradient_TE: its gradient.
    observed, updated: the balancer's state after this batch, and after the optimizer step that follows.
    next_load_E: the load of the same batch after the update.
    """

    logits_TE: FloatArray
    noisy_TE: FloatArray | None
    scores_TE: FloatArray
    selection_TE: FloatArray
    probabilities_TE: FloatArray
    expert_ids_TK: NDArray[np.int64]
    raw_TK: FloatArray
    unscaled_TK: FloatArray
    weights_TK: FloatArray
    threshold_T: FloatArray | None
    invalid_T: NDArray[np.bool_]
    routed_T: NDArray[np.bool_]
    kept_TK: NDArray[np.bool_] | None
    capacity: int | None
    bias_E: FloatArray | None
    load_E: NDArray[np.int64]
    dropped_E: NDArray[np.int64] | None
    rerouted: int | None
    aux_loss: float
    z_loss: float
    loss: float | None
    gradient_TE: FloatArray | None
    observed: BalancerState
    updated: BalancerState
    next_load_E: NDArray[np.int64]

    @property
    def num_routed(self) -> int:
        """Tokens that count: neither padding nor invalid."""
        return int(self.routed_T.sum())


def run(lab: Lab) -> Outcome:
    """Route the batch, drop what is over capacity, and let the balancer see it and step.

    Raises ValueError for a router and a balancer that do not go together, in moe_core's words.
    """
    from moe_core.aux_losses import RouterZLoss
    from moe_core.capacity import dropped_load
    from moe_core.routing import full_probabilities, rerouted_assignments

    settings = lab.settings
    balancer = _balancer(lab)
    routing, losses, gradient_TE = _forward(lab, balancer)
    observed = _state_of(balancer, lab.state)
    balancer.step()
    updated = _state_of(balancer, lab.state)
    capacity, kept = _capped(settings, routing)
    dropped_E = dropped_load(kept)
    plain = replace(settings, num_groups=1, top_groups=1)
    selection_TE = _numpy(_route(lab, plain).unbiased_selection_TE)
    routed_T = routing.routed_T.numpy()
    return Outcome(
        logits_TE=lab.batch.logits_TE,
        noisy_TE=_noisy_logits(lab),
        scores_TE=_numpy(routing.scores_TE),
        selection_TE=np.where(routed_T[:, None], selection_TE, np.nan).astype(np.float32),
        probabilities_TE=_numpy(full_probabilities(routing)),
        expert_ids_TK=routing.expert_ids_TK.numpy(),
        raw_TK=_numpy(_route(lab, replace(settings, renormalize="no", scaling=1.0)).weights_TK),
        unscaled_TK=_numpy(_route(lab, replace(settings, scaling=1.0)).weights_TK),
        weights_TK=_numpy(routing.weights_TK),
        threshold_T=None if routing.threshold_T is None else _numpy(routing.threshold_T),
        invalid_T=np.zeros(len(routed_T), dtype=bool) if routing.invalid_T is None else routing.invalid_T.numpy(),
        routed_T=routed_T,
        kept_TK=None if kept.kept_TK is None else kept.kept_TK.numpy(),
        capacity=capacity,
        bias_E=None if routing.expert_bias_E is None else _numpy(routing.expert_bias_E),
        load_E=routing.load().numpy(),
        dropped_E=None if dropped_E is None else dropped_E.numpy(),
        rerouted=rerouted_assignments(routing),
        aux_loss=_unit_aux_loss(lab, routing),
        z_loss=RouterZLoss(1.0).losses(routing)["z_loss"].item(),
        loss=losses,
        gradient_TE=gradient_TE,
        observed=observed,
        updated=updated,
        next_load_E=_route(_moved(lab, updated, gradient_TE), settings).load().numpy(),
    )


def advance(lab: Lab, times: int = 1) -> Lab:
    """The lab after so many updates on the same batch: the bias is the new one, or the logits went downhill."""
    for _ in range(times):
        balancer = _balancer(lab)
        _, _, gradient_TE = _forward(lab, balancer)
        balancer.step()
        lab = replace(_moved(lab, _state_of(balancer, lab.state), gradient_TE), applied=lab.applied + 1)
    return lab


def take_in(lab: Lab) -> Lab:
    """The lab after this batch as a micro-batch, without an optimizer step."""
    balancer = _balancer(lab)
    _forward(lab, balancer)
    return replace(lab, state=_state_of(balancer, lab.state))


def _forward(lab: Lab, balancer: Balancer) -> tuple[Routing, float | None, FloatArray | None]:
    """The routing of a training forward, and the balancer's loss with its gradient where it has one."""
    import torch

    logits_TE = torch.tensor(lab.batch.logits_TE, requires_grad=lab.settings.is_loss)
    routing = _route(lab, lab.settings, logits_TE, _bias(lab, balancer.selection_bias(logits_TE)))
    balancer.observe(routing)
    losses = list(balancer.losses(routing, num_sequences=lab.settings.sequences).values())
    if not losses:
        return routing, None, None
    loss: Any = sum(losses)
    if loss.requires_grad:
        loss.backward()
    gradient_TE = torch.zeros_like(logits_TE) if logits_TE.grad is None else logits_TE.grad
    return routing, loss.item(), gradient_TE.numpy()


def _route(lab: Lab, settings: Settings, logits_TE: Any = None, bias_E: Any = None) -> Routing:
    """The batch under these settings; by default with the lab's own logits and a bias set by hand."""
    import torch

    if logits_TE is None:
        logits_TE = torch.tensor(lab.batch.logits_TE)
        bias_E = _bias(lab, None)
    with _RANDOM, torch.random.fork_rng(devices=[]):
        router = _router(lab, settings)
        torch.manual_seed(settings.noise_seed)
        return router.route_logits(logits_TE, bias_E, torch.tensor(lab.batch.mask_T))


def _router(lab: Lab, settings: Settings) -> Router:
    """The router of the settings; its weights are drawn, and never used: the logits are given."""
    from moe_core.expert_choice import ExpertChoiceRouter
    from moe_core.routers import TopKRouter

    d_model, E, k = 1, lab.batch.num_experts, settings.top_k
    if settings.router == "expert-choice":
        return ExpertChoiceRouter(d_model, E, k, routed_scaling_factor=settings.scaling)
    return TopKRouter(
        d_model,
        E,
        k,
        score_function="sigmoid" if settings.router == "sigmoid" else "softmax",
        softmax_after_top_k=settings.router == "softmax-after",
        renormalize=settings.renormalizes,
        routed_scaling_factor=settings.scaling,
        noise_std=settings.noise_std,
        num_groups=settings.num_groups,
        top_groups=settings.top_groups,
    )


def _bias(lab: Lab, own: Any) -> Any:
    """The selection bias: the balancer's, else one set by hand; None where neither is there."""
    import torch

    if lab.settings.router == "expert-choice" or own is not None:
        return own
    return torch.tensor(lab.state.bias_E) if lab.settings.moves_bias or lab.state.bias_E.any() else None


def _noisy_logits(lab: Lab) -> FloatArray | None:
    """Logits with this batch's noise: what selection ranks where the softmax comes last."""
    settings = lab.settings
    if settings.noise_std == 0 or settings.router == "expert-choice":
        return None
    # two experts at least, as one chosen alone would leave this router without gradient
    after = replace(settings, router="softmax-after", top_k=2, num_groups=1, top_groups=1)
    return _numpy(_route(lab, after).unbiased_selection_TE)


def _balancer(lab: Lab) -> Balancer:
    """The balancer of the settings with the lab's state; a ValueError where the router is not for it."""
    import torch

    from moe_core.balancers import NoBalancer, QuantileBalancer, RouterZLoss, SignBiasBalancer, SwitchAuxLoss

    settings, E = lab.settings, lab.batch.num_experts
    balancer: Balancer = NoBalancer()
    if settings.balancer == "sign-bias":
        balancer = SignBiasBalancer(E, settings.bias_rate)
    elif settings.balancer == "quantile":
        options: dict[str, Any] = {"update": settings.update, "method": settings.method, "num_bins": settings.num_bins}
        balancer = QuantileBalancer(E, settings.top_k, **options)
    elif settings.balancer == "z":
        balancer = RouterZLoss(settings.z_coef)
    elif settings.balancer != "none":
        level: Any = next((level for level in ("sequence", "global") if level in settings.balancer), "batch")
        balancer = SwitchAuxLoss(settings.aux_coef, level, soft=settings.balancer.startswith("soft"))
    with _RANDOM:
        balancer.bind(_router(lab, settings))
    for name, buffer in balancer.named_buffers():
        buffer.copy_(torch.as_tensor(getattr(lab.state, _FIELDS[name])))
    return balancer.train()


_FIELDS = {"expert_bias": "bias_E", "count": "count_E", "bias_sum": "bias_sum_E", "num_updates": "num_updates"}
"""The balancers' buffers, and what the lab calls them."""


def _state_of(balancer: Balancer, before: BalancerState) -> BalancerState:
    # a copy: the buffers move on in place
    found: dict[str, Any] = {_FIELDS[name]: buffer.numpy().copy() for name, buffer in balancer.named_buffers()}
    if "num_updates" in found:
        found["num_updates"] = int(found["num_updates"])
    return replace(before, **found)


def _moved(lab: Lab, state: BalancerState, gradient_TE: FloatArray | None) -> Lab:
    """The lab with the state after an update, and logits moved down the gradient where there is one."""
    batch = lab.batch
    if gradient_TE is not None:
        step_TE = np.float32(lab.settings.push) * gradient_TE
        with np.errstate(invalid="ignore"):  # rows that are NaN or infinite stay so
            batch = replace(batch, logits_TE=(batch.logits_TE - step_TE).astype(np.float32))
    return replace(lab, batch=batch, state=state)


def _capped(settings: Settings, routing: Routing) -> tuple[int | None, Routing]:
    from moe_core.capacity import drop_over_capacity, expert_capacity

    if settings.capacity_factor == 0:
        return None, routing
    tokens = int(routing.routed_T.sum())
    capacity = expert_capacity(
        tokens, routing.num_experts, settings.top_k, settings.capacity_factor, settings.min_capacity
    )
    policy: Any = settings.drop_policy
    return capacity, drop_over_capacity(routing, capacity, policy)


def _unit_aux_loss(lab: Lab, routing: Routing) -> float:
    """The aux loss with a coefficient of 1, at the balancer's level; over the batch where it is no aux loss."""
    kind = lab.settings.balancer if "aux" in lab.settings.balancer else "aux"
    balancer = _balancer(replace(lab, settings=replace(lab.settings, balancer=kind, aux_coef=1.0)))
    balancer.observe(routing)
    return balancer.losses(routing, num_sequences=lab.settings.sequences)["aux_loss"].item()


def _numpy(tensor: Any) -> FloatArray:
    return tensor.detach().numpy()
