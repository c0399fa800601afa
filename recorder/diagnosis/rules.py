"""Every rule of the diagnosis: what must be measured for a sentence to be said, and where a reader can see it.

The thresholds stand here and nowhere else; docs/diagnosis.md lists them for readers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["alarm", "note", "good"]
Page = Literal["overview", "replay"]

#: A window is at least so many recorded steps that routed tokens ...
WINDOW_STEPS = 20
#: ... and so many assignments an expert at the uniform share: their sampling noise is then about a tenth.
WINDOW_ASSIGNMENTS = 100
#: So many assignments an expert tell a collapsed load from a full one: its step is looked for in as few as hold them.
ONSET_ASSIGNMENTS = 10
#: What is said of a layer must hold in two windows that share no step; a shorter run cannot be judged.
WINDOWS_TO_JUDGE = 2
#: Effective share (see `balance.effective_share`) below which a layer collapses, and above which it has recovered.
COLLAPSED_BELOW, RECOVERED_ABOVE = 0.5, 0.75
#: A collapsed layer is told by the fewest experts that together take this share of its assignments.
MOST_OF_THE_LOAD = 0.9
#: max_violation of a window's loads below which a layer is balanced.
BALANCED_BELOW = 0.5
#: Share of the assignments that capacity dropped in the last window.
DROPPED_FROM = 0.1
#: Greatest less smallest selection bias: more than softmax and sigmoid scores can differ, so that it decides alone.
BIAS_RANGE_ABOVE = 1.0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When a sentence is said.

    level      alarm: something went wrong; note: worth knowing; good
    when       what must hold, in words, the threshold in it
    threshold  the number that is compared with, None where any occurrence counts
    page       the page that shows it
    """

    level: Level
    when: str
    threshold: float | None
    page: Page


_WINDOW = f"a window ({WINDOW_STEPS} steps, more where those hold under {WINDOW_ASSIGNMENTS} assignments an expert)"

RULES: dict[str, Rule] = {
    "non_finite_loss": Rule(
        level="alarm", when="a recorded loss or cross-entropy is NaN or infinite", threshold=None, page="overview"
    ),
    "failed": Rule(level="alarm", when="the run says that it failed", threshold=None, page="overview"),
    "recorder_error": Rule(
        level="alarm",
        when="the recorder noted a fault of its own (event recorder_error)",
        threshold=None,
        page="overview",
    ),
    "unreadable": Rule(level="alarm", when="a part file cannot be read", threshold=None, page="overview"),
    "collapsed": Rule(
        level="alarm",
        when=f"the effective share (exp(H(f)) - k) / (E - k) of {_WINDOW} falls below {COLLAPSED_BELOW} and is not "
        f"above {RECOVERED_ABOVE} again until the end; its step is where, within that window, the single steps pass "
        f"{COLLAPSED_BELOW}",
        threshold=COLLAPSED_BELOW,
        page="replay",
    ),
    "dead_experts": Rule(
        level="alarm",
        when=f"an expert got no assignment in the last {_WINDOW[2:]}, or longer",
        threshold=0,
        page="replay",
    ),
    "unrouted": Rule(level="alarm", when="a recorded step routed no token of a layer", threshold=0, page="replay"),
    "invalid_rows": Rule(
        level="alarm", when="tokens could not be routed, as their logits were not finite", threshold=0, page="replay"
    ),
    "dropped": Rule(
        level="alarm",
        when=f"capacity dropped at least {DROPPED_FROM:.0%} of the assignments of the last {_WINDOW[2:]}",
        threshold=DROPPED_FROM,
        page="replay",
    ),
    "bias_runaway": Rule(
        level="alarm",
        when=f"the selection biases of softmax or sigmoid scores span more than {BIAS_RANGE_ABOVE:g} and still spread: "
        "more than halfway through the run, and more than a window before the end",
        threshold=BIAS_RANGE_ABOVE,
        page="replay",
    ),
    "was_collapsed": Rule(
        level="note",
        when=f"a layer was collapsed for {WINDOWS_TO_JUDGE} windows or more and has recovered",
        threshold=COLLAPSED_BELOW,
        page="replay",
    ),
    "uneven": Rule(
        level="note",
        when=f"a layer is not collapsed, and max_violation of the loads of {_WINDOW} is not below {BALANCED_BELOW} "
        f"throughout the last {WINDOWS_TO_JUDGE} windows",
        threshold=BALANCED_BELOW,
        page="replay",
    ),
    "too_short": Rule(
        level="note",
        when=f"fewer steps with tokens than {WINDOWS_TO_JUDGE} windows, each {_WINDOW[2:]}",
        threshold=WINDOWS_TO_JUDGE,
        page="overview",
    ),
    "no_load": Rule(level="note", when="no load of a MoE layer was recorded", threshold=None, page="overview"),
    "resumed": Rule(level="note", when="the run was resumed", threshold=None, page="overview"),
    "incomplete_ranks": Rule(
        level="note", when="steps with rows of fewer ranks than their neighbours", threshold=None, page="overview"
    ),
    "unfinished": Rule(level="note", when="the run ended without being closed", threshold=None, page="overview"),
    "balanced": Rule(
        level="good",
        when=f"max_violation of the loads of {_WINDOW} is below {BALANCED_BELOW} from a step to the end, "
        f"{WINDOWS_TO_JUDGE} windows or more",
        threshold=BALANCED_BELOW,
        page="replay",
    ),
}
LEVELS: tuple[Level, ...] = ("alarm", "note", "good")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence about a run, and its evidence.

    rule      a key of RULES
    text      the sentence, without its full stop
    layer     index in the whole model, None where it is about the run
    router    the router's number where its layer has several, else None
    step      where to look, a recorded step: the onset of what is said; None where there is none
    within    how many recorded steps the true one may be away, 0 where it is exact
    value     what was measured, in the unit of the rule's threshold
    evidence  the numbers of the sentence, ready for JSON
    """

    rule: str
    text: str
    layer: int | None = None
    router: int | None = None
    step: int | None = None
    within: int = 0
    value: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> Level:
        return RULES[self.rule].level

    @property
    def page(self) -> Page:
        return RULES[self.rule].page

    def as_dict(self) -> dict[str, Any]:
        """For JSON: level, text, rule, when, threshold, value, page, layer, router, step, within, evidence."""
        rule = RULES[self.rule]
        return {
            "level": rule.level,
            "text": self.text,
            "rule": self.rule,
            "when": rule.when,
            "threshold": rule.threshold,
            "value": self.value,
            "page": rule.page,
            "layer": self.layer,
            "router": self.router,
            "step": self.step,
            "within": self.within,
            "evidence": self.evidence,
        }
