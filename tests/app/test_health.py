"""What went wrong in a run is said first, and such a run is not praised.

Shape suffixes: S recorded steps, E experts.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from recorder.writer import RunWriter

Open = Callable[..., AppTest]
Write = Callable[..., Path]


def write(folder: Path, losses: list[float], tokens: list[int], invalid: list[int] | None = None) -> Path:
    """A run of one MoE layer of 2 experts; step s routes tokens[s] tokens, half of them to each expert."""
    layer = {"index": 0, "kind": "moe", "router": 0, "num_experts": 2, "top_k": 1}
    writer = RunWriter(folder / "ill", manifest={"model": {"layers": [layer]}, "config": {"balancer": "none"}})
    for step, (loss, routed) in enumerate(zip(losses, tokens, strict=True)):
        writer.log_step(step, tokens=8, loss=loss, ce_loss=loss)
        load = [routed // 2, routed - routed // 2]
        writer.log_layer_stats(
            step,
            layer=0,
            router=0,
            tokens=routed,
            load=load,
            gate_mass=load,
            mean_prob=[0.5, 0.5],
            invalid=0 if invalid is None else invalid[step],
        )
    writer.finalize()
    return writer.path


@pytest.mark.parametrize(
    ("losses", "tokens", "invalid", "title"),
    [
        (
            [3.0, 2.0, *[math.nan] * 10],
            [8, 8, *[0] * 10],
            None,
            "The loss is not finite from step 2 on; no token was routed in 10 of the last 12 steps",
        ),
        ([3.0, math.inf, 2.0, 1.0], [8] * 4, None, "The loss is not finite in 1 of the last 4 steps"),
        ([3.0] * 4, [8, 0, 8, 8], None, "No token was routed in 1 of the last 4 steps"),
        (
            [3.0] * 4,
            [8, 6, 6, 8],
            [0, 2, 2, 0],
            "Some tokens could not be routed in 2 of the last 4 steps. "
            "All experts are busy: max_violation 0 of at most 1",
        ),
        ([3.0] * 4, [8] * 4, None, "All experts are busy: max_violation 0 of at most 1"),
        # Long past: the window of 50 steps holds none of it.
        ([math.nan, *[3.0] * 60], [8] * 61, None, "All experts are busy: max_violation 0 of at most 1"),
    ],
    ids=["diverged", "one-loss", "one-step-without-tokens", "invalid-rows", "sound", "recovered"],
)
def test_the_title_of_the_overview_says_first_what_went_wrong(
    shown: Path, open_page: Open, losses: list[float], tokens: list[int], invalid: list[int] | None, title: str
) -> None:
    write(shown, losses, tokens, invalid)
    test = open_page("overview", run="ill")
    assert not test.exception
    assert test.main.title[0].value == title


def test_the_list_of_runs_does_not_count_a_diverged_run_as_healthy(
    shown: Path, open_page: Open, write_run: Write
) -> None:
    write(shown, [3.0, *[math.nan] * 59], [8] + [0] * 59)
    test = open_page("runs")
    assert not test.exception
    assert test.main.title[0].value == "1 run, 1 has gone wrong (see below the table)"
    assert any("not finite from step 1 on; no token was routed" in line.value for line in test.main.markdown)
    write_run(shown, "sound", range(60))
    title = open_page("runs").main.title[0].value
    balance, wrong = "without a balancer all experts are busy too", "1 has gone wrong (see below the table)"
    assert title == f"2 runs, 1 judged: {balance}; {wrong}"


def test_compare_names_the_diverged_run(shown: Path, open_page: Open, write_run: Write) -> None:
    write(shown, [3.0, *[math.nan] * 59], [8] + [0] * 59)
    write_run(shown, "sound", range(60))
    test = open_page("compare", runs=["ill", "sound"])
    assert not test.exception
    [warning] = test.main.warning
    assert warning.value.startswith("**ill**: The loss is not finite from step 1 on")
