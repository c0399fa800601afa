"""The settings of a MoETransformer. No torch, so that its layout can be told without building it."""

from __future__ import annotations

from dataclasses import dataclass

from .choices import Activation, DropPolicy, ScoreFunction
from .layer_patterns import moe_layer_indices


@dataclass(frozen=True, kw_only=True)
class MoETransformerConfig:
    """Shape and routing of a MoETransformer.

    d_ff is the width of dense layers, expert_d_ff of each expert (default: d_ff). activation, ffn_bias and dropout
    are those of all feed-forward networks, dense, routed and shared (`moe_core.experts`). moe_frequency n makes every
    n-th layer MoE (2: dense, MoE, dense, MoE, ...), from moe_offset on and after the first `first_k_dense` layers;
    explicit_moe_layers names them by index instead.

    The router's options are those of TopKRouter, under the same names but for router_bias (its bias) and
    router_init_std (its init_std). latent_size: routed experts work in that
    width (LatentMoELayer, latent_norm). balancer: a name of `make_balancer`, such as "none", "aux", "sign-bias",
    "quantile", "aux+z"; the coefficients beside it. activation_checkpointing: recompute each layer in the backward
    pass instead of keeping its activations; losses, gradients, loads and balancers come out the same.

    Raises ValueError for numbers that do not fit together.
    """

    vocab_size: int
    d_model: int = 64
    num_layers: int = 4
    num_heads: int = 4
    d_ff: int = 128
    activation: Activation = "swiglu"
    ffn_bias: bool = False
    dropout: float = 0.0
    activation_checkpointing: bool = False

    moe_frequency: int = 2
    moe_offset: int | None = None
    first_k_dense: int = 0
    explicit_moe_layers: tuple[int, ...] | None = None

    num_experts: int = 16
    top_k: int = 1
    expert_d_ff: int | None = None
    num_shared_experts: int = 0
    latent_size: int | None = None
    latent_norm: bool = True
    zero_idle_gradients: bool = False
    dispatcher: str = "auto"
    capacity_factor: float | None = None
    drop_policy: DropPolicy = "position"

    score_function: ScoreFunction = "softmax"
    softmax_after_top_k: bool = False
    renormalize: bool | None = None
    routed_scaling_factor: float = 1.0
    noise_std: float = 0.0
    num_groups: int = 1
    top_groups: int | None = None
    router_bias: bool = False
    bias_in_weights: bool = False
    router_init_std: float = 0.02

    balancer: str = "none"
    aux_coef: float = 1e-2
    z_coef: float = 1e-3
    bias_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is below 1")
        if self.d_model % self.num_heads or (self.d_model // self.num_heads) % 2:
            raise ValueError(
                f"d_model={self.d_model} is not num_heads={self.num_heads} heads of an even width, "
                "which rotary positions need"
            )
        _ = self.moe_layers  # refuses a bad pattern

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the MoE layers."""
        # an explicit list stands alone: the default frequency gives way to it, any other is refused beside it
        replaced = self.explicit_moe_layers is not None and self.moe_frequency == MoETransformerConfig.moe_frequency
        return moe_layer_indices(
            self.num_layers,
            moe_frequency=1 if replaced else self.moe_frequency,
            moe_offset=self.moe_offset,
            first_k_dense=self.first_k_dense,
            explicit=self.explicit_moe_layers,
        )
