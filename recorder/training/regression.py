"""The task "regression": one MoE layer learns y = tanh(x W) of random x. No text, no cross-entropy.

Shapes: N samples in a batch (one token each), D width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F_

from moe_core import MoETransformerConfig
from moe_core.transformer import make_moe_layer

from .config import ToyConfig
from .task import Batch

REPORT_EVERY = 100  # steps
_PROBE = -1  # the probe's place in the stream of batches, where no step is


class RegressionTask:
    """Mean squared error of an MoE layer against y = tanh(x W); x standard normal, W drawn once from the seed.

    Every step draws a fresh batch, so that there is nothing to overfit. The samples of a batch stand as one
    sequence of tokens in the record.
    """

    def __init__(self, config: ToyConfig) -> None:
        self._config = config
        torch.manual_seed(config.seed)
        # a layer is all there is: vocab_size belongs to the transformer around it
        self.model = make_moe_layer(MoETransformerConfig(**config.model_options(), vocab_size=1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr)
        D = config.d_model
        self._target_DD = torch.randn(D, D, generator=torch.Generator().manual_seed(config.seed)) / D**0.5
        self._load_E = torch.zeros(config.num_experts, dtype=torch.int64)  # since the last report
        self.probe = self.batch(_PROBE)
        self.domains: tuple[str, ...] = ()
        self.settings: dict[str, Any] = {}
        self.data_digest = ""
        self.tallies = {"load": self._load_E}

    def batch(self, step: int) -> Batch:
        # a stream of its own for each step: neither the model nor the length of the run moves the data
        generator = torch.Generator().manual_seed((self._config.seed + 1) * 1_000_003 + step)
        x_ND = torch.randn(self._config.batch_size, self._config.d_model, generator=generator)
        return Batch(inputs=(x_ND, torch.tanh(x_ND @ self._target_DD)))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        x_ND, y_ND = batch.inputs
        out = self.model(x_ND)
        if self.model.training:
            self._load_E += out.routing.load()
        error = F_.mse_loss(out.hidden, y_ND)
        return {"loss": error + sum(out.losses.values()), **out.losses}

    def report(self, steps_done: int) -> str | None:
        if steps_done % REPORT_EVERY:
            return None
        share_E = self._load_E / self._load_E.sum()
        self._load_E.zero_()
        return (
            f"steps {steps_done - REPORT_EVERY} to {steps_done - 1}: busiest expert {100 * share_E.max():.1f} %, "
            f"quietest {100 * share_E.min():.1f} % of the assignments (even: {100 / len(share_E):.1f} %)"
        )
