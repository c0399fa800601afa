"""When a layer collapsed and recovered: planted steps, odd steps, few tokens, and the sample runs, step by step."""

import re
from pathlib import Path

import numpy as np
import pytest
from diagnosed import alarms, file_loads, file_shares, found
from planted import Collapse, Planted, write_planted, write_rows

from recorder.diagnosis import balance, rules
from recorder.writer import RunWriter

ROOT = Path(__file__).parents[2]
WINDOW = rules.WINDOW_STEPS


def window_sums(load_SE, rows):
    return [load_SE[first : first + rows].sum(axis=0) for first in range(len(load_SE) - rows + 1)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_experts", "top_k", "tokens", "step", "experts", "share"),
    [
        (16, 1, 512, 42, (3, 9), 0.91),
        (16, 2, 512, 60, (0, 5, 7), 0.95),
        (64, 8, 256, 77, tuple(range(40, 50)), 0.97),
        (8, 2, 64, 50, (1, 2), 0.99),
        (4, 2, 256, 25, (0, 3), 0.99),
    ],
)
def test_a_planted_collapse_is_found(tmp_path, num_experts, top_k, tokens, step, experts, share, seed):
    planted = Collapse(step=step, experts=experts, share=share)
    truth = Planted(num_experts=num_experts, top_k=top_k, tokens=tokens, steps=140, seed=seed, collapse={3: planted})
    run = write_planted(tmp_path / "run", truth)
    (finding,) = found(run, "collapsed")
    assert finding.layer == 3
    assert (finding.step, finding.within, finding.evidence["onset"]) == (step, 0, [step - 1, step])
    load_E = file_loads(run, 3)[-50:].sum(axis=0)
    number = int(re.search(r"(\d+) of \d+ experts", finding.text)[1])
    assert set(finding.evidence["busiest"]) == set(np.argsort(-load_E)[:number].tolist())
    assert set(np.argsort(-load_E)[: len(experts)].tolist()) == set(experts)
    assert finding.value < rules.COLLAPSED_BELOW
    assert finding.text.startswith(
        f"Layer 3 collapsed at step {step}; over the last 50 steps (90 to 139) {number} of {num_experts} experts take"
    )
    # the other layer stays balanced, the collapsed one is not called balanced
    assert [one.layer for one in found(run, "balanced")] == [1]


@pytest.mark.parametrize("seed", range(3))
def test_a_collapse_that_is_over_is_a_note(tmp_path, seed):
    planted = Collapse(step=50, experts=(2,), until=110)
    run = write_planted(tmp_path / "run", Planted(top_k=1, steps=200, seed=seed, collapse={1: planted}))
    assert alarms(run) == []
    (finding,) = found(run, "was_collapsed")
    assert (finding.layer, finding.level) == (1, "note")
    assert (finding.step, finding.within, finding.evidence["recovered_step"]) == (50, 0, 110)
    assert finding.text == "Layer 1 collapsed at step 50 and recovered at step 110"
    balanced = {one.layer: one.step for one in found(run, "balanced")}
    assert balanced[3] == 0
    assert abs(balanced[1] - 110) <= WINDOW


def test_a_collapse_of_a_few_steps_is_noise(tmp_path):
    planted = Collapse(step=50, experts=(2,), until=60)
    run = write_planted(tmp_path / "run", Planted(top_k=1, steps=120, collapse={1: planted}))
    assert found(run, "collapsed") == []
    assert found(run, "was_collapsed") == []


def test_collapsed_from_the_start(tmp_path):
    run = write_planted(tmp_path / "run", Planted(collapse={1: Collapse(step=0, experts=(4, 6))}))
    (finding,) = found(run, "collapsed")
    assert (finding.step, finding.within) == (0, 0)
    assert finding.text.startswith("Layer 1 collapsed at its first step (0); over the last 50 steps (70 to 119) ")


@pytest.mark.parametrize("seed", range(3))
def test_the_layer_that_collapsed_first_comes_first(tmp_path, seed):
    """Both within the first window, by less than a window: in the order of the steps, not of the layers."""
    truth = Planted(seed=seed, collapse={1: Collapse(step=9, experts=(3,)), 3: Collapse(step=4, experts=(5, 6))})
    run = write_planted(tmp_path / "run", truth)
    assert [(one.layer, one.step, one.within) for one in found(run, "collapsed")] == [(3, 4, 0), (1, 9, 0)]


EVEN, ONE = [100, 100, 100, 100], [400, 0, 0, 0]


@pytest.mark.parametrize(
    ("odd", "step"), [((30,), 40), ((38,), 40), ((30, 31), 40), ((42,), 40), ((45, 60), 40), ((0, 39), 39)]
)
def test_single_odd_steps_do_not_move_the_onset(tmp_path, odd, step):
    """From step 40 on all goes to one expert; in the odd steps it is the other way round."""
    run = write_rows(tmp_path / "run", 100, lambda at: {"load": np.array(ONE if (at >= 40) != (at in odd) else EVEN)})
    (finding,) = found(run, "collapsed")
    assert (finding.step, finding.within) == (step, 0)


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_few_tokens_give_a_bracket_that_holds_the_onset(tmp_path, seed):
    """16 experts, 32 assignments a step: 5 steps hold 10 an expert."""
    truth = Planted(top_k=1, tokens=32, steps=240, seed=seed, collapse={3: Collapse(step=130, experts=(2, 11))})
    (finding,) = found(write_planted(tmp_path / "run", truth), "collapsed")
    before, after = finding.evidence["onset"]
    assert before < 130 <= after == before + 5
    assert before < finding.step <= after
    assert abs(finding.step - 130) <= finding.within < 5
    assert finding.text.startswith(
        f"Layer 3 collapsed between steps {before} and {after}; over the last 50 steps (190 "
    )


