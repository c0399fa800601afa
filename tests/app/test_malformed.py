"""Runs of another writer, or damaged ones: one line says what is wrong; never an exception, never a wrong claim."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from streamlit.testing.v1 import AppTest

from app import data
from recorder.manifest_shape import check_manifest

pytestmark = pytest.mark.slow

Open = Callable[..., AppTest]
Write = Callable[..., Path]
PAGES = ("overview", "replay", "tokens", "layouts", "specialisation", "coactivation", "settling", "placement")


def words(test: AppTest) -> str:
    assert not test.exception, test.exception
    main = test.main
    kinds = (main.title, main.info, main.warning, main.error, main.markdown, main.code, main.caption)
    return "\n".join(element.value for kind in kinds for element in kind)


def edit_manifest(path: Path, **changes: Any) -> None:
    file = path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_rows(path: Path, table: str, edit: Callable[[pa.Table], pa.Table]) -> None:
    """Every part of a table as `edit` leaves it, its metadata kept."""
    for part in (path / table).glob("*.parquet"):
        rows = pq.read_table(part, partitioning=None)
        pq.write_table(edit(rows).replace_schema_metadata(rows.schema.metadata), part)


def without_loads(rows: pa.Table) -> pa.Table:
    place = rows.schema.get_field_index("load")
    return rows.set_column(place, rows.schema.field(place), pa.nulls(len(rows), rows.schema.field(place).type))


def parts_of_rubbish(path: Path, table: str) -> list[str]:
    parts = sorted((path / table).glob("*.parquet"))
    for part in parts:
        part.write_bytes(part.read_bytes()[:40])
    return [part.name for part in parts]


MALFORMED = pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"domains": 5}, "domains"),
        (
            {"model": {"parameters_total": "x", "layers": [{"index": 1, "num_experts": 4, "top_k": 1}]}},
            "parameters_total",
        ),
        (
            {"model": {"layers": [{"index": 1, "num_experts": 4, "top_k": 1, "parameters_active": "x"}]}},
            "parameters_active",
        ),
    ],
    ids=["domains", "parameters", "layer"],
)


@MALFORMED
@pytest.mark.parametrize("page", PAGES)
def test_a_malformed_manifest_is_one_line_on_every_page(
    shown: Path, write_run: Write, open_page: Open, page: str, changes: dict[str, Any], field: str
) -> None:
    edit_manifest(write_run(shown, "bad", range(3)), **changes)
    test = open_page(page, run="bad")
    assert field in words(test).replace("\\_", "_")
    assert test.main.error[0].value == "The run `bad` cannot be read."


@MALFORMED
def test_the_line_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        check_manifest({"format_version": 1, **changes})
    check_manifest({"format_version": 1, "domains": ["prose"], "model": None})


def test_a_run_whose_steps_are_gone_did_not_record_nothing(shown: Path, write_run: Write, open_page: Open) -> None:
    shutil.rmtree(write_run(shown, "gone", range(12)) / "steps")
    text = words(open_page("overview", run="gone"))
    assert "No step of this run can be read; it is finished, its last step was 11." in text
    assert "can be deleted" not in text


@pytest.mark.parametrize("page", ["overview", "replay", "tokens"])
def test_loads_that_are_null_are_one_line_with_a_way_out(
    shown: Path, write_run: Write, open_page: Open, page: str
) -> None:
    edit_rows(write_run(shown, "bad", range(12)), "layer_stats", without_loads)
    text = words(open_page(page, run="bad"))
    assert "the loads of layer 1 are missing (null) in 12 of 12 training rows" in text.replace("\\_", "_")
    assert "What to do" in text


def test_one_bad_run_does_not_kill_the_comparison_of_the_good_ones(
    shown: Path, write_run: Write, open_page: Open
) -> None:
    for name in ("a", "b", "bad"):
        write_run(shown, name, range(12))
    edit_rows(shown / "bad", "layer_stats", without_loads)
    test = open_page("compare", runs=["a", "bad", "b"])
    assert "Left out: bad (in layer_stats, the loads of layer 1 are missing" in words(test).replace("\\_", "_")
    assert test.main.title[0].value != "Compare"
    row = next(data.row(run) for run in data.listed() if run.reference == "bad")
    assert "are missing (null)" in row["error"]


def test_another_number_of_experts_than_the_manifest_says_is_not_drawn_as_no_load(
    shown: Path, write_run: Write
) -> None:
    path = write_run(shown, "bad", range(3))
    edit_manifest(path, model={"layers": [{"index": 1, "num_experts": 5, "top_k": 1}]})
    run, _ = data.open_run(path)
    assert run is not None
    assert data.loads_problem(run) == (
        "in layer_stats, the loads of layer 1 are lists of 4 numbers; its run.json says 5 experts"
    )


@pytest.mark.parametrize("page", [*PAGES, "compare"])
def test_a_step_recorded_twice_is_shown_once(shown: Path, write_run: Write, open_page: Open, page: str) -> None:
    path = write_run(shown, "twice", range(12))
    write_run(shown, "other", range(12))
    for table in ("steps", "layer_stats", "decisions", "tokens"):
        edit_rows(path, table, lambda rows: pa.concat_tables([rows, rows]))
    words(open_page(page, run="twice", runs=["twice", "other"]))


def test_of_a_step_recorded_twice_the_later_row_is_kept() -> None:
    frame = pd.DataFrame({"step": [0, 1, 1, 2], "loss": [3.0, 2.0, 1.5, 1.0]})
    kept = data._once(frame, "step")
    assert kept["step"].tolist() == [0, 1, 2]
    assert kept["loss"].tolist() == [3.0, 1.5, 1.0]


@pytest.mark.parametrize(
    ("table", "page"),
    [("steps", "overview"), ("layer_stats", "replay"), ("layer_stats", "overview"), ("decisions", "tokens")],
)
def test_damage_is_not_told_as_absence(shown: Path, write_run: Write, open_page: Open, table: str, page: str) -> None:
    names = parts_of_rubbish(write_run(shown, "cut", range(12)), table)
    test = open_page(page, run="cut")
    text = words(test).replace("\\_", "_")
    many = "1 part file" if len(names) == 1 else f"{len(names)} part files"
    assert f"{many} cannot be read: {table}/{names[0]}" in text
    assert "recorded no step" not in text
    assert "No load recorded" not in text
    assert "recorded no single decisions" not in text
    assert "recorded in this run. Pick" not in text


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("model", [None, {}], ids=["null", "empty"])
def test_a_manifest_that_names_no_layers_is_not_a_model_without_moe_layers(
    shown: Path, write_run: Write, open_page: Open, page: str, model: Any
) -> None:
    path = write_run(shown, "bare", range(3))
    edit_manifest(path, model=model)
    text = words(open_page(page, run="bare"))
    assert "does not list the model's layers" in text
    assert f"routescope summary {path}" in text
    assert "no MoE layer" not in text
