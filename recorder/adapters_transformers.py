"""How to read the routers of Hugging Face transformers (5.x), by the names of their classes: nothing is imported.

Ids and weights are the model's own tensors; where a router returns none, they are computed again by the very function
that the model's block calls. A family is added here once its forward has been read and a test has seen it train.

Shapes: B batch, S sequence, T = B*S tokens, E experts, K choices a token, N = T*K assignments, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .adapter_base import Observation, RouterAdapter, ScoreFunction, observed_routing

BIAS = "e_score_correction_bias"
_GATED = {"silu": "swiglu", "swish": "swiglu"}  # what a GLU of that activation is called


@dataclass(frozen=True, kw_only=True)
class TransformersRouter(RouterAdapter):
    """Routers that return (logits_TE, weights_TK, expert_ids_TK), as most do since transformers 5.

    score_function: from logits to scores. bias_of: where the selection bias is, None without one. group_limited:
    whether the bias acts on the choice of groups too (num_group, topk_group; a group's score is the sum of its two
    best). unsorted: whether its top-k leaves the order open. activation: of its experts, where the config tells only
    part of it. block: the module that holds router and experts.
    """

    classes: tuple[str, ...] = ()
    score_function: ScoreFunction = "softmax"
    bias_of: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Tensor | None] | None = None
    group_limited: bool = False
    unsorted: bool = False
    activation: str | None = None
    block: nn.Module | None = None

    def bind(self, module: nn.Module, block: nn.Module | None) -> RouterAdapter:
        return replace(self, block=block)

    def describe(self, module: nn.Module, model: nn.Module) -> dict[str, Any]:
        own = [module, self.block, getattr(self.block, "experts", None)]
        configs = [getattr(holder, "config", None) for holder in (module, self.block)]
        config = getattr(model, "config", None)
        configs += [config, getattr(config, "text_config", None), getattr(config, "ffn_config", None)]
        widths = ("intermediate_dim", "expert_dim", "ffn_hidden_size", "intermediate_size")
        act = _number_or_text(configs, "hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
        gated = hasattr(own[2], "gate_up_proj")
        return {
            "num_experts": _whole(own, "n_routed_experts", "num_experts"),
            "top_k": _whole([*own, *configs], "top_k", "num_experts_per_tok", "moe_topk", "top_k_experts"),
            "num_shared_experts": self._shared(configs),
            "score_function": self.score_function,
            "balancer": self._balancer(module, configs),
            "expert_d_ff": _whole([own[2]], *widths) or _whole(configs, "moe_intermediate_size", *widths, "d_ff"),
            "activation": self.activation or (_GATED.get(act, f"{act}-glu") if gated and act else act),
        }

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Observation:
        logits_TE, weights_TK, ids_TK = self._decided(module, args, kwargs, _tensors(module, output))
        bias_E = None if self.bias_of is None else self.bias_of(module, args, kwargs)
        return Observation(
            routing=observed_routing(
                module,
                logits_TE=logits_TE,
                weights_TK=weights_TK,
                expert_ids_TK=ids_TK,
                score_function=self.score_function,
                expert_bias_E=bias_E,
                num_groups=getattr(module, "num_group", None) or 1 if self.group_limited else 1,
                top_groups=getattr(module, "topk_group", None) or 1 if self.group_limited else 1,
                unsorted=self.unsorted,
                kept_TK=self._kept(module, output),
            ),
            batch_shape=_batch_shape(args, kwargs),
        )

    def _decided(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, weights and ids from what the router returned, its tensors detached."""
        if len(output) != 3 or not all(isinstance(part, Tensor) for part in output):
            raise _unknown_output(module, output, "(logits, weights, expert ids)")
        return output

    def _kept(self, module: nn.Module, output: Any) -> Tensor | None:
        return None

    def _shared(self, configs: list[Any]) -> int | None:
        if self.block is None:
            return None
        if not any("shared" in name and "gate" not in name for name, _ in self.block.named_children()):
            return 0
        return _whole(configs, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 1

    def _balancer(self, module: nn.Module, configs: list[Any]) -> str | None:
        """What acts on the balance: a selection bias, an auxiliary loss where the config has it computed."""
        computed = any(getattr(config, "output_router_logits", False) for config in configs)
        coefficient = next((c for config in configs if (c := getattr(config, "router_aux_loss_coef", None))), None)
        parts = ["expert bias"] * (self.bias_of is not None) + ["aux"] * bool(computed and coefficient)
        return "+".join(parts) or None


@dataclass(frozen=True, kw_only=True)
class Llama4Adapter(TransformersRouter):
    """(scores_TE, logits_TE): sigmoid scores, 0 but for the chosen; ids come from the same top-k of the logits."""

    def _decided(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(output) != 2 or output[0].shape != output[1].shape:
            raise _unknown_output(module, output, "(scores, logits)")
        scores_TE, logits_TE = output
        ids_TK = torch.topk(logits_TE, _top_k(module), dim=1).indices
        return logits_TE, scores_TE.gather(1, ids_TK), ids_TK


@dataclass(frozen=True, kw_only=True)
class DbrxAdapter(TransformersRouter):
    """Bare logits_TE; the block chooses in a method of its own, which is asked again."""

    def bind(self, module: nn.Module, block: nn.Module | None) -> RouterAdapter:
        if not hasattr(block, "route_tokens_to_experts"):
            raise ValueError(
                f"a {type(module).__name__} inside a {type(block).__name__} without route_tokens_to_experts: "
                "how its tokens are routed is not known"
            )
        return super().bind(module, block)

    def _decided(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(output) != 1 or output[0].dim() != 2:
            raise _unknown_output(module, output, "the logits of each token")
        with torch.no_grad():
            weights_TK, ids_TK = self.block.route_tokens_to_experts(output[0])  # type: ignore[union-attr, operator]
        return output[0], weights_TK, ids_TK


@dataclass(frozen=True, kw_only=True)
class JetMoeAdapter(TransformersRouter):
    """(place of each sorted assignment N, its token N, its weight N, list of E loads, logits_TE)."""

    def describe(self, module: nn.Module, model: nn.Module) -> dict[str, Any]:
        described = super().describe(module, model) | {"expert_d_ff": getattr(self.block, "hidden_size", None)}
        gated = hasattr(self.block, "activation")  # the experts of its attention are linear
        return described | {"activation": _GATED.get(described["activation"]) if gated else None}

    def _decided(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(output) != 5:
            raise _unknown_output(module, output, "(order, tokens, weights, loads, logits)")
        order_N, _, sorted_weights_N, load_E, logits_TE = output
        experts_E = torch.arange(len(load_E), device=order_N.device)
        load_E = torch.as_tensor(load_E, device=order_N.device)
        sorted_ids_N = torch.repeat_interleave(experts_E, load_E, output_size=order_N.numel())
        ids_N = torch.empty_like(sorted_ids_N).scatter_(0, order_N, sorted_ids_N)
        weights_N = torch.empty_like(sorted_weights_N).scatter_(0, order_N, sorted_weights_N)
        K = _top_k(module)
        return logits_TE, weights_N.view(-1, K), ids_N.view(-1, K)


@dataclass(frozen=True, kw_only=True)
class SwitchAdapter(TransformersRouter):
    """(chosen and kept (B, S, E), weights (B, S, 1), logits (B, S, E)): one choice, and a capacity per sequence."""

    def describe(self, module: nn.Module, model: nn.Module) -> dict[str, Any]:
        return super().describe(module, model) | {"top_k": 1}

    def _decided(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(output) != 3 or output[0].shape != output[2].shape:
            raise _unknown_output(module, output, "(chosen experts, weights, logits)")
        _, weights, logits = output
        # the router's own words, so that its roundings and ties are had again: a dropped token's choice is not returned
        probs = logits.softmax(-1, dtype=module.dtype).to(module.input_dtype)
        return logits.flatten(0, -2), weights.reshape(-1, 1), probs.argmax(-1).reshape(-1, 1)

    def _kept(self, module: nn.Module, output: Any) -> Tensor | None:
        return output[0].detach().flatten(0, -2).sum(-1, keepdim=True) > 0


def bias_attribute(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    return getattr(module, BIAS)


def bias_argument(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The bias lies in the block, which passes it on."""
    return args[1] if len(args) > 1 else kwargs.get(BIAS, kwargs.get("expert_bias"))


def bias_of_statistics(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    return module.moe_statics.e_score_correction_bias.reshape(-1)  # type: ignore[union-attr, operator]


def _batch_shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    x = args[0] if args else kwargs.get("hidden_states")
    return (x.shape[0], x.shape[1]) if isinstance(x, Tensor) and x.dim() == 3 else None


def _tensors(module: nn.Module, output: Any) -> tuple[Any, ...]:
    output = output if isinstance(output, tuple) else (output,)
    return tuple(part.detach() if isinstance(part, Tensor) else part for part in output)


def _top_k(module: nn.Module) -> int:
    return int(module.top_k)  # type: ignore[arg-type]


def _unknown_output(module: nn.Module, output: tuple[Any, ...], wanted: str) -> ValueError:
    got = ", ".join(str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in output)
    return ValueError(f"{type(module).__name__} returned {len(output)} of shapes {got}; its adapter reads {wanted}")


def _number_or_text(holders: list[Any], *names: str) -> Any:
    """The first of these attributes that one of the holders has, holders in order."""
    values = (_attribute(holder, name) for holder in holders for name in names)
    return next((value for value in values if isinstance(value, int | str) and not isinstance(value, bool)), None)


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, None)
    except RuntimeError:  # a config whose layers differ refuses to tell one size for all of them
        return None


def _whole(holders: list[Any], *names: str) -> int | None:
    value = _number_or_text(holders, *names)
    return value if isinstance(value, int) else None
