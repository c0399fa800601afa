"""The settings of a toy training run: one place for names, defaults and limits. No torch, so that forms can ask it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moe_core.layer_patterns import moe_layer_indices
from moe_core.recipe_catalog import recipe

#: `source` of the runs that this makes.
SOURCE = "routescope record"
TASKS = ("lm", "regression")
ROUTERS = ("softmax", "sigmoid")
BALANCERS = ("none", "aux", "sign-bias", "quantile")
#: Variants of these: the aux loss per sequence, or with mean probabilities in place of the load, or both; the quantile
#: bias moved at the optimizer step.
VARIANTS = ("sequence-aux", "soft-aux", "soft-sequence-aux", "quantile-step")
DISPATCHERS = ("auto", "naive", "masked", "sorted", "grouped")

#: Where a task's defaults are not those of ToyConfig. A recipe's values go before them.
TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "lm": {},
    "regression": {
        "recipe": "sorted-swiglu",
        "d_model": 32,
        "expert_d_ff": 64,
        "batch_size": 256,
        "steps": 300,
    },
}
#: Settings of text and of the transformer around the MoE layers, which the regression task has not.
LM_ONLY = ("num_layers", "moe_frequency", "d_ff", "num_heads", "seq_len", "corpus", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """One toy run. Field names are the options of `routescope record`, with underscores.

    task: "lm", a language model on text, or "regression", a single MoE layer that learns y = tanh(xW); the fields of
    LM_ONLY say nothing there. recipe: a name of `moe_core.recipe_catalog`, or "" for none; `ToyConfig.of` takes its
    values, and the task's, as defaults. balancer: one of BALANCERS or VARIANTS, or several joined by "+". z_coef > 0
    adds the router z-loss to whichever it is. latent_size None = experts work in the model's width.
    d_ff: width of dense layers; expert_d_ff: of each expert. capacity_factor None = no expert drops tokens.
    Raises ValueError that names the value and what is allowed.
    """

    task: str = "lm"
    recipe: str = ""
    balancer: str = "none"
    aux_coef: float = 1e-2
    z_coef: float = 0.0
    bias_rate: float = 1e-3
    noise_std: float = 0.0
    router: str = "softmax"
    dispatcher: str = "auto"
    num_layers: int = 4
    moe_frequency: int = 2
    d_model: int = 64
    d_ff: int = 128
    expert_d_ff: int = 128
    num_heads: int = 4
    num_experts: int = 16
    top_k: int = 1
    num_shared_experts: int = 0
    latent_size: int | None = None
    capacity_factor: float | None = None
    steps: int = 400
    batch_size: int = 16
    seq_len: int = 64
    lr: float = 3e-3
    seed: int = 0
    decisions_every: int = 10
    probe_every: int = 20
    corpus: tuple[str, ...] = ()
    vocab_size: int = 1024
    name: str = ""

    def __post_init__(self) -> None:
        for field, least, most in (
            ("num_layers", 1, 64),
            ("moe_frequency", 1, 64),
            ("d_model", 8, 2048),
            ("d_ff", 1, 16384),
            ("expert_d_ff", 1, 16384),
            ("num_heads", 1, 64),
            ("num_experts", 1, 1024),
            ("top_k", 1, 1024),
            ("num_shared_experts", 0, 64),
            ("steps", 1, 1_000_000),
            ("batch_size", 1, 4096),
            ("seq_len", 2, 4096),
            ("seed", 0, 2**32 - 1),
            ("decisions_every", 1, 1_000_000),
            ("probe_every", 1, 1_000_000),
        ):
            value = getattr(self, field)
            if not least <= value <= most:
                raise ValueError(f"{field}={value} is not between {least} and {most}")
        for field in ("aux_coef", "z_coef", "bias_rate", "noise_std"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field}={value} is not a finite number of at least 0")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr={self.lr} is not a positive, finite number")
        if self.capacity_factor is not None and not (math.isfinite(self.capacity_factor) and self.capacity_factor > 0):
            raise ValueError(f"capacity_factor={self.capacity_factor} is not a positive, finite number")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}")
        if self.latent_size is not None and not 1 <= self.latent_size <= 16384:
            raise ValueError(f"latent_size={self.latent_size} is not between 1 and 16384")
        for field, allowed in (("task", TASKS), ("router", ROUTERS), ("dispatcher", DISPATCHERS)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r} is unknown; choose one of {', '.join(allowed)}")
        check_balancer(self.balancer)
        if "quantile" in self.balancer and self.top_k == self.num_experts:
            raise ValueError(
                f"balancer='quantile' needs num_experts > top_k, not num_experts={self.num_experts}, top_k={self.top_k}"
            )
        if self.recipe:
            recipe(self.recipe)  # refuses an unknown one
            self._check_router()
        if self.task == "lm":
            self._check_transformer()

    def _check_router(self) -> None:
        """What `moe_core.TopKRouter` would refuse of a recipe's options beside these settings, told without torch."""
        options, of = self._recipe_options, f"recipe={self.recipe!r}"
        if self.top_k == 1 and (options.get("renormalize") or options.get("softmax_after_top_k")):
            raise ValueError(
                f"top_k=1 with renormalised weights, as {of} has them, makes every weight 1, so that the router gets "
                "no gradient; choose at least 2"
            )
        if options.get("softmax_after_top_k") and self.router != "softmax":
            raise ValueError(f"router={self.router!r} does not go with {of}, whose softmax is over the chosen logits")
        groups = options.get("num_groups", 1)
        if self.num_experts % groups:
            raise ValueError(f"num_experts={self.num_experts} is no multiple of the {groups} groups of {of}")
        eligible = options.get("top_groups", groups) * self.num_experts // groups
        if self.top_k > eligible:
            raise ValueError(
                f"top_k={self.top_k} is more than the {eligible} experts that {of} lets a token choose among"
            )

    def _check_transformer(self) -> None:
        if self.d_model % self.num_heads or (self.d_model // self.num_heads) % 2:
            raise ValueError(
                f"d_model={self.d_model} does not split into num_heads={self.num_heads} heads of an even width"
            )
        dense = min(self._recipe_options.get("first_k_dense", 0), self.num_layers)
        if not moe_layer_indices(self.num_layers, moe_frequency=self.moe_frequency, first_k_dense=dense):
            after = f" after the {dense} dense ones of recipe={self.recipe!r}" if dense else ""
            raise ValueError(
                f"moe_frequency={self.moe_frequency} of num_layers={self.num_layers}{after} leaves no MoE layer to "
                f"record; choose {'more layers' if dense else f'at most {self.num_layers}'}"
            )

    @classmethod
    def of(cls, **given: Any) -> ToyConfig:
        """The settings given; for all others those of the recipe, of the task, and the defaults, in this order.

        Raises ValueError as the constructor does, and for settings given to a task that does not have them.
        """
        task = given.get("task", cls.task)
        of_task = TASK_DEFAULTS.get(task, {})
        unused = [name for name in LM_ONLY if name in given] if task == "regression" else []
        if unused:
            raise ValueError(f"{unused[0]}={given[unused[0]]} means nothing to task='regression': leave it out")
        of_recipe = _recipe_values({**of_task, **given}.get("recipe", ""))
        return cls(**{**of_task, **of_recipe, **given})

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> ToyConfig:
        """The settings of a run that `routescope record` made, from its run.json.

        Raises ValueError, one line, for a run of another maker, and for settings that this version does not allow.
        """
        source, config = manifest.get("source"), manifest.get("config")
        if source != SOURCE or not isinstance(config, Mapping):
            raise ValueError(f"it was recorded by {source or 'another program'}, not by {SOURCE}")
        given = {name: value for name, value in config.items() if name in cls.__dataclass_fields__}
        try:
            parts = [part for part in str(given.pop("balancer", cls.balancer)).split("+") if part != "z"]
            if "corpus" in given:
                given["corpus"] = tuple(str(path) for path in given["corpus"])
            return cls.of(**given, balancer="+".join(parts) or "none")
        except (TypeError, ValueError) as error:
            raise ValueError(f"its settings are not those of a toy run: {error}") from None

    @property
    def _recipe_options(self) -> dict[str, Any]:
        return dict(recipe(self.recipe).options) if self.recipe else {}

    def model_options(self) -> dict[str, Any]:
        """The settings, and what the recipe says beside them, as fields of `moe_core.MoETransformerConfig`."""
        return {
            **self._recipe_options,
            **{name: getattr(self, name) for name in _OF_THE_MODEL},
            "score_function": self.router,
            "balancer": self.full_balancer,
        }

    @property
    def full_balancer(self) -> str:
        """The balancer with the z-loss named in it, as `moe_core.make_balancer` takes it."""
        if self.z_coef == 0:
            return self.balancer
        return "z" if self.balancer == "none" else f"{self.balancer}+z"

    def as_manifest(self) -> dict[str, Any]:
        """The settings as they stand in a run's manifest."""
        settings = {**asdict(self), "corpus": list(self.corpus), "balancer": self.full_balancer}
        meaningless = LM_ONLY if self.task == "regression" else ()
        return {name: value for name, value in settings.items() if name not in meaningless}


#: Fields of the same name in MoETransformerConfig.
_OF_THE_MODEL = (
    "d_model",
    "num_layers",
    "moe_frequency",
    "d_ff",
    "expert_d_ff",
    "num_heads",
    "num_experts",
    "top_k",
    "num_shared_experts",
    "latent_size",
    "capacity_factor",
    "dispatcher",
    "noise_std",
    "aux_coef",
    "z_coef",
    "bias_rate",
)


def _recipe_values(name: str) -> dict[str, Any]:
    """What a recipe says about fields of ToyConfig; {} for the name ""."""
    if not name:
        return {}
    options = dict(recipe(name).options)
    parts = options["balancer"].split("+")
    values = {field: options[field] for field in _OF_THE_MODEL if field in options}
    values["z_coef"] = options.get("z_coef", 1e-3) if "z" in parts else 0.0
    values["balancer"] = "+".join(part for part in parts if part != "z") or "none"
    values["router"] = options.get("score_function", "softmax")
    return values


def check_balancer(balancer: str) -> None:
    """Raise a ValueError unless `balancer` is one of BALANCERS or VARIANTS, or several that may stand together."""
    known = (*BALANCERS, *VARIANTS)
    parts = balancer.split("+")
    for part in parts:
        if part not in known:
            raise ValueError(
                f"balancer={part!r} is unknown; choose one of {', '.join(known)}, or several joined by '+'"
            )
    if len(parts) > 1 and "none" in parts:
        raise ValueError(f"balancer={balancer!r}: 'none' cannot be combined with others")
    if len(set(parts)) < len(parts):
        raise ValueError(f"balancer={balancer!r} names one kind twice")
    for what, several in (
        ("own the bias", [part for part in parts if part in ("sign-bias", "quantile", "quantile-step")]),
        ("give the aux loss", [part for part in parts if part.endswith("aux")]),
    ):
        if len(several) > 1:
            raise ValueError(f"balancer={balancer!r}: {' and '.join(several)} would both {what}; choose one of them")
