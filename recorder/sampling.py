"""Which steps and which sequences are recorded: the same choice in every layer, on every rank, in every repetition."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np

from . import checks

_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How much of the train phase is recorded; the other phases are recorded in full.

    stats_every, decisions_every: of every n-th step. decisions_share: of a step's sequences, chosen by a hash of
    step and sequence: whole ones, so that their text can be read. Raises ValueError for numbers out of range.
    """

    stats_every: int = 1
    decisions_every: int = 1
    decisions_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("stats_every", "decisions_every"):
            checks.whole(name, getattr(self, name), least=1)
        if not isinstance(self.decisions_share, Real) or not 0 < self.decisions_share <= 1:
            raise ValueError(f"decisions_share={self.decisions_share!r} is not above 0 and at most 1")

    def stats(self, step: int, phase: str) -> bool:
        return phase != "train" or step % self.stats_every == 0

    def decisions(self, step: int, phase: str) -> bool:
        return phase != "train" or step % self.decisions_every == 0

    def chosen(self, step: int, phase: str, first: int, count: int) -> np.ndarray | None:
        """bool (count,): which of the step's sequences from number `first` on; None = all of them."""
        if phase != "train" or self.decisions_share == 1:
            return None
        limit = self.decisions_share * 2.0**64
        return np.array([_hash(step, sequence) < limit for sequence in range(first, first + count)], dtype=bool)


def _hash(step: int, sequence: int) -> int:
    """64 evenly spread bits: splitmix64 (Steele, Lea and Flood, 2014) of the two numbers."""
    z = (step * 0x9E3779B97F4A7C15 + sequence * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
