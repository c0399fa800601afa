"""Every sentence of the diagnosis against runs whose truth is planted; balanced runs raise no alarm."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from diagnosed import alarms, file_loads, found
from in_process import routescope
from planted import Collapse, Planted, write_planted, write_rows

from moe_core import metrics
from recorder.diagnosis import RULES, diagnose, rules
from recorder.reader import Run
from recorder.writer import RunWriter

ROOT = Path(__file__).parents[2]

WINDOW = rules.WINDOW_STEPS


# ------------------------------------------------------------------------------------------------- balanced runs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("num_experts", "top_k", "tokens", "steps"),
    [(16, 1, 1024, 80), (16, 2, 32, 300), (64, 8, 16, 260), (8, 2, 4, 300), (256, 8, 512, 60), (4, 3, 64, 60)],
)
def test_balanced_runs_raise_no_alarm_and_are_told_as_balanced(tmp_path, num_experts, top_k, tokens, steps, seed):
    truth = Planted(num_experts=num_experts, top_k=top_k, tokens=tokens, steps=steps, seed=seed)
    run = write_planted(tmp_path / "run", truth)
    findings = diagnose(Run(run))
    window = max(WINDOW, -(-rules.WINDOW_ASSIGNMENTS * num_experts // (tokens * top_k)))
    expected = "balanced" if steps >= 2 * window else "too_short"
    assert {finding.rule for finding in findings} == {expected}, [finding.text for finding in findings]
    if expected == "balanced":
        assert [finding.layer for finding in findings] == [1, 3]
        assert all(finding.step == 0 for finding in findings)


@pytest.mark.parametrize(
    ("experts", "tokens"),
    [
        pytest.param(16, [1024] * 100 + [4] * 20, id="the-last-20-steps-of-4-tokens"),
        pytest.param(16, [1024] * 100 + [1] * 50, id="the-last-50-steps-of-1-token"),
        pytest.param(160, [2048] * 100 + [1] * 45, id="fewer-tokens-than-experts"),
        pytest.param(16, [1024] * 100 + [2] * 45 + [1024] * 100, id="in-between"),
    ],
)
def test_steps_of_few_tokens_in_a_balanced_run_are_no_alarm(tmp_path, experts, tokens):
    """Batches that run out, a prompt and then single tokens: what few tokens leave out is chance."""
    rng = np.random.default_rng(0)
    layer = {"index": 2, "kind": "moe", "router": 0, "num_experts": experts, "top_k": 1}
    with RunWriter(tmp_path / "run", manifest={"model": {"layers": [layer]}}, flush_seconds=1e9) as writer:
        for step, many in enumerate(tokens):
            load = np.bincount(rng.integers(0, experts, many), minlength=experts)
            writer.log_layer_stats(step, layer=2, router=0, tokens=many, load=load, gate_mass=None, mean_prob=None)
    findings = diagnose(Run(tmp_path / "run"))
    assert [(one.rule, one.step) for one in findings] in ([("balanced", 0)], [("too_short", None)])


def test_a_run_with_every_expert_chosen_can_not_collapse(tmp_path):
    run = write_planted(tmp_path / "run", Planted(num_experts=4, top_k=4, tokens=64, steps=50))
    assert [finding.rule for finding in diagnose(Run(run))] == ["balanced", "balanced"]


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_run_too_short_says_so_and_nothing_else(tmp_path, tokens):
    run = write_planted(tmp_path / "run", Planted(num_experts=64, top_k=1, tokens=tokens, steps=60))
    (finding,) = diagnose(Run(run))
    needed = 2 * 100 * 64 // tokens
    assert finding.rule == "too_short"
    assert finding.text == (
        f"All MoE layers cannot be judged yet: {needed:,} steps with tokens are needed, 60 were recorded"
    )


@pytest.mark.parametrize("name", ["aux-loss", "sign-bias", "quantile", "top2-shared"])
def test_the_balanced_sample_runs_raise_no_alarm(name):
    assert alarms(ROOT / "sample_runs" / name) == []


def test_uneven_is_neither(tmp_path):
    # one expert gets three times its share: max_violation about 2, nearly all experts in use
    run = write_planted(tmp_path / "run", Planted(top_k=1, collapse={1: Collapse(step=0, experts=(5,), share=0.19)}))
    (finding,) = found(run, "uneven")
    load_E = file_loads(run, 1)[-WINDOW:].sum(axis=0)
    assert finding.layer == 1
    assert finding.value == pytest.approx(load_E.max() / load_E.mean() - 1)
    times = f"its busiest expert gets {load_E.max() / load_E.mean():.2g} times the uniform share"
    assert finding.text == f"Layer 1 is uneven but not collapsed: over the last 20 steps (100 to 119) {times}"
    assert alarms(run) == []


def test_a_layer_that_became_even_just_now_is_not_called_uneven(tmp_path):
    run = write_rows(tmp_path / "run", 100, lambda at: {"load": np.array([400, 0, 0, 0])} if at < 70 else {})
    assert [one.text for one in diagnose(Run(run))] == [
        "Layer 2 collapsed at its first step (0) and recovered at step 70",
        "Layer 2 is even by now, but has not been for 40 steps: "
        "over the last 20 steps (80 to 99) its busiest expert gets 1 times the uniform share",
    ]


# ------------------------------------------------------------------------------------------------- dead experts


@pytest.mark.parametrize("seed", range(3))
def test_dead_experts_are_found_with_their_step(tmp_path, seed):
    truth = Planted(steps=120, seed=seed, dead={3: (60, (1, 5, 9)), 1: (0, (7,))})
    run = write_planted(tmp_path / "run", truth)
    texts = {finding.layer: finding.text for finding in found(run, "dead_experts")}
    load_SE = file_loads(run, 3)
    last = max(int(np.flatnonzero(load_SE[:, expert])[-1]) for expert in (1, 5, 9))
    assert last == 59  # 512 tokens a step: all three were used up to then
    assert texts == {
        1: "Expert 7 of layer 1 has never received an assignment in 120 steps",
        3: "Experts 1, 5 and 9 of layer 3 have received nothing in the last 60 steps (60 to 119)",
    }


def test_an_expert_that_missed_a_few_steps_is_not_dead(tmp_path):
    run = write_planted(tmp_path / "run", Planted(steps=120, dead={3: (120 - WINDOW + 1, (1,))}))
    assert found(run, "dead_experts") == []


# ------------------------------------------------------------------------------------------- what else goes wrong


def test_a_loss_that_is_not_finite(tmp_path):
    run = write_planted(tmp_path / "run", Planted(steps=50), loss=lambda step: float("nan") if step >= 33 else 2.0)
    (finding,) = alarms(run)
    assert (finding.rule, finding.step, finding.text) == (
        "non_finite_loss",
        33,
        "The loss is not finite from step 33 on",
    )
    run = write_planted(tmp_path / "two", Planted(steps=50), ce_loss=lambda step: np.inf if step in (7, 9) else 2.0)
    assert [one.text for one in alarms(run)] == ["The loss is not finite in 2 of 50 steps, the first step 7"]


def test_losses_that_were_not_recorded_are_no_alarm(tmp_path):
    assert alarms(write_planted(tmp_path / "run", Planted(steps=50), loss=None, ce_loss=None)) == []


def test_rows_that_could_not_be_routed(tmp_path):
    run = write_rows(tmp_path / "run", 50, lambda step: {"invalid": 3 if step in (20, 30) else 0})
    (finding,) = alarms(run)
    assert finding.text == "6 tokens of layer 2 could not be routed, in 2 of 50 steps, the first of them step 20"
    assert (finding.step, finding.layer, finding.value) == (20, 2, 6)


def test_steps_without_a_routed_token(tmp_path):
    run = write_rows(tmp_path / "run", 60, lambda step: {"load": np.zeros(4, int), "tokens": 0} if step == 31 else {})
    (finding,) = alarms(run)
    assert finding.text == "No token of layer 2 was routed in 1 of 60 steps, the first of them step 31"
    assert [one.text for one in found(run, "balanced")] == [
        "Layer 2 is balanced from its first step on: max_violation of the last 20 steps (40 to 59) is 0"
    ]


@pytest.mark.parametrize(("dropped", "told"), [(10, True), (9, False)])
def test_dropped_assignments(tmp_path, dropped, told):
    run = write_rows(tmp_path / "run", 50, lambda step: {"dropped": np.full(4, dropped)})
    texts = [one.text for one in alarms(run)]
    expected = "Layer 2 dropped 10% of the assignments of the last 20 steps (30 to 49) for lack of capacity"
    assert texts == ([expected] if told else [])


@pytest.mark.parametrize(("a_step", "told"), [(0.02, True), (0.005, False)])
def test_biases_that_run_away(tmp_path, a_step, told):
    bias = np.array([-0.5, 0.0, 0.0, 0.5])
    run = write_rows(tmp_path / "run", 101, lambda step: {"expert_bias": bias * a_step * step})
    texts = [one.text for one in alarms(run)]
    # 0.02 a step: 1.02 at step 51, 2 at step 100
    expected = "The biases of layer 2 run away: they span 2, more than 1 since step 51, and still spread"
    assert texts == ([expected] if told else [])


def test_a_wide_bias_that_has_settled_is_no_runaway(tmp_path):
    bias = np.array([-0.5, 0.0, 0.0, 0.5])
    assert alarms(write_rows(tmp_path / "run", 100, lambda step: {"expert_bias": bias * min(3, step)})) == []


def test_a_resumed_run_says_so(tmp_path):
    run = write_planted(tmp_path / "run", Planted(steps=60))
    with RunWriter(run, resume=True) as writer:
        for step in range(50, 60):
            writer.log_step(step, tokens=512, loss=1.0)
    assert [(one.step, one.text) for one in found(run, "resumed")] == [(50, "The run was resumed at step 50")]


def test_a_damaged_part_and_a_fault_of_the_recorder(tmp_path):
    run = write_planted(tmp_path / "run", Planted(steps=50))
    (run / "layer_stats" / "part-r00000-000099.parquet").write_bytes(b"PAR1")
    with RunWriter(run, resume=True) as writer:
        writer.log_event(40, "recorder_error", "no space left")
    texts = {one.rule: one.text for one in alarms(run)}
    assert texts["unreadable"] == "1 part file cannot be read: the rows there are missing from all numbers"
    assert texts["recorder_error"] == "The recorder noted a fault of its own, at step 40 first: no space left"


def test_a_run_that_failed(tmp_path):
    writer = RunWriter(tmp_path / "run")
    writer.log_step(3, tokens=1)
    writer.finalize("failed", "RuntimeError: boom")
    assert [(one.rule, one.text) for one in diagnose(Run(tmp_path / "run"))] == [
        ("failed", "The run failed: RuntimeError: boom"),
        ("no_load", "No load was recorded, so nothing can be said of its balance"),
    ]


def test_steps_of_fewer_ranks(tmp_path):
    run = tmp_path / "run"
    load = np.array([50, 50])
    layer = {"index": 0, "kind": "moe", "router": 0, "num_experts": 2, "top_k": 1}
    writers = [RunWriter(run, manifest={"model": {"layers": [layer]}}, rank=0, launch="a")]
    writers.append(RunWriter(run, rank=1, launch="a"))
    for rank, writer in enumerate(writers):
        for step in range(60 if rank == 0 else 50):
            writer.log_layer_stats(
                step, layer=0, router=0, tokens=100, load=load, gate_mass=load / 1, mean_prob=load / 100
            )
            writer.log_step(step, tokens=100, loss=1.0)
    for writer in reversed(writers):
        writer.finalize("finished")
    (finding,) = found(run, "incomplete_ranks")
    assert finding.text.startswith("10 steps between 50 and 59 have rows of fewer ranks than the others")


# -------------------------------------------------------------------------------------------------- other phases


@pytest.mark.parametrize("phase", ["generate", "eval", "probe"])
def test_a_run_without_training_is_judged_on_what_it_has(tmp_path, phase):
    truth = Planted(phase=phase, collapse={3: Collapse(step=42, experts=(1, 2))})
    run = write_planted(tmp_path / "run", truth)
    assert Run(run).phases == [phase]
    assert Run(run).main_phase == phase
    (finding,) = found(run, "collapsed")
    assert finding.step == 42


def test_training_comes_first(tmp_path):
    run = write_planted(tmp_path / "run", Planted(moves=(0.2, 0.1)))
    assert Run(run).phases == ["train", "probe"]
    assert Run(run).main_phase == "train"


def test_two_routers_of_a_layer_are_told_apart(tmp_path):
    layers = [{"index": 1, "kind": "moe", "router": router, "num_experts": 4, "top_k": 1} for router in (0, 1)]
    with RunWriter(tmp_path / "run", manifest={"model": {"layers": layers}}) as writer:
        for step in range(50):
            for router, load in ((0, [100] * 4), (1, [400, 0, 0, 0])):
                values = {"tokens": 400, "load": np.array(load), "gate_mass": None, "mean_prob": None}
                writer.log_layer_stats(step, layer=1, router=router, **values)
    assert [(one.router, one.rule) for one in diagnose(Run(tmp_path / "run"))] == [
        (1, "collapsed"),
        (1, "dead_experts"),
        (0, "balanced"),
    ]
    assert found(tmp_path / "run", "collapsed")[0].text.startswith("Layer 1 (router 1) collapsed")


# ------------------------------------------------------------------------------------------- the command, the docs


def test_the_command_prints_them_and_has_them_in_its_json(tmp_path):
    run = write_planted(tmp_path / "run", Planted(phase="generate", collapse={3: Collapse(step=42, experts=(1, 2))}))
    text = routescope("summary", run).stdout
    assert "steps of phase generate" in text
    (finding,) = found(run, "collapsed")
    assert f"alarm: {finding.text}. [collapsed]" in text
    report = json.loads(routescope("summary", run, "--json").stdout)
    assert report["phase"] == "generate"
    assert report["diagnosis"] == [one.as_dict() for one in diagnose(Run(run))]
    told = next(one for one in report["diagnosis"] if one["rule"] == "collapsed")
    assert told["threshold"] == rules.COLLAPSED_BELOW > told["value"]
    assert (told["page"], told["layer"], told["step"]) == ("replay", 3, finding.step)


def test_the_docs_list_every_rule_with_its_level_and_threshold():
    text = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    told = {row[0].strip("`"): row[1:] for row in rows}
    assert list(told) == list(RULES)
    for name, rule in RULES.items():
        level, when, page = told[name]
        assert (level, page) == (rule.level, rule.page.capitalize()), name
        assert when == rule.when, name


def test_summaries_agree_with_the_window_metrics(tmp_path):
    """The value of a sentence is the metric of the loads in the files."""
    run = write_planted(tmp_path / "run", Planted(steps=60))
    for finding in found(run, "balanced"):
        load_E = file_loads(run, finding.layer)[-WINDOW:].sum(axis=0)
        assert finding.value == pytest.approx(float(metrics.max_violation(load_E)))
        assert pd.notna(finding.value)
