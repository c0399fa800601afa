"""A link to a run that is not there says so on the page, until a run is picked."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

Open = Callable[..., AppTest]
Write = Callable[..., Path]


@pytest.mark.parametrize("page", ["overview", "replay", "tokens", "layouts"])
def test_a_link_to_no_run_says_which_one_is_shown_instead(
    shown: Path, write_run: Write, open_page: Open, page: str
) -> None:
    write_run(shown, "there", range(3))
    test = open_page(page, run="nope")
    assert not test.exception
    assert test.main.warning[0].value == "Run nope is not in the folders shown; showing there instead."


def test_a_path_in_a_link_shows_nothing_of_it(shown: Path, write_run: Write, open_page: Open) -> None:
    write_run(shown, "there", range(3))
    test = open_page("overview", run="../../etc/passwd")
    assert test.main.warning[0].value.startswith("Run ../../etc/passwd is not in the folders shown;")


def test_it_stands_until_a_run_is_picked(shown: Path, write_run: Write, open_page: Open) -> None:
    write_run(shown, "a", range(3))
    write_run(shown, "b", range(3))
    test = open_page("overview", run="nope").run()
    assert len(test.main.warning) == 1
    test.sidebar.selectbox(key="run").set_value("a").run()
    assert len(test.main.warning) == 0
    stayed = open_page("overview", run="nope")
    stayed.main.button(key="stay_with_run").click().run()
    assert len(stayed.main.warning) == 0
    assert stayed.sidebar.selectbox(key="run").value == "b"


def test_a_run_deleted_while_it_is_shown(shown: Path, write_run: Write, open_page: Open) -> None:
    write_run(shown, "a", range(3))
    path = write_run(shown, "b", range(3))
    test = open_page("overview", run="b")
    assert len(test.main.warning) == 0
    shutil.rmtree(path)
    test.run()
    assert not test.exception
    assert test.main.warning[0].value == "Run b is not in the folders shown; showing a instead."


def test_a_comparison_names_the_runs_that_are_not_there(shown: Path, write_run: Write, open_page: Open) -> None:
    for name in ("a", "b"):
        write_run(shown, name, range(3))
    test = open_page("compare", runs=["a", "nope", "b"])
    assert not test.exception
    assert test.main.warning[0].value == "Run nope is not in the folders shown and is left out."
