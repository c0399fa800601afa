import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy_runs import (
    add_part,
    bare_run,
    good_parts,
)

from recorder.compact import compact_table
from recorder.reader import Run
from recorder.schema import lists_to_matrix
from recorder.writer import RunWriter


def test_d1_parts_with_other_columns_and_types(tmp_path):
    path = bare_run(tmp_path / "run")
    keys = {"step": [0, 1], "phase": ["train"] * 2, "layer": [1, 1], "router": [0, 0]}
    first = keys | {"load": [[5], [5]], "aux_loss": pa.nulls(2)}
    second = keys | {"step": [2, 3], "load": [[2.5], [2.5]], "aux_loss": [0.5, 0.6], "new": [0.1, 0.2]}
    add_part(path, "layer_stats", "part-r00000-000000.parquet", first)
    add_part(path, "layer_stats", "part-r00000-000001.parquet", second)
    run = Run(path)
    frame = run.layer_stats()
    assert run.problems == []
    assert frame["aux_loss"].isna().to_list() == [True, True, False, False]
    assert frame["aux_loss"].to_list()[2:] == [0.5, 0.6]
    assert frame["new"].isna().to_list() == [True, True, False, False]
    assert frame["new"].to_list()[2:] == [0.1, 0.2]
    assert run.load(1).tolist() == [[5.0], [5.0], [2.5], [2.5]]
    assert frame[["rank", "segment"]].to_numpy().tolist() == [[0, 0]] * 4


def test_d1_decisions_of_two_writers(tmp_path):
    """Other id types, one part without phase, rank and segment, lists of fixed and of variable length."""
    path = bare_run(tmp_path / "run")
    common = {"layer": [1, 1], "router": [0, 0], "token": [0, 1]}
    add_part(
        path,
        "decisions",
        "a.parquet",
        {"step": [0, 0], **common, "experts": pa.array([[0, 1], [2, -1]], pa.list_(pa.int8(), 2))},
    )
    add_part(
        path,
        "decisions",
        "b.parquet",
        {
            "step": [1, 1],
            **common,
            "phase": ["train", "probe"],
            "experts": [[300, 1], [2, 3]],
            "weights": [[0.5, 0.5]] * 2,
        },
    )
    run = Run(path)
    assert lists_to_matrix(run.decisions(0, 1)["experts"]).tolist() == [[0, 1], [2, -1]]
    assert lists_to_matrix(run.decisions(1, 1)["experts"]).tolist() == [[300, 1]]
    assert lists_to_matrix(run.decisions(1, 1, "probe")["experts"]).tolist() == [[2, 3]]
    assert run.decision_steps().tolist() == [0, 1]
    assert run.decision_steps("probe").tolist() == [1]
    assert run.last_step == 1


def damaged_footer(data):
    length = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - length] + bytes(length // 2) + data[-8 - length + length // 2 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda data: b"", "size is 0 bytes", id="R18-empty"),
        pytest.param(lambda data: data[:4], "size is 4 bytes", id="R18-4-bytes"),
        pytest.param(lambda data: data[:-1], "magic bytes not found", id="R18-1-byte-short"),
        pytest.param(lambda data: b"step,loss\n1,2\n" * 9, "not a parquet file", id="csv"),
        pytest.param(lambda data: data[:4] + bytes(30) + data[34:], "", id="damaged-pages"),
        pytest.param(damaged_footer, "", id="damaged-footer"),
    ],
)
@pytest.mark.parametrize("table", ["steps", "layer_stats", "decisions", "tokens"])
def test_r18_bad_parts_are_named_and_the_rest_is_read(tmp_path, table, damage, reason):
    good_parts(tmp_path / "run").flush()
    part = tmp_path / "run" / table / "part-r00000-000002.parquet"
    part.write_bytes(damage(part.read_bytes()))
    run = Run(tmp_path / "run")
    counts = {
        "steps": len(run.steps()),
        "layer_stats": len(run.layer_stats()),
        "decisions": sum(len(run.decisions(step, 0)) for step in range(5)) // 4,
        "tokens": sum(len(run.tokens(step)) for step in range(5)) // 4,
    }
    assert counts == {name: 4 if name == table else 5 for name in counts}
    [problem] = run.problems
    assert problem.startswith(f"{table}/part-r00000-000002.parquet: ")
    assert reason in problem
    assert "\n" not in problem


