"""Runs renamed, zipped, deleted, put back and brought in on the page of runs, as their files show it."""

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from app import folders, housekeeping, runs_folders
from recorder import trash
from recorder.about import read_about
from recorder.archive import export_zip

Open = Callable[..., AppTest]
Write = Callable[..., Path]


def ticked(open_page: Open, *runs: str) -> AppTest:
    """The page with these runs ticked: AppTest ticks no rows, but those ticked before are so when one comes back."""
    test = open_page("recording", **({"run": runs[0]} if len(runs) == 1 else {"runs": list(runs)}))
    test.session_state["_runs_ticked"] = runs[0]
    test._page_hash = calc_hash("runs")
    return opened(test)


def opened(test: AppTest, *panels: str) -> AppTest:
    """The page with these panels open, drawn."""
    for key in panels:
        test.session_state[key] = True
    test.run()
    assert not test.exception, test.exception
    return test


def said(test: AppTest) -> str:
    assert not test.exception, test.exception
    kinds = (test.info, test.warning, test.toast, test.markdown, test.caption, test.code)
    return "\n".join(str(element.value) for kind in kinds for element in kind).replace("\\", "")


def listed(test: AppTest) -> list[str]:
    return list(test.dataframe[0].value["run"]) if test.dataframe else []


def test_a_run_is_renamed_tagged_and_annotated(shown: Path, write_run: Write, open_page: Open) -> None:
    path = write_run(shown, "a", range(3), name="As recorded")
    write_run(shown, "b", range(3))
    before = (path / "run.json").read_bytes()
    test = opened(ticked(open_page, "a"), "panel_edit")
    assert test.text_input(key="about_name_a").placeholder == "As recorded"
    test.text_input(key="about_name_a").set_value("Better")
    test.text_input(key="about_tags_a").set_value("paper, keep")
    test.text_area(key="about_notes_a").set_value("looks odd")
    test.button(key="about_save_a").click().run()
    about = json.loads((path / "about.json").read_text())
    assert about == {"name": "Better", "notes": "looks odd", "tags": ["paper", "keep"]}
    assert (path / "run.json").read_bytes() == before
    assert not test.session_state["panel_edit"]
    line = test.dataframe[0].value.set_index("run").loc["Better"]
    assert (list(line["tags"]), line["notes"]) == (["paper", "keep"], "looks odd")
    assert "Better" in test.sidebar.selectbox(key="run").options
    opened(test, "panel_edit")
    test.text_input(key="about_tags_a").set_value("x" * 50)
    test.button(key="about_save_a").click().run()
    assert "Better could not be changed: a tag has at most 40 characters, got 50" in said(test)
    assert read_about(path).tags == ("paper", "keep")


def test_runs_are_deleted_and_put_back(shown: Path, write_run: Write, open_page: Open) -> None:
    for name in ("a", "b", "c"):
        write_run(shown, name, range(3))
    test = opened(ticked(open_page, "a", "b"), "panel_delete")
    assert "Move these **2 runs** to the trash" in said(test)
    test.button(key="delete_now").click().run()
    assert listed(test) == ["c"]
    assert sorted(run.name for run in trash.trashed(shown)) == ["a", "b"]
    assert "moved to the trash" in said(test)
    assert not test.toast, "said once, beside the way back"
    assert "runs" not in test.query_params, "no page shall look for what is gone"
    test.button(key="undo_delete").click().run()
    assert listed(test) == ["c", "b", "a"]
    assert "a and b put back" in said(test)


def test_the_trash_is_emptied_only_after_its_size_was_told_and_agreed_to(
    shown: Path, write_run: Write, open_page: Open
) -> None:
    size = sum(file.stat().st_size for file in write_run(shown, "a", range(3)).rglob("*") if file.is_file())
    trash.discard(shown / "a")
    test = opened(open_page("runs"), "panel_trash")
    assert test.title[0].value == "Runs"
    sure = test.checkbox(key="empty_trash_sure")
    assert f"1 run, {size / 1e6:.1f} MB" in sure.label
    assert test.button(key="empty_trash").disabled
    sure.check().run()
    test.button(key="empty_trash").click().run()
    assert trash.trashed(shown) == []
    assert "Removed for good: 1 run" in said(test)


