"""One router's loads, biases and the rest over all recorded steps, as arrays.

Shape suffixes: S recorded steps, E experts.
"""

from dataclasses import dataclass

import numpy as np

from app.layer_keys import Label


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """`layer_stats` of one router as arrays over the recorded steps, ascending. Not writable.

    load_SE int64 (float64 only where a foreign writer recorded fractions); gate_mass_SE, mean_prob_SE, dropped_SE
    float64, NaN where not recorded; expert_bias_SE float64, the bias used in that step, None where there never was
    one. The rest (S,) float64, NaN where not recorded: tokens routed, assignments the bias changed, invalid rows,
    router entropy (0 to 1), normalised aux loss (uniform = 1), z-loss. layer and label: see `app.layer_keys`.
    """

    layer: int
    label: Label
    phase: str
    top_k: int
    steps_S: np.ndarray
    load_SE: np.ndarray
    gate_mass_SE: np.ndarray
    mean_prob_SE: np.ndarray
    dropped_SE: np.ndarray
    expert_bias_SE: np.ndarray | None
    tokens_S: np.ndarray
    rerouted_S: np.ndarray
    invalid_S: np.ndarray
    router_entropy_S: np.ndarray
    aux_loss_S: np.ndarray
    z_loss_S: np.ndarray

    @property
    def num_experts(self) -> int:
        return int(self.load_SE.shape[-1])

    def at(self, step: int) -> int:
        """The row of `step`. Raises ValueError where that step was not recorded."""
        row = int(np.searchsorted(self.steps_S, step))
        if row >= self.steps_S.size or self.steps_S[row] != step:
            raise ValueError(f"step {step} of layer {self.label} was not recorded in phase {self.phase}")
        return row
