"""Parameters of a component as exact whole numbers, and the largest numbers that a layout may have. No torch."""

from __future__ import annotations

from dataclasses import dataclass

# Far above any model there is; above them a file is wrong, and what it asks for could not be drawn or counted in time.
MAX_LAYERS = 10_000
MAX_EXPERTS = 1_000_000
MAX_WIDTH = 100_000_000


@dataclass(frozen=True)
class Count:
    """Parameters of one component.

    Attributes:
        total: all of them.
        active: those that one token uses.
        multiplied: those of the active ones that are matrices which the token passes, 2 FLOPs each: without biases,
            norms and embeddings that are looked up.
    """

    total: int = 0
    active: int = 0
    multiplied: int = 0

    @classmethod
    def of_all(cls, parameters: int, multiplied: int = 0) -> Count:
        """A component that every token uses."""
        return cls(parameters, parameters, multiplied)

    def __add__(self, other: Count) -> Count:
        return Count(self.total + other.total, self.active + other.active, self.multiplied + other.multiplied)
