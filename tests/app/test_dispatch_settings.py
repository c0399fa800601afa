"""The values of the Dispatch page's controls: to the URL and back, checked, and as a command line."""

import sys
from typing import Any

import psutil
import pytest

from app import dispatch_settings as settings
from recorder.dispatch_shape import PRESETS, DispatchShape

SMALL = settings.DEFAULTS | {"num_tokens": 32, "threads": 1}


@pytest.mark.parametrize("shape", PRESETS)
def test_the_url_carries_every_value(shape: DispatchShape) -> None:
    values = settings.of_preset(shape, rounds=7, threads=1) | {"skew": 1.5, "activation": "situ-glu"}
    assert settings.from_text(settings.as_text(values)) == values
    assert settings.preset_of(values) is None
    assert settings.preset_of(settings.of_preset(shape)) == shape


def test_an_emptied_field_stays_empty() -> None:
    values = SMALL | {"num_tokens": None}
    assert settings.from_text(settings.as_text(values)) == values
    assert settings.problems(values) == ["Tokens: a number is missing"]


@pytest.mark.parametrize("text", [None, "", "x", "1_2_3", "_" * 40, "../../etc/passwd"])
def test_text_that_means_nothing_is_the_default(text: str | None) -> None:
    assert settings.from_text(text) == settings.DEFAULTS


def test_each_value_that_cannot_be_is_its_default() -> None:
    values = settings.from_text("-1_1e9_16_x_100_relu_inf_5_1")
    assert values == settings.DEFAULTS | {"num_experts": 16, "num_tokens": 100, "rounds": 5, "threads": 1}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, None),
        ({"top_k": 9}, "Top-k 9 is not between 1 and Experts 8"),
        ({"skew": 11.0}, "Skew 11.0 is not between 0 and 10.0"),
    ],
)
def test_one_clear_line_for_what_does_not_fit(changes: dict[str, Any], line: str | None) -> None:
    assert settings.problems(SMALL | changes) == ([] if line is None else [line])


def test_what_would_take_hours_or_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    long = settings.of_preset(PRESETS[3], rounds=settings.MOST_ROUNDS, threads=1) | {"num_tokens": 20_000}
    [line] = settings.problems(long)
    assert line.startswith("This would take about 24 h")
    assert "up to 30 minutes" in line
    large = settings.DEFAULTS | {"d_model": 65536, "d_ff": 65536, "num_tokens": 1, "top_k": 1, "num_experts": 4096}
    [line] = settings.problems(large)
    assert "GiB of memory; this machine has" in line
    # 3 times 8 experts of 3 x 64 x 128 weights and more: not in 3 MiB
    memory = psutil.virtual_memory()._replace(total=3 * 2**20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert "this machine has 0.0 GiB" in settings.problems(SMALL)[0]


def test_estimates_grow_with_the_work() -> None:
    small, large = PRESETS[0], PRESETS[1]
    assert small.flops == 6 * 2048 * 2 * 3 * 64 * 128
    assert small.estimated_bytes() < large.estimated_bytes()
    seconds = large.estimated_seconds(rounds=10, threads=1)
    assert seconds > large.estimated_seconds(rounds=5, threads=1) > small.estimated_seconds(rounds=5, threads=1)
    assert seconds > large.estimated_seconds(rounds=10, threads=2)


def test_the_command_says_every_value() -> None:
    words = settings.command(SMALL | {"skew": 0.5})
    assert words[:5] == [sys.executable, "-m", "recorder.cli", "bench", "dispatch"]
    assert {"--d-model=64", "--d-ff=128", "--num-experts=8", "--top-k=2", "--tokens=32"} <= set(words)
    assert {"--skew=0.5", "--activation=swiglu", "--rounds=10", "--threads=1", "--json", "--progress"} <= set(words)
