"""Runs that differ from the language model without limits: a regression (no text, no cross-entropy), a capacity."""

from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import routescope
from streamlit.testing.v1 import AppTest

VIEWS = ("runs", "overview", "replay", "tokens", "layouts", "compare", "recording", "dispatch")
VIEWS += ("specialisation", "coactivation", "settling", "placement")


@pytest.fixture(scope="module")
def unusual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs really recorded: "regression", "regression-none" and "capacity"."""
    folder = tmp_path_factory.mktemp("unusual")
    often = ["--steps", "12", "--probe-every", "5", "--decisions-every", "5"]
    small = "--num-layers 2 --moe-frequency 1 --d-model 16 --d-ff 32 --num-heads 2 --num-experts 8 --batch-size 4"
    for name, options in (
        ("regression", ["--task", "regression", "--batch-size", "32"]),
        ("regression-none", ["--task", "regression", "--batch-size", "32", "--balancer", "none"]),
        ("capacity", [*small.split(), "--seq-len", "32", "--capacity-factor", "1.0"]),
    ):
        routescope("record", *options, *often, "--run-id", name, "--out", folder).check_returncode()
    return folder


@pytest.fixture
def open_unusual(
    unusual: Path, monkeypatch: pytest.MonkeyPatch, open_page: Callable[..., AppTest]
) -> Callable[..., AppTest]:
    monkeypatch.setenv("ROUTESCOPE_DIRS", str(unusual))
    return open_page


def words(test: AppTest) -> str:
    elements = [*test.caption, *test.info, *test.warning, *test.markdown, *test.title, *test.error]
    return " ".join(element.value for element in elements)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("run", ["regression", "capacity"])
@pytest.mark.slow
def test_every_view_opens(run: str, view: str, open_unusual: Callable[..., AppTest]) -> None:
    test = open_unusual(view, run=run, runs=["regression", "regression-none"])
    assert not test.exception
    assert not test.error


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ("overview", "no cross-entropy was recorded"),
        ("tokens", "A regression has no text: a token is one random sample, shown by its number."),
        ("layouts", "The manifest names no vocabulary: the model has no embeddings"),
        ("compare", "No cross-entropy was recorded in regression and regression-none."),
    ],
)
def test_a_regression_says_what_it_lacks(view: str, said: str, open_unusual: Callable[..., AppTest]) -> None:
    test = open_unusual(view, run="regression", runs=["regression", "regression-none"])
    assert said in words(test).replace("\\", "")
    assert "nats" not in words(test)


def test_tokens_without_text_are_numbers(open_unusual: Callable[..., AppTest]) -> None:
    test = open_unusual("tokens", run="regression", step=11)
    page = " ".join(element.proto.body for element in test.get("html"))
    assert ">#0<" in page
    assert ">#31<" in page
    assert "no text" not in page
    assert "kind of text" not in words(test)


def test_dropped_tokens_are_explained(open_unusual: Callable[..., AppTest]) -> None:
    assert "struck out" in words(open_unusual("tokens", run="capacity"))
    assert "struck out" not in words(open_unusual("tokens", run="regression"))
    replay = open_unusual("replay", run="capacity", layer=0)
    [dropped] = [text.value for text in replay.caption if "Dropped: " in text.value]
    assert "Dropped: -" not in dropped
    assert "%" in dropped
