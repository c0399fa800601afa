"""What went wrong in the last recorded steps: a loss that is not finite, tokens that no expert got.

Balance is a matter of the steps that routed tokens; a run whose other steps routed none is not a balanced one.
Shape suffix: S recorded steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from app.layer_stats import LayerStats


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One clause for each thing that went wrong in the window; None where it did not.

    loss      a loss was recorded that is not finite
    unrouted  steps in which no token of a layer was routed
    invalid   steps in which some tokens were routed, but others could not be: their logits were not finite
    """

    loss: str | None = None
    unrouted: str | None = None
    invalid: str | None = None

    @property
    def words(self) -> str | None:
        """All of it as a sentence without its full stop; None where nothing went wrong."""
        said = "; ".join(part for part in (self.loss, self.unrouted, self.invalid) if part)
        return f"{said[0].upper()}{said[1:]}" if said else None


def trouble(steps: pd.DataFrame, layers: Sequence[LayerStats], window: int) -> Trouble:
    """What went wrong in the last `window` recorded steps.

    steps   rows of `Run.steps` of one phase, ascending
    layers  the MoE layers of the same phase
    """
    return Trouble(
        loss=_loss(steps, window),
        unrouted=_worst(layers, "no token was routed", [~_routed_S(layer)[-window:] for layer in layers]),
        invalid=_worst(
            layers,
            "some tokens could not be routed",
            [(_routed_S(layer) & (layer.invalid_S > 0))[-window:] for layer in layers],
        ),
    )


def _loss(steps: pd.DataFrame, window: int) -> str | None:
    bad_S, good_S = np.zeros(len(steps), bool), np.zeros(len(steps), bool)
    for name in ("loss", "ce_loss"):
        finite_S = np.isfinite(steps[name].to_numpy(dtype=np.float64, na_value=np.nan))
        bad_S |= steps[name].notna().to_numpy(dtype=bool) & ~finite_S
        good_S |= finite_S
    good_S &= ~bad_S
    if not bad_S[-window:].any():
        return None
    last_good = np.flatnonzero(good_S)[-1] if good_S.any() else -1
    since = np.flatnonzero(bad_S & (np.arange(len(steps)) > last_good))
    if since.size:
        return f"the loss is not finite from step {int(steps['step'].iloc[int(since[0])]):,} on"
    return f"the loss is not finite in {_of_last(bad_S[-window:])}"


def _routed_S(layer: LayerStats) -> np.ndarray:
    return np.asarray(np.nan_to_num(layer.load_SE).sum(axis=-1) > 0)


def _worst(layers: Sequence[LayerStats], clause: str, bad: Sequence[np.ndarray]) -> str | None:
    """The clause with the steps of the layer that has most of them, and which that is where others have fewer."""
    most = max(range(len(layers)), key=lambda place: int(bad[place].sum()), default=None)
    if most is None or not bad[most].any():
        return None
    alike = all(int(bad_S.sum()) == int(bad[most].sum()) for bad_S in bad)
    return f"{clause} in {_of_last(bad[most])}" + ("" if alike else f" of layer {layers[most].label}")


def _of_last(bad_S: np.ndarray) -> str:
    count, total = int(bad_S.sum()), bad_S.size
    if total == 1:
        return "the last step"
    return f"all of the last {total:,} steps" if count == total else f"{count:,} of the last {total:,} steps"
