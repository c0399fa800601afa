"""The dashboard on runs in an object store: a real S3 server, the real pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import data, folders
from recorder.storage import ObjectPath, locate
from recorder.writer import RunWriter

WriteRun = Callable[..., Any]
Open = Callable[..., AppTest]


@pytest.fixture
def remote(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectPath:
    """A folder of runs in the store, the only one shown."""
    st.cache_resource.clear()
    monkeypatch.setenv("ROUTESCOPE_DIRS", f"{s3}/runs")
    monkeypatch.chdir(tmp_path)
    folder = locate(f"{s3}/runs")
    assert isinstance(folder, ObjectPath)
    return folder


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to let what is known of the store grow old."""

    def later() -> None:
        data._stored_infos.clear()
        data._refresh.clear()

    return later


def everything(page: AppTest) -> str:
    assert not page.exception
    elements = [*page.title, *page.markdown, *page.caption, *page.warning, *page.error, *page.info, *page.code]
    return "\n".join(str(element.value) for element in elements).replace("\\", "")  # as the browser shows it


def test_folders_of_a_list(tmp_path: Path) -> None:
    given = "s3://b/x:runs:s3://c/y?endpoint_override=http://127.0.0.1:5055:more:2024"
    found = folders.shown_folders(argv=[], environ={"ROUTESCOPE_DIRS": given}, cwd=tmp_path, samples=tmp_path / "none")
    assert [str(folder.path) for folder in found] == [
        "s3://b/x",
        str(tmp_path / "runs"),
        "s3://c/y?endpoint_override=http://127.0.0.1:5055",
        str(tmp_path / "more"),
        str(tmp_path / "2024"),
    ]
    assert [folder.label for folder in found] == ["x", "runs", "y", "more", "2024"]
    assert folders.recording_folder(found) == tmp_path / "runs"


def test_only_a_store_is_given(tmp_path: Path) -> None:
    found = folders.shown_folders(argv=[str(folders.MAIN), "s3://b/x"], environ={}, cwd=tmp_path, samples=tmp_path)
    assert [str(folder.path) for folder in found] == ["s3://b/x", str(tmp_path / "runs")]
    assert folders.recording_folders(found) == [tmp_path / "runs"], "the form records here, and the store is shown"


def test_references_stay_inside(s3: str) -> None:
    shown = [folders.Folder(path=locate(f"{s3}/{name}"), label=name, read_only=False) for name in ("a", "b")]
    known = folders.references([locate(f"{s3}/{name}") for name in ("a/one", "a/two", "b/one", "c/three")], shown)
    assert {name: str(path) for name, path in known.items()} == {
        "a/one": f"{s3}/a/one",
        "two": f"{s3}/a/two",
        "b/one": f"{s3}/b/one",
    }
    for reference in (f"{s3}/a/one", f"{s3}/c/three", "c/three", "three", "../c/three", "s3://other/x"):
        assert folders.resolve(reference, known) is None


@pytest.mark.parametrize("name", ["runs", "overview", "replay", "tokens", "layouts", "settling", "placement"])
def test_every_page_draws_a_run(remote: ObjectPath, write_run: WriteRun, open_page: Open, name: str) -> None:
    write_run(remote, "a", name="In the store")
    page = open_page(name, run="a")
    assert not page.exception
    assert not page.error
    assert not page.warning
    assert "In the store" in str(page.selectbox(key="run").options)


def test_compare(remote: ObjectPath, write_run: WriteRun, open_page: Open) -> None:
    write_run(remote, "a")
    write_run(remote, "b", bias=True)
    page = open_page("compare", runs=["a", "b"])
    assert not page.exception
    assert not page.error


def test_a_growing_run_is_seen_to_grow(remote: ObjectPath, write_run: WriteRun, now: Callable[[], None]) -> None:
    write_run(remote, "a", range(3), status="running")
    run, _ = data.open_run(remote / "a")
    assert run is not None
    assert len(data.steps(run)) == 3
    with RunWriter(remote / "a", resume=True) as writer:
        writer.log_step(3, tokens=8, loss=1.0)
    now()
    run, _ = data.open_run(remote / "a")
    assert run is not None
    assert len(data.steps(run)) == 4
    assert [(one.reference, one.info.status, data.row(one)["num_steps"]) for one in data.listed()] == [
        ("a", "finished", 4)
    ]


def test_a_run_recorded_anew_is_another(remote: ObjectPath, write_run: WriteRun, now: Callable[[], None]) -> None:
    write_run(remote, "a", range(3), num_experts=4)
    run, _ = data.open_run(remote / "a")
    assert run is not None
    assert data.layer_stats(run, 1).num_experts == 4
    for table in ("steps", "layer_stats", "decisions", "tokens"):
        for name in (remote / "a" / table).entries():
            (remote / "a" / table / name).unlink()
    (remote / "a" / "run.json").unlink()
    now()
    assert data.open_run(remote / "a")[0] is None
    write_run(remote, "a", range(3), num_experts=8)
    now()
    run, _ = data.open_run(remote / "a")
    assert run is not None
    assert data.layer_stats(run, 1).num_experts == 8


def test_a_page_drawn_again_asks_little(
    remote: ObjectPath, write_run: WriteRun, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(remote, "a")
    page = open_page("overview", run="a")
    asked: list[str] = []
    for name in ("entries", "open", "exists", "is_dir"):
        original = getattr(ObjectPath, name)
        monkeypatch.setattr(
            ObjectPath, name, lambda place, original=original: asked.append(str(place)) or original(place)
        )
    page.run()
    page.run()
    assert not page.exception
    assert len(asked) <= 2 * 10, "a listing, the manifest and five tables at most, where three seconds have passed"


def test_a_run_cut_off(remote: ObjectPath, open_page: Open, write_run: WriteRun) -> None:
    write_run(remote, "a", status="running")
    writer = RunWriter(remote / "a", resume=True)
    writer.update_manifest()
    manifest = (remote / "a" / "run.json").read_bytes()
    pid = writer.manifest["process"]["pid"]
    (remote / "a" / "run.json").put(manifest.replace(f'"pid": {pid}'.encode(), b'"pid": 999999999'))
    assert "without being closed" in everything(open_page("overview", run="a"))


def test_a_store_that_cannot_be_reached(
    s3: str, open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    st.cache_resource.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROUTESCOPE_DIRS", f"{s3}/runs?endpoint_override=http://127.0.0.1:1")
    for name in ("runs", "overview"):
        said = everything(open_page(name))
        assert f"{s3}/runs" in said
        assert "cannot be reached" in said


def test_a_bucket_that_is_not_there(open_page: Open, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    st.cache_resource.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROUTESCOPE_DIRS", "s3://no-such-bucket/runs")
    assert "there is no bucket s3://no-such-bucket" in everything(open_page("runs"))


def test_the_store_goes_while_a_page_is_open(
    s3: str, wire: Any, write_run: WriteRun, open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    st.cache_resource.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROUTESCOPE_DIRS", f"{s3}/runs?endpoint_override={wire.address}")
    write_run(locate(f"{s3}/runs"), "a")
    page = open_page("overview", run="a")
    assert not page.error
    wire.down = True
    data._refresh.clear()
    page.run()
    assert "cannot be reached" in everything(page)
    wire.down = False
    page.run()
    assert "cannot be reached" not in everything(page)
