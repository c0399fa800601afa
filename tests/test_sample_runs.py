"""The sample runs tell their lesson: figures of `routescope summary --json` over the last 50 steps."""

import json
from pathlib import Path

import pytest
from in_process import routescope

SAMPLES = Path(__file__).parent.parent / "sample_runs"
RUN_IDS = ("none", "aux-loss", "sign-bias", "quantile", "top2-shared")
BALANCED = ("aux-loss", "sign-bias", "quantile")


@pytest.fixture(scope="module")
def summaries():
    found = {}
    for run_id in RUN_IDS:
        found[run_id] = json.loads(routescope("summary", SAMPLES / run_id, "--json").stdout)
        layers = ", ".join(
            f"layer {layer['layer']}: max_violation_window {layer['max_violation_window']:.2f}, "
            f"idle {layer['idle_experts']} of {layer['num_experts']}"
            for layer in found[run_id]["layers"]
        )
        print(f"{run_id}: ce_loss {found[run_id]['losses']['ce_loss']:.3f}; {layers}")
    return found


def test_all_are_finished_and_cover_the_last_50_steps(summaries):
    for summary in summaries.values():
        assert (summary["status"], summary["last_step"], summary["window"]) == ("finished", 399, 50)


def test_without_a_balancer_the_load_is_at_least_five_times_as_uneven(summaries):
    for none, quantile in zip(summaries["none"]["layers"], summaries["quantile"]["layers"], strict=True):
        assert none["max_violation_window"] >= 5 * quantile["max_violation_window"]


def test_without_a_balancer_experts_sit_idle_in_every_layer(summaries):
    assert all(layer["idle_experts"] >= 3 for layer in summaries["none"]["layers"])


@pytest.mark.parametrize("run_id", [*BALANCED, "top2-shared"])
def test_balanced_runs_leave_nobody_idle(summaries, run_id):
    assert [layer["idle_experts"] for layer in summaries[run_id]["layers"]] == [0, 0]


def test_balance_costs_no_cross_entropy(summaries):
    losses = [summaries[run_id]["losses"]["ce_loss"] for run_id in BALANCED]
    assert max(losses) <= 1.03 * min(losses)


def test_the_balancer_is_the_only_difference():
    configs = [json.loads((SAMPLES / run_id / "run.json").read_text())["config"] for run_id in ("none", *BALANCED)]
    for config in configs:
        del config["balancer"], config["name"]
    assert all(config == configs[0] for config in configs)


def test_they_are_small():
    assert sum(path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file()) < 20e6
