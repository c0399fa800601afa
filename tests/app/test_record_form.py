"""The form: what it refuses, in words; the command it builds; and a real recording started from it."""

import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import jobs, record_settings
from app.record_presets import PRESETS
from moe_core.recipe_catalog import RECIPES
from recorder.reader import Run
from recorder.training.config import BALANCERS, LM_ONLY, ToyConfig, check_balancer

GOOD: dict[str, Any] = {
    "task": "lm",
    "recipe": "",
    "balancer": "none",
    "router": "softmax",
    "num_experts": 8,
    "top_k": 2,
    "num_shared_experts": 0,
    "latent_size": None,
    "num_layers": 4,
    "moe_frequency": 2,
    "steps": 5,
    "seed": 0,
    "name": "",
    "corpus": [],
    "aux_coef": 0.01,
    "z_coef": 0.0,
    "bias_rate": 0.001,
    "lr": 0.003,
    "decisions_every": 10,
    "batch_size": 4,
    "seq_len": 16,
    "d_model": 32,
}


def test_every_value_is_a_setting_of_the_toy_run_and_has_a_label() -> None:
    assert set(GOOD) == {"task", "recipe", *record_settings.LABELS}
    assert set(GOOD) <= {field.name for field in fields(ToyConfig)}


def test_every_balancer_offered_can_be_recorded_and_every_kind_is_offered() -> None:
    for balancer in record_settings.BALANCERS:
        check_balancer(balancer)
    assert {part for balancer in record_settings.BALANCERS for part in balancer.split("+")} >= set(BALANCERS)
    offered = {preset.config.balancer for preset in PRESETS.values()}
    assert offered <= set(record_settings.BALANCERS)


def test_every_recipe_is_a_preset() -> None:
    assert {preset.config.recipe for preset in PRESETS.values()} >= set(RECIPES)
    assert len({preset.title for preset in PRESETS.values()}) == len(PRESETS)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        ({"top_k": 9}, ["Top-k 9 is more than Experts 8"]),
        ({"steps": 0}, ["Steps 0 is not between 1 and 1000000"]),
        ({"steps": None}, ["Steps: a number is missing"]),
        ({"lr": -1.0}, ["Learning rate -1.0 is not a positive, finite number"]),
        (
            {"steps": 0, "lr": 0.0, "seed": -1, "top_k": 9},
            [
                "Steps 0 is not between 1 and 1000000",
                "Seed -1 is not between 0 and 4294967295",
                "Learning rate 0.0 is not a positive, finite number",
                "Top-k 9 is more than Experts 8",
            ],
        ),
    ],
)
def test_one_clear_line_for_each_bad_value(changes: dict[str, Any], lines: list[str]) -> None:
    assert sorted(record_settings.problems(GOOD | changes)) == sorted(lines)


def test_conflicts_between_values_are_told(tmp_path: Path) -> None:
    [line] = record_settings.problems(GOOD | {"moe_frequency": 5})
    assert "MoE frequency 5 of Layers 4" in line
    [line] = record_settings.problems(GOOD | {"balancer": "quantile", "top_k": 8})
    assert "Experts 8" in line
    [line] = record_settings.problems(GOOD | {"corpus": [str(tmp_path / "none.txt"), str(tmp_path)]})
    assert line == f"Your own text: there is no file or folder {tmp_path / 'none.txt'}"


@pytest.mark.parametrize(
    "path", ["~nosuchuser/x", "x" * 400, "a/" * 5000, "a\0b"], ids=["user", "name", "path", "zero"]
)
def test_a_path_that_cannot_be_one_is_a_line(path: str, tmp_path: Path) -> None:
    [line] = record_settings.problems(GOOD | {"corpus": [path]})
    assert line.startswith(f"Your own text: there is no file or folder {path[:100]}")
    assert len(line) < 200
    assert path.rstrip("/") in record_settings.command(GOOD | {"corpus": [path]}, run_id="x", out=tmp_path)


def test_the_command_holds_every_value_and_no_shell_reads_it(tmp_path: Path) -> None:
    values = GOOD | {"balancer": "aux+quantile", "name": "--help; rm -rf $HOME", "corpus": ["a b.txt", "c"]}
    words = record_settings.command(values, run_id="mine", out=tmp_path)
    assert words[:4] == [sys.executable, "-m", "recorder.cli", "record"]
    assert [words[i + 1] for i, word in enumerate(words) if word == "--balancer"] == ["aux", "quantile"]
    assert [words[i + 1] for i, word in enumerate(words) if word == "--corpus"] == ["a b.txt", "c"]
    assert "--name=--help; rm -rf $HOME" in words
    assert {"--num-experts=8", "--top-k=2", "--lr=0.003", "--d-model=32"} <= set(words)
    assert words[-4:] == ["--run-id", "mine", "--out", str(tmp_path)]
    words = record_settings.command(GOOD, run_id="x", out=tmp_path)
    assert not any(word.startswith(("--name", "--latent-size")) for word in words)
    assert {"--task=lm", "--recipe="} <= set(words)
    assert "--latent-size=16" in record_settings.command(GOOD | {"latent_size": 16}, run_id="x", out=tmp_path)


def test_run_ids_are_free_and_plain(tmp_path: Path) -> None:
    first = record_settings.new_run_id(GOOD | {"name": "Über ../ alles!"}, tmp_path)
    assert first.startswith("ber-alles-")
    (tmp_path / first).mkdir()
    assert record_settings.new_run_id(GOOD | {"name": "Über ../ alles!"}, tmp_path) != first
    assert record_settings.new_run_id(GOOD, tmp_path).startswith("none-")
    assert record_settings.new_run_id(GOOD | {"recipe": "olmoe"}, tmp_path).startswith("olmoe-")
    assert record_settings.new_run_id(GOOD | {"name": "..."}, tmp_path).startswith("run-")


