"""One batch by hand: router logits, which tokens are real, and the state that a balancer carries on. Numpy only.

Shapes: T tokens, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """logits_TE float32, what the router says of each token; mask_T bool, True = a real token, no padding."""

    logits_TE: FloatArray
    mask_T: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: object, mask: object = None) -> Batch:
        """A batch of rows of logits, all tokens real where no mask is given."""
        logits_TE = np.array(rows, dtype=np.float32)
        mask_T = np.ones(len(logits_TE), dtype=bool) if mask is None else np.array(mask, dtype=bool)
        return cls(logits_TE=logits_TE, mask_T=mask_T)

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return len(self.logits_TE)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logits_TE.shape[1]

    def resized(self, num_tokens: int, num_experts: int) -> Batch:
        """The same batch with rows and columns cut off, or added with logits of 0."""
        logits_TE = np.zeros((num_tokens, num_experts), dtype=np.float32)
        mask_T = np.ones(num_tokens, dtype=bool)
        rows, columns = min(num_tokens, self.num_tokens), min(num_experts, self.num_experts)
        logits_TE[:rows, :columns] = self.logits_TE[:rows, :columns]
        mask_T[:rows] = self.mask_T[:rows]
        return Batch(logits_TE=logits_TE, mask_T=mask_T)


def random_batch(seed: int, num_tokens: int, num_experts: int, skew: float) -> Batch:
    """Logits z + skew o: z normal for each token and expert, o normal once for each expert."""
    generator = np.random.default_rng(seed)
    offsets_E = generator.standard_normal(num_experts)
    logits_TE = generator.standard_normal((num_tokens, num_experts)) + skew * offsets_E
    return Batch.of(np.round(logits_TE, 2) + 0.0)  # short to read; + 0.0 makes -0 a 0


@dataclass(frozen=True, kw_only=True, eq=False)
class BalancerState:
    """What a balancer remembers between batches, with the names of its buffers in moe_core.

    bias_E float32, the selection bias. count_E, assignments since the last optimizer step. bias_sum_E float32 and
    num_updates: quantile biases since then, summed, and how many they are.
    """

    bias_E: FloatArray
    count_E: NDArray[np.int64]
    bias_sum_E: FloatArray
    num_updates: int = 0

    @classmethod
    def fresh(cls, num_experts: int, bias: object = None) -> BalancerState:
        """The state before the first batch, with a bias set by hand or none."""
        zero_E = np.zeros(num_experts, dtype=np.float32)
        bias_E = zero_E if bias is None else np.array(bias, dtype=np.float32)
        return cls(bias_E=bias_E, count_E=zero_E.astype(np.int64), bias_sum_E=zero_E)

    @property
    def is_between_steps(self) -> bool:
        """Whether micro-batches have been taken in since the last optimizer step."""
        return self.num_updates > 0 or bool(self.count_E.any())
