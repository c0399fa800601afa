"""All that the Routing lab holds at one moment, and how the URL carries it. No torch, no Streamlit.

Everything is in the URL: the preset, and what differs from it, an entry each: "top_k:2", "bias:0_0_0.3",
"logits:4_0~0_4" (cells joined by "_", rows by "~").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.lab.batch import BalancerState, Batch
from app.lab.presets import DEFAULT, PRESETS, RANDOM
from app.lab.settings import CHOICES, LIMITS, MOST_EXPERTS, Settings, read

MOST_CELLS = 256
"""Logits of the largest batch that can be changed by hand: larger ones would not fit into a URL."""

_LARGEST = 1e6  # of a number typed by hand; beyond it float32 arithmetic shows nothing


@dataclass(frozen=True, kw_only=True, eq=False)
class Lab:
    """A batch, its settings and the balancer's state; applied counts the updates since the preset."""

    preset: str
    settings: Settings
    batch: Batch
    state: BalancerState
    applied: int = 0

    @classmethod
    def of(cls, preset: str, settings: Settings | None = None) -> Lab:
        """A preset as it begins, with other settings where given."""
        settings = PRESETS[preset].settings if settings is None else settings
        batch = PRESETS[preset].batch(settings)
        return cls(
            preset=preset,
            settings=settings.fitted(batch.num_tokens, batch.num_experts),
            batch=batch,
            state=PRESETS[preset].state(batch.num_experts),
        )

    @classmethod
    def from_entries(cls, entries: Iterable[str]) -> Lab:
        """What the URL's entries say; the preset's own for what is missing or cannot be read."""
        first, *rest = [*entries, ""]
        preset = first if first in PRESETS else DEFAULT
        told = dict(entry.partition(":")[::2] for entry in rest)
        changes = {name: read(name, text) for name, text in told.items() if name in CHOICES or name in LIMITS}
        found = {name: value for name, value in changes.items() if value is not None}
        settings = replace(PRESETS[preset].settings, **found)
        batch = _batch(PRESETS[preset].batch(settings), told)
        state = PRESETS[preset].state(batch.num_experts)
        return cls(
            preset=preset,
            settings=settings.fitted(batch.num_tokens, batch.num_experts),
            batch=batch,
            state=_state(state, told),
            applied=_count(told.get("applied", "")),
        )

    def entries(self) -> list[str]:
        """The preset, and what differs from it: the inverse of `from_entries`."""
        begun = PRESETS[self.preset]
        batch, fresh = begun.batch(self.settings), begun.state(self.batch.num_experts)
        own = asdict(begun.settings.fitted(self.batch.num_tokens, self.batch.num_experts))
        found = [f"{name}:{_written(value)}" for name, value in asdict(self.settings).items() if value != own[name]]
        if not same(self.batch.logits_TE, batch.logits_TE):
            found.append("logits:" + "~".join(_flat(row_E) for row_E in self.batch.logits_TE))
        if not same(self.batch.mask_T, batch.mask_T):
            found.append(f"mask:{_flat(self.batch.mask_T)}")
        for name in ("bias", "count", "bias_sum"):
            value_E = getattr(self.state, f"{name}_E")
            if not same(value_E, getattr(fresh, f"{name}_E")):
                found.append(f"{name}:{_flat(value_E)}")
        found += [f"num_updates:{self.state.num_updates}"] * bool(self.state.num_updates)
        found += [f"applied:{self.applied}"] * bool(self.applied)
        return [self.preset, *found]

    @property
    def is_as_begun(self) -> bool:
        """Whether nothing differs from the preset."""
        return len(self.entries()) == 1

    @property
    def is_editable(self) -> bool:
        """Whether the batch is small enough to be changed by hand."""
        return self.batch.logits_TE.size <= MOST_CELLS

    @property
    def is_drawn(self) -> bool:
        """Whether the batch is the random one as its seed gives it."""
        return self.preset == RANDOM and same(self.batch.logits_TE, PRESETS[RANDOM].batch(self.settings).logits_TE)

    def with_settings(self, **changes: Any) -> Lab:
        """Other settings, fitted; a random batch that was not changed by hand is drawn anew where they say so."""
        settings = replace(self.settings, **changes)
        batch = self.batch
        if self.is_drawn:
            batch = PRESETS[RANDOM].batch(settings)
            if batch.num_tokens == self.batch.num_tokens:
                batch = replace(batch, mask_T=self.batch.mask_T)
        return self._of_batch(batch, settings)

    def with_batch(self, batch: Batch) -> Lab:
        """Another batch; the balancer starts afresh where the number of experts is another."""
        return self._of_batch(batch, self.settings)

    def with_bias(self, expert: int, bias: float) -> Lab:
        """One expert's bias set by hand."""
        bias_E = self.state.bias_E.copy()
        bias_E[expert] = bias
        return replace(self, state=replace(self.state, bias_E=bias_E))

    def _of_batch(self, batch: Batch, settings: Settings) -> Lab:
        kept = batch.num_experts == self.batch.num_experts
        return replace(
            self,
            settings=settings.fitted(batch.num_tokens, batch.num_experts),
            batch=batch,
            state=self.state if kept else BalancerState.fresh(batch.num_experts),
            applied=self.applied if kept else 0,
        )


