"""What every source's reader hands over: pieces of routing in order of step, and what they are about.

Shapes: E experts, K choices a token, T tokens. No torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np


class DumpError(ValueError):
    """A dump that is not understood: one line that names the file, what it has and what was expected."""

    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(f"{file}: {problem}")


class Place(NamedTuple):
    """Where a router stands in the dump's own words: a container of layers and the number in it."""

    container: str
    number: int


#: The container of all layers where a dump knows only one.
LAYERS = "layers"


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What one router chose for some tokens of one step: integers (T, K); -1 = this slot holds nothing.

    first_token is the number of the first row among the step's tokens in this router. logits_TE, where a dump has
    them, are float (T, E).
    """

    step: int
    place: Place
    experts_TK: np.ndarray
    first_token: int = 0
    logits_TE: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How often one router chose each expert in one step: whole numbers (E,)."""

    step: int
    place: Place
    load_E: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Which tokens a step's decisions are about; all (T,). first_token numbers the first of them."""

    step: int
    sequence_T: np.ndarray
    position_T: np.ndarray
    token_id_T: np.ndarray | None = None
    first_token: int = 0


Piece = Decisions | Counts | Tokens


@dataclass(kw_only=True)
class Dump:
    """One dump, opened and recognised, not yet read through.

    file: what was given, for messages.
    source: project and format, for the manifest.
    a_step_is: "forward pass", "request", ...
    pieces: reads the dump from its start, all pieces of a step together and steps ascending; called twice, so that
        all of it is checked before the first row is written. Raises DumpError.
    phase: the phase that all of it is recorded as.
    num_experts, top_k: where the format itself tells them.
    width: length of the dump's axis of layers, where it has one; it may count all layers or only the MoE ones.
    score_functions: by place, where the dump names them.
    notes: what the dump does not hold, or what was left out of it; readers add to it while they read.
    """

    file: Path
    source: str
    a_step_is: str
    pieces: Callable[[], Iterator[Piece]]
    phase: str = "generate"
    num_experts: int | None = None
    top_k: int | None = None
    width: int | None = None
    score_functions: dict[Place, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # as an ordered set: pieces are read twice

    def note(self, text: str) -> None:
        """Remember a line for the run's events, once."""
        self.notes[text] = None