def test_foreign_parquet_files_are_named(tmp_path):
    good_parts(tmp_path / "run").flush()
    path = tmp_path / "run"
    add_part(path, "steps", "part-r00000-000007.parquet", {"city": ["Turin"], "people": [1]})
    add_part(path, "steps", "part-r00000-000008.parquet", {"step": ["one"]})
    add_part(path, "steps", "part-r00000-000009.parquet", {"step": [7], "more": [1]})
    add_part(path, "steps", "part-r00000-000010.parquet", {"step": [8], "more": ["text"]})
    (path / "steps" / "notes.txt").write_text("not a part")
    (path / "steps" / "folder.parquet").mkdir()
    run = Run(path)
    assert run.steps()["step"].to_list() == [0, 1, 2, 3, 4, 7]
    problems = dict(line.split(": ", 1) for line in run.problems)
    assert problems["steps/part-r00000-000007.parquet"] == "not a steps table: column step missing"
    assert "column step is string" in problems["steps/part-r00000-000008.parquet"]
    assert "do not go with the other parts" in problems["steps/part-r00000-000010.parquet"]
    assert "steps/folder.parquet" in problems
    assert len(problems) == 4


@pytest.mark.parametrize("kind", ["loop", "dangling", "pipe", "folder"])
def test_a_name_that_is_no_file_is_one_bad_part(tmp_path, kind):
    good_parts(tmp_path / "run").flush()
    name = "part-r00000-000099.parquet"
    part = tmp_path / "run" / "steps" / name
    if kind == "pipe":
        os.mkfifo(part)  # opened, it would wait for a writer
    elif kind == "folder":
        part.mkdir()
    else:
        part.symlink_to(name if kind == "loop" else "nowhere")
    run = Run(tmp_path / "run")
    assert run.steps()["step"].to_list() == [0, 1, 2, 3, 4]
    assert run.problems == [f"steps/{name}: it is no file, or a link that leads to none"]
    compact_table(tmp_path / "run" / "steps", "steps", 0)
    assert run.refresh()
    assert len(run.steps()) == 5
    assert len(run.problems) == 1


def test_a_link_to_a_part_is_a_part(tmp_path):
    good_parts(tmp_path / "run").flush()
    part = tmp_path / "run" / "steps" / "part-r00000-000002.parquet"
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    run = Run(tmp_path / "run")
    assert (len(run.steps()), run.problems) == (5, [])


def test_nan_is_never_compared_in_a_file_filter(tmp_path):
    """Parts hold statistics of their key columns only: nothing a NaN could make wrong."""
    with RunWriter(tmp_path / "run") as writer:
        for step in range(9):
            writer.log_step(step, tokens=1, loss=float("nan") if step % 2 else 1.0)
    [part] = (tmp_path / "run" / "steps").iterdir()
    group = pq.read_metadata(part).row_group(0)
    with_statistics = {
        group.column(i).path_in_schema for i in range(group.num_columns) if group.column(i).statistics is not None
    }
    assert with_statistics == {"step", "phase", "rank", "segment"}
    loss = Run(tmp_path / "run").steps()["loss"].to_numpy()
    assert (loss > 0.5).sum() == 5


def test_another_layer_of_a_step_is_not_read_again_but_another_part_is(tmp_path, monkeypatch):
    path = bare_run(tmp_path / "run")

    def add(experts):
        rows = {"step": [0, 0], "phase": ["train"] * 2, "layer": [1, 3], "router": [0, 1], "token": [0, 0]}
        columns = rows | {"experts": pa.array(experts, pa.list_(pa.int8()))}
        add_part(path, "decisions", "part-r00000-000000.parquet", columns)

    add([[5], [6]])
    run = Run(path)
    assert run.decisions(0, 1)["experts"].to_list() == [[5]]
    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.ParquetFile.read_row_groups", lambda *_, **__: pytest.fail("read again"))
        assert run.decisions(0, 3)["experts"].to_list() == [[6]]
    add([[7], [8]])
    os.utime(path / "decisions" / "part-r00000-000000.parquet", (1, 1))
    assert run.refresh()
    assert run.decisions(0, 3)["experts"].to_list() == [[8]]
