"""Which runs the page of runs shows, and in what order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import data, runs_filter
from recorder.about import About, make_about, write_about
from recorder.reader import RunInfo

Open = Callable[..., AppTest]
Write = Callable[..., Path]


def pair(name: str, *, notes: str = "", tags: tuple[str, ...] = (), **row: Any) -> runs_filter.Pair:
    info = RunInfo(
        path=Path(name),
        run_id=name,
        name=name,
        status="finished",
        error=None,
        manifest={"created_at": row.pop("created_at", "")},
        about=About(notes=notes, tags=tags),
    )
    run = data.Listed(reference=name, label=name.title(), path=Path(name), read_only=False, info=info)
    values = dict.fromkeys(("balancer", "loss", "ce_loss", "max_violation_window", "idle_experts"))
    return run, {"status": "finished", "num_steps": 0} | values | row


PAIRS = [
    pair("beta", tags=("keep", "paper"), balancer="aux", ce_loss=2.0, idle_experts=0, num_steps=9, created_at="2"),
    pair("alpha", notes="Seed sweep", balancer="none", ce_loss=1.0, idle_experts=12, num_steps=7, created_at="3"),
    pair("gamma", tags=("paper",), status="failed", num_steps=8, created_at="1"),
]


@pytest.mark.parametrize(
    ("choice", "left"),
    [
        ({}, "beta alpha gamma"),
        ({"words": "ALPHA"}, "alpha"),
        ({"words": "sweep seed"}, "alpha"),
        ({"words": "sweep beta"}, ""),
        ({"words": "paper"}, "beta gamma"),
        ({"words": "aux"}, "beta"),
        ({"statuses": ["failed", "running"]}, "gamma"),
        ({"balancers": ["none", runs_filter.NO_BALANCER]}, "alpha gamma"),
        ({"tags": ["paper"]}, "beta gamma"),
        ({"tags": ["keep", "nothing"]}, "beta"),
        ({"tags": ["paper"], "statuses": ["finished"]}, "beta"),
        ({"order": "oldest"}, "gamma beta alpha"),
        ({"order": "name"}, "alpha beta gamma"),
        ({"order": "ce"}, "alpha beta gamma"),
        ({"order": "idle"}, "alpha beta gamma"),
        ({"order": "steps"}, "beta gamma alpha"),
        ({"order": "loss"}, "beta alpha gamma"),
    ],
    ids=str,
)
def test_what_is_left_and_in_what_order(choice: dict[str, Any], left: str) -> None:
    chosen = runs_filter.Choice(**choice)
    assert [run.reference for run, _ in runs_filter.apply(chosen, PAIRS)] == left.split()
    assert chosen.leaves_out == bool(set(choice) - {"order"})


def listed(test: AppTest) -> list[str]:
    assert not test.exception, test.exception
    return list(test.dataframe[0].value["run"]) if test.dataframe else []


def test_the_choice_is_in_the_url_and_the_title_counts(shown: Path, write_run: Write, open_page: Open) -> None:
    for run_id in ("a", "b", "c"):
        write_run(shown, run_id, range(3), bias=run_id == "c")
    write_about(shown / "a", make_about(name="Renamed", tags="keep"))
    test = open_page("runs", filter="none", sort="name")
    assert listed(test) == ["b", "Renamed"]
    assert test.title[0].value.startswith("2 of 3 runs")
    test.text_input(key="filter").set_value("  ").run()
    assert listed(test) == ["b", "c", "Renamed"]
    assert "filter" not in test.query_params
    test.multiselect(key="tag").set_value(["keep"]).run()
    assert listed(test) == ["Renamed"]
    assert (test.query_params["tag"], test.query_params["sort"]) == ("keep", "name")
    test.text_input(key="filter").set_value("nothing like it").run()
    assert listed(test) == []
    assert test.title[0].value == "No run of 3 matches"
    test.button(key="runs_all").click().run()
    assert listed(test) == ["b", "c", "Renamed"]
    assert "tag" not in test.query_params
