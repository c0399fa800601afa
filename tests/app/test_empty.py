"""Where there is nothing to draw, the page says why and what to do next."""

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from recorder.writer import RunWriter

SCRIPT = """
import streamlit as st
from app import pickers, state
from app.views.empty import require_run

state.begin("overview")
pickers.pick_run()
run = require_run()
st.text("nothing" if run is None else run.run_id)
state.finish()
"""


def page(**parameters: str) -> AppTest:
    test = AppTest.from_string(SCRIPT, default_timeout=60)
    for name, value in parameters.items():
        test.query_params[name] = value
    test.run()
    assert not test.exception, test.exception
    return test


def words(test: AppTest) -> str:
    kinds = (test.info, test.warning, test.error, test.markdown, test.code, test.caption)
    return "\n".join(element.value for kind in kinds for element in kind)


def test_an_empty_folder(shown: Path) -> None:
    test = page()
    assert test.text[0].value == "nothing"
    assert "There are no runs here yet" in words(test)
    assert f"routescope record --balancer none --steps 400 --out {shown}" in words(test)
    assert str(shown) in test.caption[0].value


def test_a_folder_that_is_a_run_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_run: Callable[..., Path]
) -> None:
    path = write_run(tmp_path / "mine", "a", range(2))
    monkeypatch.setenv("ROUTESCOPE_DIRS", str(path))
    assert f"routescope app {tmp_path / 'mine'}" in words(page())


def test_an_unreadable_run(shown: Path, write_run: Callable[..., Path]) -> None:
    path = write_run(shown, "a", range(2))
    (path / "run.json").write_text("{")
    test = page(run="a")
    assert test.text[0].value == "nothing"
    assert "cannot be read" in test.error[0].value
    assert "not JSON" in words(test)
    assert str(path) in words(test)


def test_a_run_without_steps(shown: Path) -> None:
    with RunWriter(shown / "waiting"):
        test = page(run="waiting")
        assert "has just been started" in words(test)
    test = page(run="waiting")
    assert test.text[0].value == "nothing"
    assert "finished and recorded no step" in words(test)


def test_a_run_without_moe_layers(shown: Path) -> None:
    with RunWriter(shown / "dense") as writer:
        writer.log_step(0, tokens=8, loss=1.0)
    assert "no MoE layer" in words(page(run="dense"))


def test_a_running_run_is_shown_and_says_so(shown: Path, write_run: Callable[..., Path]) -> None:
    write_run(shown, "a", range(3), status="running")
    test = page(run="a")
    assert test.text[0].value == "a"
    assert "shows the steps up to 2, the run is at step 2" in words(test)
    assert test.toggle(key="follow_run").value, "and is drawn again as it grows"


def test_bad_parts_are_named(shown: Path, write_run: Callable[..., Path]) -> None:
    path = write_run(shown, "a", range(3))
    (path / "steps" / "part-r00000-000099.parquet").write_bytes(b"")
    test = page(run="a")
    assert test.text[0].value == "a"
    assert "part-r00000-000099" in words(test)


def test_a_failed_run_says_why(shown: Path) -> None:
    writer = RunWriter(shown / "a", manifest={"model": {"layers": [{"index": 0, "num_experts": 2, "top_k": 1}]}})
    writer.log_step(0, tokens=8, loss=1.0)
    writer.finalize("failed", error="disk *full*")
    test = page(run="a")
    assert test.text[0].value == "a"
    assert r"failed after step 0: disk \*full\*" in words(test)
