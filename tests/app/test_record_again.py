"""A recorded run as the beginning of another: its settings in the form, or itself continued."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import jobs, record_again, record_settings
from app.record_presets import PRESETS
from recorder.reader import Run
from recorder.training.config import ToyConfig
from recorder.training.loop import RunCancelledError, train

SAMPLES = Path(__file__).resolve().parents[2] / "sample_runs"
ODD = ToyConfig.of(recipe="switch", noise_std=0.5, probe_every=7, capacity_factor=2.0, balancer="soft-aux", z_coef=0.01)


def run_of(config: ToyConfig, source: str = "routescope record") -> Any:
    return SimpleNamespace(manifest={"source": source, "config": json.loads(json.dumps(config.as_manifest()))})


@pytest.mark.parametrize(
    "config",
    [
        *(preset.config for preset in PRESETS.values()),
        ODD,
        ToyConfig.of(task="regression", recipe="mixtral", noise_std=1.0),
        ToyConfig.of(corpus=("a b.txt", "c"), d_ff=33, dispatcher="naive", name="mine"),
    ],
)
def test_the_settings_of_a_run_give_that_run_again(config: ToyConfig, tmp_path: Path) -> None:
    values = record_again.settings(run_of(config))
    given = {name: tuple(value) if name == "corpus" else value for name, value in values.items() if value is not None}
    assert ToyConfig.of(**given) == config
    assert record_settings.problems({**values, "corpus": []} if "corpus" in values else values) == []
    words = record_settings.command(values, run_id="x", out=tmp_path)
    recipe_s = ToyConfig.of(task=config.task, recipe=config.recipe).noise_std
    assert (f"--noise-std={config.noise_std}" in words) == (config.noise_std != recipe_s)


def test_a_run_of_another_maker_has_no_settings_for_the_form() -> None:
    with pytest.raises(ValueError, match="it was recorded by my script, not by routescope record"):
        record_again.settings(run_of(ToyConfig(), "my script"))


def test_the_form_takes_the_settings_of_a_sample_run(shown: Path, open_page: Callable[..., AppTest]) -> None:
    shutil.copytree(SAMPLES / "top2-shared", shown / "sample")
    test = open_page("overview", run="sample")
    assert "continue_overview" not in {button.key for button in test.button}, "it has finished"
    test.button(key="again_overview").click().run()
    assert not test.exception
    assert test.sidebar.selectbox(key="record_preset").value == record_again.LIKE
    config = Run(shown / "sample").config
    for name in ("num_experts", "top_k", "num_shared_experts", "steps", "seed", "bias_rate"):
        assert test.sidebar.number_input(key=f"record_{name}").value == config[name]
    assert test.sidebar.selectbox(key="record_balancer").value == "quantile"
    assert test.sidebar.text_input(key="record_name").value == "Top-2 of 8, one shared"
    assert not test.sidebar.error
    # away to a preset and back
    test.sidebar.selectbox(key="record_preset").set_value("collapse").run()
    assert test.sidebar.number_input(key="record_num_experts").value == 16
    test.sidebar.selectbox(key="record_preset").set_value(record_again.LIKE).run()
    assert test.sidebar.number_input(key="record_num_experts").value == 8
    # another run's settings take the place of these, and of what was typed over them
    shutil.copytree(SAMPLES / "none", shown / "other")
    test.sidebar.number_input(key="record_steps").set_value(7).run()
    test.sidebar.selectbox(key="run").set_value("other").run()
    test.button(key="again_overview").click().run()
    for name in ("num_experts", "top_k", "steps"):
        assert test.sidebar.number_input(key=f"record_{name}").value == Run(shown / "other").config[name]


def test_of_other_runs_the_buttons_say_why_not(
    shown: Path, open_page: Callable[..., AppTest], write_run: Callable[..., Path]
) -> None:
    write_run(shown, "foreign", range(3), status="cancelled")
    test = open_page("overview", run="foreign")
    for key in ("again_overview", "continue_overview"):
        button = test.button(key=key)
        assert button.disabled
        assert button.help == "Not possible: it was recorded by RunWriter, not by routescope record."


def test_a_cancelled_run_is_continued_to_the_end(shown: Path, open_page: Callable[..., AppTest]) -> None:
    small = {"task": "regression", "recipe": "", "num_experts": 4, "batch_size": 8, "d_model": 8, "steps": 6}
    with pytest.raises(RunCancelledError):
        train(ToyConfig.of(**small), shown / "mine", should_stop=iter([False, False, False, True]).__next__)
    test = open_page("overview", run="mine")
    assert not test.button(key="continue_overview").disabled
    test.button(key="continue_overview").click().run()
    assert not test.exception
    assert re.match(r"Recording |Nothing is being recorded; 1 waits", test.title[0].value)  # its turn comes at once
    [job] = jobs.jobs(shown)
    assert (job.run_id, job.continued, job.steps) == ("mine", True, 6)
    end = time.monotonic() + 60
    while jobs.state(job) not in ("finished", "failed"):
        assert time.monotonic() < end, (job, jobs.log_lines(job))
        time.sleep(0.2)
        [job] = jobs.jobs(shown)
    run = Run(shown / "mine")
    assert (run.status, list(run.steps("train")["step"])) == ("finished", list(range(6)))
    progress = jobs.progress(job, run)
    assert (progress.done, progress.total, progress.before, progress.message) == (6, 6, 3, None)
    assert "6 steps, the last 3 of them in " in open_page("recording").markdown[0].value
    assert record_again.why_not_continued(run) == "it has finished: there is no step left"
