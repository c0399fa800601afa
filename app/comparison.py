"""Several runs put side by side: what each is called, and the steps they are compared at.

Shape suffixes: S recorded steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app import data, layer_keys
from moe_core import metrics
from recorder.reader import Run

WINDOW = metrics.WINDOW
STRETCHES = 5  # parts of the window, for how much a difference wavers within it
_NO_SHAPE = (None, None)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run among those compared.

    `label` names it to a person, `reference` in a URL; `colour` is its place in the order of colours.
    """

    label: str
    reference: str
    colour: int
    run: Run

    @property
    def layers(self) -> list[int]:
        """The keys of its routers, see `app.layer_keys`."""
        return layer_keys.keys(self.run)

    def agrees(self, other: "Compared") -> bool:
        """Whether what both call by one key is called alike: layers of one router each, or the same several."""
        own, others = layer_keys.labels(self.run), layer_keys.labels(other.run)
        return all(own[key] == others[key] for key in own.keys() & others.keys())

    def shape(self, layer: int) -> tuple[int | None, int | None]:
        """Number of experts and top-k of a layer; (None, None) where it is no MoE layer of this run."""
        if layer not in self.layers:
            return _NO_SHAPE
        stats = data.layer_stats(self.run, layer)
        return stats.num_experts, stats.top_k


@dataclass(frozen=True, kw_only=True)
class Window:
    """The steps that metrics are taken over. `shared` is False where the runs share none: each has its own last ones.

    words  "the last 50 steps that all these runs recorded (350 to 399)"
    """

    steps: tuple[int, ...]
    shared: bool
    words: str

    @property
    def short(self) -> str:
        """ "last 50 shared steps", for titles."""
        if not self.shared:
            return f"last {WINDOW} steps of each"
        return f"last {len(self.steps)} shared steps" if len(self.steps) > 1 else "shared step"

    @property
    def stretches(self) -> list[tuple[int, ...]]:
        """The window in STRETCHES consecutive parts of about one length; [] where it has fewer steps than that."""
        if len(self.steps) < STRETCHES:
            return []
        return [tuple(part.tolist()) for part in np.array_split(np.array(self.steps), STRETCHES)]


def recorded_steps(run: Run, layer: int) -> np.ndarray:
    """Steps with a recorded load in the phase a run is judged by, ascending: of `layer`, else of its first one."""
    layers = layer_keys.keys(run)
    return data.layer_stats(run, layer if layer in layers else layers[0]).steps_S


def shared_steps(runs: Sequence[Compared], layer: int) -> np.ndarray:
    """The steps that all these runs recorded, ascending, int64."""
    steps_S = recorded_steps(runs[0].run, layer)
    for one in runs[1:]:
        steps_S = np.intersect1d(steps_S, recorded_steps(one.run, layer))
    return steps_S


def window_of(steps_S: np.ndarray, window: int = WINDOW) -> Window:
    """The last shared steps, at most `window` of them."""
    last = tuple(steps_S[-window:].tolist())
    if not last:
        return Window(steps=(), shared=False, words=f"each run's own last {window} recorded steps")
    if len(last) == 1:
        return Window(steps=last, shared=True, words=f"the one step that all these runs recorded ({last[0]:,})")
    number = f"the last {len(last)}" if len(last) < len(steps_S) else f"the {len(last)}"
    words = f"{number} steps that all these runs recorded ({last[0]:,} to {last[-1]:,})"
    return Window(steps=last, shared=True, words=words)


def layer_label(runs: Sequence[Compared], layer: int) -> str:
    """What a layer is called; the runs compared agree on it."""
    return str(next(layer_keys.label(one.run, layer) for one in runs if layer in one.layers))
