"""The title of the page of runs: what those with and without a balancer have in common, in words."""

from collections.abc import Sequence
from typing import Any

from app import data
from app.words import count

WINDOW = data.ROW_WINDOW

RULE = (
    f"Judged are runs with at least {WINDOW} recorded training steps, over the last {WINDOW} of them; a run without "
    "any is judged by the phase it has, and named below the table. "
    "An expert is idle where it gets less than a tenth of the uniform share in that window, and busy where it does "
    "not; of a run with several MoE layers the worst one counts. A router z-loss alone is no balancer. "
    "A run has gone wrong, and is not judged, where in that window the loss is not finite, or tokens were not routed."
)


def headline(runs: Sequence[data.Listed], rows: Sequence[dict[str, Any]], *, of: int | None = None) -> str:
    """The answer in words: what the runs with and without a balancer have in common. Claims nothing of the others.

    runs, rows  the runs and their `data.row`, in the same order
    of          how many there are, where these are the ones that a filter leaves
    """
    pairs = [(run, row) for run, row in zip(runs, rows, strict=True) if is_judged(row)]
    total = count(len(runs), "run")
    if of is not None and of > len(runs):
        total = f"{len(runs):,} of {count(of, 'run')}"
    if not runs:
        return f"No run of {of:,} matches" if of else "Runs"
    wrong = sum(row.get("trouble") is not None for row in rows)
    if not pairs and wrong:
        other = ", none of the others long enough to judge the balance" if wrong < len(runs) else ""
        return f"{total}, {_gone_wrong(wrong)}{other}"
    if not pairs:
        return f"{total}, none long enough to judge the balance"
    without = [pair for pair in pairs if has_balancer(pair[1]) is False]
    with_one = [pair for pair in pairs if has_balancer(pair[1])]
    said = [_without(without)] if without else []
    said += [_with(with_one)] if with_one else []
    if not said:
        said = [_idle_among(pairs, "run", "runs")]
    said += [_gone_wrong(wrong)] if wrong else []
    judged = f", {len(pairs)} judged" if len(pairs) < len(runs) else ""
    return f"{total}{judged}: {'; '.join(said)}"


def is_judged(row: dict[str, Any]) -> bool:
    """Whether a run has recorded enough, and nothing that went wrong, to say which of its experts are idle."""
    return row["idle_experts"] is not None and row["num_steps"] >= WINDOW and row.get("trouble") is None


def _gone_wrong(runs: int) -> str:
    return f"{runs} {'has' if runs == 1 else 'have'} gone wrong (see below the table)"


def has_balancer(row: dict[str, Any]) -> bool | None:
    """None where the run does not say."""
    if not row["balancer"]:
        return None
    return bool({part.strip() for part in str(row["balancer"]).split("+")} - {"none", "z"})


def _without(pairs: Sequence[tuple[data.Listed, dict[str, Any]]]) -> str:
    run, row = max(pairs, key=lambda pair: pair[1]["idle_experts"])
    idle = row["idle_experts"]
    if not idle:
        return "without a balancer all experts are busy too" if len(pairs) == 1 else "no idle expert without a balancer"
    experts = _experts(run)
    of_all = f" of {experts}" if experts else ""
    up_to = "up to " if len(pairs) > 1 else ""
    return f"without a balancer a layer leaves {up_to}{idle}{of_all} experts idle"


def _with(pairs: Sequence[tuple[data.Listed, dict[str, Any]]]) -> str:
    with_idle = sum(row["idle_experts"] > 0 for _, row in pairs)
    if len(pairs) == 1:
        return "the run with a balancer " + ("has idle experts" if with_idle else "keeps all experts busy")
    if not with_idle:
        return "every run with a balancer keeps all experts busy"
    return _idle_among(pairs, "run with a balancer", "runs with a balancer")


def _idle_among(pairs: Sequence[tuple[data.Listed, dict[str, Any]]], one: str, many: str) -> str:
    with_idle = sum(row["idle_experts"] > 0 for _, row in pairs)
    if not with_idle:
        return "all experts are busy"
    return f"{with_idle} of {count(len(pairs), one, many)} {'has' if with_idle == 1 else 'have'} idle experts"


def _experts(run: data.Listed) -> int | None:
    """Experts of a MoE layer, where all of the run's have the same number."""
    layers = ((run.info.manifest or {}).get("model") or {}).get("layers") or []
    numbers = {layer.get("num_experts") for layer in layers if layer.get("kind", "moe") == "moe"}
    return numbers.pop() if len(numbers) == 1 else None