def same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two arrays are alike in shape and numbers, NaN like NaN."""
    if one.dtype.kind == "f":
        return one.shape == other.shape and np.array_equal(one, other, equal_nan=True)
    return np.array_equal(one, other)


def number(text: str) -> float | None:
    """A logit as a person types it: a number, "nan" (or nothing), "inf", "-inf"; None for anything else."""
    text = text.strip().lower()
    if text in ("", "nan"):
        return float("nan")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= _LARGEST or np.isinf(value) else None


def written(value: float) -> str:
    """A float32 in as few digits as tell it from its neighbours: "0.3", "-inf", "nan"."""
    if not np.isfinite(value):
        return str(float(value))
    return np.format_float_positional(np.float32(value) + 0, unique=True, trim="-")  # + 0 makes -0 a 0


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flat(values: NDArray[Any]) -> str:
    return "_".join(written(value) if values.dtype.kind == "f" else str(int(value)) for value in values)


def _numbers(text: str) -> list[float] | None:
    values = [number(part) for part in text.split("_")]
    return None if None in values else [value for value in values if value is not None]


def _count(text: str) -> int:
    return min(int(text), 10**6) if text.isascii() and text.isdecimal() and len(text) < 9 else 0


def _batch(own: Batch, told: dict[str, str]) -> Batch:
    rows = [_numbers(row) for row in told["logits"].split("~")] if "logits" in told else []
    widths = {0 if row is None else len(row) for row in rows}
    width = widths.pop() if len(widths) == 1 else 0
    if 2 <= width <= MOST_EXPERTS and len(rows) * width <= MOST_CELLS:
        batch = Batch.of(rows)
        own = replace(batch, mask_T=own.mask_T) if len(own.mask_T) == batch.num_tokens else batch
    mask = _numbers(told["mask"]) if "mask" in told else None
    if mask is not None and len(mask) == own.num_tokens:
        own = replace(own, mask_T=np.array(mask) == 1)
    return own


def _state(fresh: BalancerState, told: dict[str, str]) -> BalancerState:
    found: dict[str, Any] = {"num_updates": _count(told.get("num_updates", ""))}
    for name, kind in (("bias", np.float32), ("count", np.int64), ("bias_sum", np.float32)):
        values = _numbers(told[name]) if name in told else None
        if values is not None and len(values) == len(fresh.bias_E) and np.isfinite(values).all():
            found[f"{name}_E"] = np.array(values).astype(kind)
    return replace(fresh, **found)