def open_form(open_page: Callable[..., AppTest], page: str = "recording", **parameters: Any) -> AppTest:
    test = open_page(page, **parameters)
    test.session_state["record_expander"] = True
    return test.run()


def choose(test: AppTest, preset: str) -> AppTest:
    test.sidebar.selectbox(key="record_preset").set_value(preset).run()
    assert not test.exception, test.exception
    return test


def shown_fields(test: AppTest) -> dict[str, Any]:
    fields = [*test.sidebar.number_input, *test.sidebar.selectbox, *test.sidebar.text_area, *test.sidebar.text_input]
    return {field.key.removeprefix("record_"): field.value for field in fields if field.key.startswith("record_")}


def test_a_closed_form_draws_nothing(shown: Path, open_page: Callable[..., AppTest]) -> None:
    assert not shown_fields(open_page("recording"))


def test_presets_fill_the_fields_and_record_as_the_command_does(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = open_form(open_page)
    for name, preset in PRESETS.items():
        choose(test, name)
        expected = preset.config
        fields = set(GOOD) - {"task", "recipe", "corpus"}
        if expected.task == "regression":
            fields -= set(LM_ONLY)
        values = shown_fields(test)
        assert {name: values[name] for name in fields} == {name: getattr(expected, name) for name in fields}, name
        assert ("num_layers" in values) == ("corpus" in values) == (expected.task == "lm")
        captions = [caption.value for caption in test.sidebar.caption]
        assert preset.summary in captions
        assert not test.sidebar.error


def test_leaving_a_preset_brings_the_defaults_back_and_keeps_what_it_is_not_about(
    shown: Path, open_page: Callable[..., AppTest]
) -> None:
    test = open_form(open_page)
    test.sidebar.number_input(key="record_steps").set_value(7)
    test.sidebar.number_input(key="record_num_experts").set_value(5)
    choose(test, "stable-latent")
    values = shown_fields(test)
    assert (values["latent_size"], values["num_experts"], values["steps"]) == (32, 16, 7)
    choose(test, "collapse")
    after = shown_fields(test)
    assert {name: after[name] for name in ("latent_size", "top_k", "router", "balancer", "steps")} == {
        "latent_size": None,
        "top_k": 1,
        "router": "softmax",
        "balancer": "none",
        "steps": 7,
    }


def test_a_regression_is_recorded_from_the_form(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = choose(open_form(open_page), "regression-plain")
    test = submit(test, steps=3, batch_size=16, num_experts=4, latent_size=8)
    assert not test.exception
    [job] = jobs.jobs(shown)
    wait_for(job)
    config = Run(job.run_path).config
    assert (config["task"], config["recipe"], config["latent_size"], config["steps"]) == ("regression", "", 8, 3)


def wait_for(job: jobs.Job) -> None:
    end = time.monotonic() + 120
    while jobs.is_alive(job):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert jobs.state(job) == "finished", jobs.log_lines(job)


def submit(test: AppTest, **values: Any) -> AppTest:
    for name, value in values.items():
        widget = test.text_input if isinstance(value, str) else test.number_input
        widget(key=f"record_{name}").set_value(value)
    test.button(key="record_start").click()
    return test.run()


def test_bad_values_start_nothing(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = submit(open_form(open_page), top_k=20, num_layers=1)
    assert not test.exception
    assert sorted(error.value for error in test.sidebar.error) == [
        "MoE frequency 2 of Layers 1 leaves no MoE layer to record; choose at most 1",
        "Top-k 20 is more than Experts 16",
    ]
    assert jobs.jobs(shown) == []


def test_an_emptied_field_is_not_the_default(shown: Path, open_page: Callable[..., AppTest]) -> None:
    test = open_form(open_page)
    for name in ("steps", "lr"):
        field = test.sidebar.number_input(key=f"record_{name}")
        assert field.value == getattr(ToyConfig(), name)
        # What the browser puts into a field that is emptied: with a default it would be that, and go unnoticed.
        assert not field.proto.HasField("default")
        field.set_value(None)
    test.button(key="record_start").click().run()
    assert not test.exception
    assert [error.value.replace("\\", "") for error in test.sidebar.error] == [
        "Steps: a number is missing",
        "Learning rate: a number is missing",
    ]
    assert jobs.jobs(shown) == []


def test_a_run_is_recorded_from_the_form_to_the_end(shown: Path, open_page: Callable[..., AppTest]) -> None:
    small = {name: GOOD[name] for name in ("num_experts", "top_k", "steps", "batch_size", "seq_len", "d_model")}
    test = submit(open_form(open_page), name="Mine", **small)
    assert not test.exception
    assert test.title[0].value.startswith("Recording ")
    [job] = jobs.jobs(shown)
    assert job.steps == 5
    wait_for(job)
    run = Run(job.run_path)
    assert (run.name, run.config["num_experts"], run.config["top_k"], len(run.steps("train"))) == ("Mine", 8, 2, 5)


def test_what_was_typed_stays_when_a_button_changes_the_page(
    shown: Path, open_page: Callable[..., AppTest], write_run: Callable[..., Path]
) -> None:
    write_run(shown, "a", range(3), status="cancelled")
    write_run(shown, "b", range(3))
    test = open_form(open_page, "runs", run="a", runs=["a", "b"])
    test.sidebar.number_input(key="record_steps").set_value(7)
    test.sidebar.number_input(key="record_lr").set_value(None)
    test.sidebar.text_input(key="record_name").set_value("Half typed").run()
    test.button(key="compare").click().run()
    assert not test.exception
    values = shown_fields(test)
    assert (values["steps"], values["lr"], values["name"]) == (7, None, "Half typed")