def test_steps_between_two_that_were_recorded_give_a_bracket(tmp_path):
    layer = {"index": 2, "kind": "moe", "router": 0, "num_experts": 4, "top_k": 1}
    with RunWriter(tmp_path / "run", manifest={"model": {"layers": [layer]}}, flush_seconds=1e9) as writer:
        for step in range(0, 600, 10):
            load = np.array(ONE if step >= 200 else EVEN)
            writer.log_layer_stats(step, layer=2, router=0, tokens=400, load=load, gate_mass=None, mean_prob=None)
    (finding,) = found(tmp_path / "run", "collapsed")
    assert (finding.step, finding.evidence["onset"]) == (200, [190, 200])
    assert finding.text == (
        "Layer 2 collapsed between steps 190 and 200; over the last 40 steps (200 to 590) "
        "1 of 4 experts takes 100% of the assignments"
    )


def test_experts_that_took_turns_before_the_collapse_give_a_window(tmp_path):
    """Each step goes to one expert, until step 60 to another one each time: only windows show the collapse."""
    run = write_rows(tmp_path / "run", 140, lambda at: {"load": np.roll(ONE, at if at < 60 else 0)})
    (finding,) = found(run, "collapsed")
    before, after = finding.evidence["onset"]
    assert before < 60 <= after == before + WINDOW
    assert finding.step == 60
    assert f"between steps {before} and {after};" in finding.text


# ------------------------------------------------------------------------------------------------- the sample runs


def test_the_sample_run_without_a_balancer_is_told_as_collapsed_in_both_layers():
    run = ROOT / "sample_runs" / "none"
    collapsed = found(run, "collapsed")
    # layer 3 first: its single steps fall below 0.5 for good at step 5, those of layer 1 at step 8
    assert [(finding.layer, finding.step, finding.within) for finding in collapsed] == [(3, 5, 0), (1, 8, 0)]
    for finding in collapsed:
        load_SE = file_loads(run, finding.layer)
        share_S = file_shares(load_SE, top_k=1)
        assert share_S[finding.step - 1] >= rules.COLLAPSED_BELOW > share_S[finding.step : 2 * WINDOW].max()
        load_E = load_SE[-50:].sum(axis=0)
        number, share = finding.evidence["experts"], finding.evidence["share"]
        top = np.sort(load_E)[::-1] / load_E.sum()
        assert share == pytest.approx(top[:number].sum())
        assert top[: number - 1].sum() < rules.MOST_OF_THE_LOAD <= share
        assert (finding.evidence["first_step"], finding.evidence["last_step"]) == (350, 399)
        assert finding.value == pytest.approx(file_shares(load_E, top_k=1))
        assert finding.text == (
            f"Layer {finding.layer} collapsed at step {finding.step}; over the last 50 steps (350 to 399) "
            f"{number} of 16 experts take {share:.0%} of the assignments"
        )


def test_the_sample_run_that_recovers_is_told_with_the_steps_of_its_loads():
    run = ROOT / "sample_runs" / "sign-bias"
    told = found(run, "was_collapsed")
    assert [(one.layer, one.step) for one in told] == [(3, 6), (1, 10)]
    for finding in told:
        share_S = file_shares(file_loads(run, finding.layer), top_k=1)
        recovered = finding.evidence["recovered_step"]
        assert share_S[finding.step - 1] >= 0.5 > share_S[finding.step]
        assert share_S[finding.step : recovered].max() <= 0.75 < share_S[recovered]
        assert f"collapsed at step {finding.step} and recovered at step {recovered}" in finding.text
    for finding in found(run, "balanced"):
        load_SE = file_loads(run, finding.layer)
        violations = [load.max() / load.mean() - 1 for load in window_sums(load_SE, WINDOW)]
        assert max(violations[finding.step :]) < 0.5 <= violations[finding.step - 1]


# ------------------------------------------------------------------------------------------------- by hand


def test_effective_share_by_hand():
    load = np.array([[10, 10, 10, 10], [20, 20, 0, 0], [40, 0, 0, 0]])
    np.testing.assert_allclose(balance.effective_share(load, 1), [1, 1 / 3, 0], atol=1e-12)
    np.testing.assert_allclose(balance.effective_share(load[:2], 2), [1, 0], atol=1e-12)
    assert np.isnan(balance.effective_share(load, 4)).all()


def test_concentration_by_hand():
    assert balance.concentration(np.array([5, 90, 5])) == (1, 0.9)
    assert balance.concentration(np.array([10, 80, 5, 5])) == (2, 0.9)
    number, share = balance.concentration(np.array([25, 25, 25, 25]))
    assert (number, share) == (4, 1.0)
