"""Which folders are shown, and that a reference in a URL never leaves them."""

import os
from pathlib import Path

import pytest

from app import folders

MAIN = str(folders.MAIN)


def shown(tmp_path: Path, *given: str, environ: dict[str, str] | None = None) -> list[folders.Folder]:
    samples = tmp_path / "checkout" / "sample_runs"
    samples.mkdir(parents=True, exist_ok=True)
    return list(folders.shown_folders(argv=[MAIN, *given], environ=environ or {}, cwd=tmp_path, samples=samples))


def test_by_default_runs_here_and_the_samples(tmp_path: Path) -> None:
    found = shown(tmp_path)
    assert [folder.path for folder in found] == [tmp_path / "runs", tmp_path / "checkout" / "sample_runs"]
    assert [folder.label for folder in found] == ["runs", "sample_runs"]
    assert [folder.read_only for folder in found] == [False, True]
    assert folders.recording_folder(found) == tmp_path / "runs"


def test_given_folders_replace_the_default_and_win_over_the_environment(tmp_path: Path) -> None:
    found = shown(tmp_path, "a", str(tmp_path / "b"), "a/../a", environ={"ROUTESCOPE_DIRS": "c"})
    assert [folder.path for folder in found] == [tmp_path / "a", tmp_path / "b"]


def test_environment(tmp_path: Path) -> None:
    found = shown(tmp_path, environ={"ROUTESCOPE_DIRS": os.pathsep.join(["x/runs", "", "y/runs"])})
    assert [folder.path for folder in found] == [tmp_path / "x/runs", tmp_path / "y/runs"]
    assert [folder.label for folder in found] == ["runs", "runs-2"]


def test_arguments_of_another_program_do_not_count(tmp_path: Path) -> None:
    found = folders.shown_folders(argv=["pytest", "tests"], environ={}, cwd=tmp_path, samples=tmp_path / "none")
    assert [folder.path for folder in found] == [tmp_path / "runs"]


def test_samples_stay_read_only_when_named(tmp_path: Path) -> None:
    found = shown(tmp_path, "checkout/sample_runs")
    assert found[0].read_only
    assert folders.recording_folder(found) == tmp_path / "runs", "a recording must go somewhere, and be shown"


@pytest.mark.skipif(os.name != "posix", reason="write permission is a matter of POSIX modes here")
def test_a_folder_that_is_a_file_or_below_one_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert [folder.read_only for folder in shown(tmp_path, "file", "file/below")[:2]] == [True, True]


def references(tmp_path: Path) -> dict[str, Path]:
    both = [
        folders.Folder(path=tmp_path / "a", label="a", read_only=False),
        folders.Folder(path=tmp_path / "b", label="b", read_only=True),
    ]
    return folders.references(
        [tmp_path / "a" / "one", tmp_path / "a" / "two", tmp_path / "b" / "one", tmp_path / "elsewhere" / "three"], both
    )


def test_references_are_names_and_say_the_folder_only_where_needed(tmp_path: Path) -> None:
    assert references(tmp_path) == {
        "a/one": tmp_path / "a" / "one",
        "two": tmp_path / "a" / "two",
        "b/one": tmp_path / "b" / "one",
    }


@pytest.mark.parametrize("name", ["007", "010", "run=1e3"], ids=lambda name: f"D3-{name}")
def test_d3_names_stay_strings(tmp_path: Path, name: str) -> None:
    folder = folders.Folder(path=tmp_path, label="runs", read_only=False)
    known = folders.references([tmp_path / name], [folder])
    assert folders.resolve(name, known) == name


@pytest.mark.parametrize(
    ("reference", "meant"),
    [("a/one", "a/one"), ("two", "two"), ("one", "a/one"), ("a/two", "two"), ("b/two", None), ("three", None)],
)
def test_resolve(tmp_path: Path, reference: str, meant: str | None) -> None:
    assert folders.resolve(reference, references(tmp_path)) == meant


@pytest.mark.parametrize(
    "reference", ["..", "../a/one", "/a/one", "/one", "a/../a/one", "", "a", ".", "a\\one", "one\0"]
)
def test_resolve_stays_inside(tmp_path: Path, reference: str) -> None:
    assert folders.resolve(reference, references(tmp_path)) is None
