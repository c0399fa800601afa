"""What a recording costs: parameters as the model has them, seconds as far as they were measured here."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from app import record_cost
from app.record_cost import Measured, estimate
from app.record_presets import PRESETS
from recorder.training.config import ToyConfig
from recorder.training.cost import Size, size
from recorder.training.language_model import build_model
from recorder.training.regression import RegressionTask

SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = PRESETS[name].config
    model = RegressionTask(config).model if config.task == "regression" else build_model(config, config.vocab_size)
    assert size(config).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_recorded_run_has_the_size_it_was_said_to_have() -> None:
    manifest = json.loads((SAMPLES / "top2-shared" / "run.json").read_text())
    found = size(ToyConfig.from_manifest(manifest))
    model = manifest["model"]
    assert (found.parameters, found.active) == (model["parameters_total"], model["parameters_active"])
    assert found.experts == 2 * 8


def test_flops_of_a_step_are_those_that_a_count_by_hand_gives() -> None:
    config = ToyConfig.of(
        task="regression", recipe="", num_experts=4, top_k=2, d_model=8, expert_d_ff=3, batch_size=10, balancer="none"
    )
    router, expert = 8 * 4, 3 * 8 * 3  # a SwiGLU expert has three matrices
    assert size(config).flops_per_step == 3 * 10 * 2 * (router + 2 * expert)
    torch.manual_seed(0)
    assert size(config).parameters == router + 4 * expert


def measured(flops: int, experts: int, step_s: float, *, start_s: float = 0.0, longest: float = 1.0) -> Measured:
    of = Size(parameters=1, active=1, flops_per_step=flops, experts=experts)
    return Measured(name="one", size=of, step_s=step_s, start_s=start_s, longest=longest)


def test_runs_of_the_same_size_tell_the_seconds_and_others_a_range() -> None:
    config = ToyConfig(steps=100)
    of = size(config)
    assert estimate(config, []) is None
    alike = [measured(of.flops_per_step, of.experts, step_s, start_s=5) for step_s in (0.2, 0.3)]
    close = estimate(config, [*alike, measured(of.flops_per_step * 8, of.experts, 9.0, start_s=5)])
    assert close is not None
    assert close.close
    assert close.low < 5 + 100 * 0.2 < close.high == pytest.approx(5 + 100 * 0.3)
    assert "2 runs of this size" in close.basis
    # a run of half the FLOPs and as many experts: at least as long as that one, at most twice as long
    far = estimate(config, [measured(of.flops_per_step // 2, of.experts, 0.1)])
    assert far is not None
    assert not far.close
    assert far.low <= 100 * 0.1 < far.high == pytest.approx(2 * 100 * 0.1)
    assert "nothing of this size was recorded here" in far.basis


def test_only_finished_runs_that_the_dashboard_recorded_count(tmp_path: Path) -> None:
    (tmp_path / ".jobs").mkdir()
    began = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
    config = ToyConfig(steps=100).as_manifest()

    def recorded(run_id: str, *, status: str = "finished", source: str = "routescope record", job: bool = True) -> None:
        (tmp_path / run_id).mkdir()
        manifest = {"format_version": 1, "name": run_id, "status": status, "source": source, "config": config}
        manifest |= {"created_at": began.isoformat(), "heartbeat_at": began.replace(second=50).isoformat()}
        manifest |= {"last_step": 99, "run_id": run_id, "model": {"layers": []}}
        (tmp_path / run_id / "run.json").write_text(json.dumps(manifest))
        if job:
            note = {"run_id": run_id, "out": str(tmp_path), "command": [], "pid": 0, "steps": 100}
            note |= {"started_at": began.timestamp() - 4}
            (tmp_path / ".jobs" / f"{run_id}.json").write_text(json.dumps(note))

    recorded("mine")
    recorded("cut-short", status="cancelled")
    recorded("by-hand", job=False)
    recorded("foreign", source="my script")
    [one] = record_cost.recorded_here(tmp_path)
    assert (one.name, one.step_s, one.start_s) == ("mine", 0.5, 4.0)


def test_words() -> None:
    assert record_cost.size_words(Size(parameters=1_034_000, active=298_100, flops_per_step=1, experts=1)) == (
        "1.03 million parameters, 298 thousand of them active for a token."
    )
    assert "Nothing was recorded here yet" in record_cost.seconds_words(None)
    seconds = record_cost.Seconds(low=61.2, high=75.0, basis="as mine", close=True)
    assert record_cost.seconds_words(seconds) == "1 min 01 s to 1 min 15 s on this machine, as mine."


def test_a_measurement_of_a_few_steps_is_thrown_away_and_says_how_long_they_took() -> None:
    values = {"task": "regression", "recipe": "", "balancer": "none", "router": "softmax", "num_experts": 4}
    values |= {"top_k": 2, "steps": 100_000, "batch_size": 8, "d_model": 8, "name": ""}
    one = record_cost.measure(values)
    assert 0 < one.step_s < 5
    assert one.start_s > 0
    assert one.size == size(record_cost.config_of(values))
    with pytest.raises(ValueError, match="--top-k 9 is more than --num-experts 4"):
        record_cost.measure(values | {"top_k": 9})
