"""Batches to begin with in the Routing lab, each with one sentence on what to see there. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.lab.batch import BalancerState, Batch, random_batch
from app.lab.settings import Settings

RANDOM = "random"
_NAN, _INF = float("nan"), float("inf")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A batch with its settings. look: what to see there. rows: logits, one list a token; none for the random batch.

    mask: which tokens are real, all where empty. bias: the selection bias at the start, zero where empty.
    """

    label: str
    look: str
    rows: Any = ()
    mask: tuple[int, ...] = ()
    bias: tuple[float, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """Its settings; those it does not name are the defaults."""
        return Settings(**self.options)

    def batch(self, settings: Settings) -> Batch:
        """Its batch; the random one is drawn as the settings say."""
        if not len(self.rows):
            return random_batch(settings.seed, settings.tokens, settings.experts, settings.skew)
        return Batch.of(self.rows, self.mask or None)

    def state(self, num_experts: int) -> BalancerState:
        """The balancer's state at the start."""
        return BalancerState.fresh(num_experts, self.bias if len(self.bias) == num_experts else None)


def _logit(score: float) -> float:
    return float(np.log(score / (1 - score)))


PRESETS: dict[str, Preset] = {
    "collapse": Preset(
        label="Collapse",
        look="Expert 2 is ahead in six of eight rows. The quantile balancer finds, in one step, the bias that evens it "
        "out: press *Apply the update*.",
        rows=[
            [0.4, 0.1, 2.0, 0.3],
            [0.2, 0.9, 1.8, 0.1],
            [0.1, 0.3, 1.5, 1.2],
            [1.1, 0.2, 1.6, 0.4],
            [0.3, 1.0, 1.4, 0.6],
            [0.5, 0.4, 1.9, 1.0],
            [1.7, 0.3, 0.9, 0.2],
            [0.2, 1.6, 0.8, 0.5],
        ],
        options={"balancer": "quantile"},
    ),
    "balanced": Preset(
        label="Balanced",
        look="Each expert leads in two rows. Max violation is 0, the aux loss is near 1, and a sign update moves "
        "nothing.",
        rows=[[2.0 if expert == token % 4 else 0.0 for expert in range(4)] for token in range(8)],
        options={"balancer": "sign-bias"},
    ),
    "tie": Preset(
        label="Ties",
        look="Equal scores go to the expert with the lowest number, always, so that a step can be repeated. A bias of "
        "0.001 on a later expert is enough to win the tie.",
        rows=[[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 2.0], [1.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.0, 0.5]],
        options={"top_k": 2, "balancer": "sign-bias"},
    ),
    "groups": Preset(
        label="Groups of experts",
        look="Experts stand in four groups of two, and a token may use its best two groups only. The other cells are "
        "out, however high their score.",
        rows=[
            [1.2, -0.3, 0.8, 0.9, -1.0, 0.2, 0.1, 0.4],
            [0.3, 0.6, -0.5, 1.4, 0.7, 0.8, -0.2, 0.0],
            [1.5, 1.1, 0.2, -0.6, 0.9, -0.4, 0.3, 0.5],
            [0.8, 0.1, 1.3, 0.6, -0.7, 1.0, 0.2, -0.1],
        ],
        options={
            "router": "sigmoid",
            "top_k": 2,
            "num_groups": 4,
            "top_groups": 2,
            "balancer": "sign-bias",
            "scaling": 2.5,
        },
    ),
    "padding": Preset(
        label="Padding",
        look="Tokens 2 to 5 are padding: they take no expert, and neither load nor aux loss sees them. Counted by "
        "mistake, the loads would be 5 and 1, and the aux loss 1.34.",
        rows=[[2, 0], [0, 2], [2, 0], [2, 0], [2, 0], [2, 0]],
        mask=(1, 1, 0, 0, 0, 0),
        options={"balancer": "aux"},
    ),
    "six-of-eight": Preset(
        label="Aux loss, by hand",
        look="Six tokens are sure of expert 0, two of expert 1. The aux loss is 2.396 times what even use would give; "
        "1.416 would mean that the softmax was applied twice.",
        rows=[[4, 0, 0, 0]] * 6 + [[0, 4, 0, 0]] * 2,
        options={"balancer": "aux"},
    ),
    "bias-chooses": Preset(
        label="Bias against score",
        look="A bias of 0.3 lifts expert 2 to first place, yet its weight comes from its own score: 0.4 / (0.4 + 0.6).",
        rows=[[_logit(0.6), 0.0, _logit(0.4)]],
        bias=(0.0, 0.0, 0.3),
        options={"router": "sigmoid", "top_k": 2},
    ),
    "full": Preset(
        label="A full expert",
        look="Four tokens want expert 0, which takes two. The later two are dropped: they pass the layer unchanged, "
        "but the load still counts them, so that the collapse stays in sight.",
        rows=[[2.0 if expert == wanted else 0.0 for expert in range(3)] for wanted in (0, 0, 1, 0, 0, 2)],
        options={"capacity_factor": 1.0},
    ),
    "broken": Preset(
        label="Invalid rows",
        look="Token 1 is NaN throughout, token 3 in one place, token 5 has no finite logit. They get no expert and "
        "are counted apart; the other rows are as they would be without them.",
        rows=[
            [0.5, 1.5, 0.2, -0.3, 0.8, 0.1, -0.9, 0.4],
            [_NAN] * 8,
            [1.1, 0.0, 0.7, 0.3, -0.2, 0.9, 0.6, -0.5],
            [0.3, _NAN, 0.4, 0.2, 0.1, 0.0, 0.5, 0.6],
            [-0.4, 0.2, 1.3, 0.0, 0.5, 0.3, 0.9, 0.1],
            [-_INF] * 8,
            [0.7, 0.6, 0.1, 1.2, 0.0, -0.3, 0.2, 0.5],
        ],
        options={"top_k": 2, "balancer": "z"},
    ),
    "zero-router": Preset(
        label="Zero router, 8",
        look="All 1,000 rows are ties, and ties go to the lowest numbers: experts 0 and 1 take everything. That is a "
        "true collapse, and shows as one. The aux loss reads 1 all the same, as no probability leans anywhere.",
        rows=np.zeros((1000, 8)),
        options={"top_k": 2, "balancer": "sign-bias"},
    ),
    "zero-router-64": Preset(
        label="Zero router, 64",
        look="The same with top-8 of 64: experts 0 to 7 take everything, the other 56 nothing.",
        rows=np.zeros((1000, 64)),
        options={"top_k": 8, "balancer": "sign-bias"},
    ),
    RANDOM: Preset(
        label="Random batch",
        look="Drawn from the seed. A larger skew makes some experts popular with all tokens.",
        options={"tokens": 8, "experts": 4, "top_k": 2, "balancer": "quantile"},
    ),
}
DEFAULT = "collapse"