def test_what_cannot_be_changed_says_why(
    shown: Path, write_run: Write, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(shown, "live", range(3), status="running")
    test = opened(ticked(open_page, "live"), "panel_delete", "panel_zip")
    assert "live: still being written. Cancel it first" in said(test)
    assert "still being written; take it when it has ended" in said(test)
    monkeypatch.setattr(folders, "_is_read_only", lambda path, samples: True)
    test = opened(ticked(open_page, "live"), "panel_edit", "panel_delete")
    assert said(test).count("which is read-only here: it can be neither renamed nor deleted") == 2
    assert "delete_now" not in [button.key for button in test.button]


def test_a_run_is_taken_as_a_zip_or_by_the_command_where_it_is_large(
    shown: Path, write_run: Write, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(shown, "a", range(3))
    test = opened(ticked(open_page, "a"), "panel_zip")
    assert [button.label for button in test.get("download_button")][:1] == ["Download the run"]
    monkeypatch.setattr(housekeeping, "MOST_DOWNLOAD_BYTES", 1000)
    test.run()
    assert f"routescope export {shown / 'a'} --out a.zip" in said(test)


def test_a_zip_is_brought_in_and_what_was_found_is_told(
    shown: Path, write_run: Write, open_page: Open, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "elsewhere", "a", range(3))
    (target := io.BytesIO()).name = "a.zip"
    export_zip(path, target)
    test = opened(open_page("runs"), "panel_bring_in")
    assert test.button(key="bring_in_now").disabled
    test.file_uploader(key="bring_in_0").set_value(("a.zip", target.getvalue(), "application/zip")).run()
    test.button(key="bring_in_now").click().run()
    assert listed(test) == ["a"]
    assert "a was brought in: 4 parts, " in said(test)
    assert "nothing wrong" in said(test)
    with zipfile.ZipFile(target, "a") as archive:
        archive.writestr("a/evil.py", "x")
    opened(test, "panel_bring_in")
    test.file_uploader(key="bring_in_1").set_value(("evil.zip", target.getvalue(), "application/zip")).run()
    test.button(key="bring_in_now").click().run()
    assert "evil.zip was not brought in: 'a/evil.py' in the zip is no file of a run" in said(test)
    assert listed(test) == ["a"]


# -------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def nothing_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_added", [])


@pytest.mark.usefixtures("nothing_added")
def test_a_folder_typed_on_the_page_is_shown_for_every_session_until_it_is_hidden(
    shown: Path, write_run: Write, open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(shown, "a", range(3))
    write_run(tmp_path / "other", "b", range(3))
    monkeypatch.setattr(runs_folders, "is_private", lambda address, url: False)
    test = opened(open_page("runs"), "panel_folders")
    assert "can be reached from other machines" in said(test)
    monkeypatch.setattr(runs_folders, "is_private", lambda address, url: True)
    test.run()
    test.text_input(key="add_folder").set_value("other")
    test.button(key="add_folder_now").click().run()
    assert listed(test) == ["b", "a"]
    assert "other" not in str(dict(test.query_params))
    again = opened(open_page("runs", run="b"), "panel_folders")
    assert listed(again) == ["b", "a"]
    again.button(key="hide_other").click().run()
    assert listed(again) == ["a"]


@pytest.mark.usefixtures("nothing_added")
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("", "Type the path"),
        ("s3://bucket/runs", "Show it from a terminal: routescope app s3://bucket/runs"),
        ("nowhere", "nowhere is no folder that can be read"),
        ("runs/a/run.json", "is no folder that can be read"),
        ("runs", "is shown already"),
        ("runs/../runs", "is shown already"),
        ("other/b", "is a run itself. Show the folder above it"),
        ("empty", "holds no runs"),
        ("x\0y", "is no folder that can be read"),
    ],
)
def test_what_is_no_folder_of_runs_is_refused(
    shown: Path, write_run: Write, tmp_path: Path, typed: str, message: str
) -> None:
    write_run(shown, "a", range(1))
    shutil.copytree(shown / "a", tmp_path / "other" / "b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        folders.add(typed)
    assert folders.added() == []


def test_folders_are_typed_only_where_nobody_else_can_reach_the_server() -> None:
    assert runs_folders.is_private("127.0.0.1", "http://localhost:8501/runs")
    assert runs_folders.is_private("127.0.0.1", None)
    assert not runs_folders.is_private(None, "http://localhost:8501/runs")
    assert not runs_folders.is_private("0.0.0.0", "http://127.0.0.1:8501")
    assert not runs_folders.is_private("127.0.0.1", "https://hub.example.org/proxy/8501/runs")
