"""What the form of a recording begins with: a list of runs worth recording, and what to expect of each."""

from dataclasses import dataclass, field
from typing import Any

from moe_core.recipe_catalog import RECIPES
from recorder.training.config import ToyConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A run worth recording.

    title     what the list calls it
    expect    what to expect of it, a sentence: what a run of 400 steps from seed 0 showed
    settings  fields of ToyConfig; all others keep their defaults (task and recipe have some of their own)
    """

    title: str
    expect: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> ToyConfig:
        """All its settings."""
        return ToyConfig.of(**self.settings)

    @property
    def summary(self) -> str:
        """What it is and what to expect, two lines at most."""
        recipe = self.config.recipe
        what = f"{RECIPES[recipe].summary[0].upper()}{RECIPES[recipe].summary[1:]}. " if recipe else ""
        return f"{what}{self.expect}"


PRESETS: dict[str, Preset] = {
    "collapse": Preset(
        title="Collapse: no balancer",
        expect="Top-1 of 16 experts and nothing that keeps the load even. Expect a collapse within 20 steps: 2 or 3 "
        "experts take 95% of the last layer.",
    ),
    "aux": Preset(
        title="Aux loss",
        expect="The same with the Switch aux loss. Expect every expert busy, the busiest at about 2x its share.",
        settings={"balancer": "aux"},
    ),
    "sign-bias": Preset(
        title="Sign bias",
        expect="The same with a bias that moves by the sign of the error, and no loss. Expect an early collapse that "
        "is undone within 70 steps.",
        settings={"balancer": "sign-bias"},
    ),
    "quantile": Preset(
        title="Quantile balancer",
        expect="The same with a bias at the quantile that evens the load. Expect balance from step 50 on, and nothing "
        "to tune.",
        settings={"balancer": "quantile"},
    ),
    "stable-latent": Preset(
        title="Latent experts",
        expect="Expect the evenest load of all: within 5% of uniform, soon and to the end.",
        settings={"recipe": "stable-latent"},
    ),
    "deepseek-v3": Preset(
        title="DeepSeek style",
        expect="Expect the last layer to tip over in the first steps and the bias to bring it back.",
        settings={"recipe": "deepseek-v3"},
    ),
    "switch": Preset(
        title="Switch style",
        expect="Expect an early collapse that is pulled back; 5 to 10% of assignments are dropped for lack of room.",
        settings={"recipe": "switch"},
    ),
    "mixtral": Preset(
        title="Mixtral style",
        expect="Expect every expert busy, the busiest at about 1.1x its share.",
        settings={"recipe": "mixtral"},
    ),
    "olmoe": Preset(
        title="OLMoE style",
        expect="Expect no idle expert of 64, the busiest at 1.5 to 1.8x its share. The slowest of all to record.",
        settings={"recipe": "olmoe"},
    ),
    "noisy-top-k": Preset(
        title="Noisy top-k",
        expect="Expect every expert busy, the busiest at about 1.4x its share.",
        settings={"recipe": "noisy-top-k"},
    ),
    "three-tier": Preset(
        title="Three tiers",
        expect="Expect early layers to even out and the last to lag: its busiest expert stays above 2x its share.",
        settings={"recipe": "three-tier"},
    ),
    "sorted-swiglu": Preset(
        title="Sorted SwiGLU",
        expect="Expect a calm picture from the first steps, the busiest expert below 1.3x its share.",
        settings={"recipe": "sorted-swiglu"},
    ),
    "regression": Preset(
        title="Regression, in seconds",
        expect="One MoE layer learns y = tanh(xW) of random vectors: no text, no cross-entropy.",
        settings={"task": "regression"},
    ),
    "regression-plain": Preset(
        title="Regression, no balancer",
        expect="One MoE layer learns y = tanh(xW) of random vectors, and nothing keeps its load even.",
        settings={"task": "regression", "recipe": ""},
    ),
}
FIRST = "collapse"
