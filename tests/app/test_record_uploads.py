"""Text that is uploaded: what is refused, in one line each, and where the rest is kept."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from app import jobs, record_uploads
from recorder import trash
from recorder.training.texts import MAX_DOMAIN_BYTES, user_texts


@dataclass(frozen=True)
class File:
    name: str
    content: bytes

    def getvalue(self) -> bytes:
        return self.content


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (File("latin.txt", "Grüße".encode("latin-1")), "latin.txt is not UTF-8 text: save it in that encoding"),
        (File("wide.md", "words".encode("utf-16")), "wide.md is not UTF-8 text: save it in that encoding"),
        (File("picture.txt", b"\x89PNG\0\0"), "picture.txt is not UTF-8 text: save it in that encoding"),
        (File("blank.py", b" \n"), "blank.py is empty"),
        (File("notes.pdf", b"words"), "notes.pdf: only txt, md, py files are taken"),
        (File("big.txt", b"a" * (MAX_DOMAIN_BYTES + 2**20)), "big.txt has 33 MB, at most 32 are taken"),
    ],
    ids=lambda value: value.name if isinstance(value, File) else "",
)
def test_what_cannot_be_recorded_is_one_line(file: File, line: str) -> None:
    assert record_uploads.problems([File("fine.txt", b"words"), file]) == [line]


def test_files_are_kept_under_their_names_and_read_as_domains(tmp_path: Path) -> None:
    files = [
        File("notes.TXT", "\ufeffGrüße\r\n".encode()),
        File("../../etc/passwd.md", b"one"),
        File("C:\\x\\two.md", b"two"),
        File(".hidden.py", b"three"),
        File("a/<b>*.txt", b"four"),
    ]
    paths = record_uploads.keep(files, tmp_path)
    assert all(Path(path).resolve().is_relative_to(tmp_path / ".uploads") for path in paths)
    assert [Path(path).read_bytes() for path in paths] == [file.content for file in files]
    assert user_texts(paths, taken=["passwd"]) == {
        "notes": "Grüße\n",
        "passwd-2": "one",
        "two": "two",
        "hidden": "three",
        "b": "four",
    }
    assert record_uploads.keep(files, tmp_path) == paths
    assert len([file for file in (tmp_path / ".uploads").rglob("*") if file.is_file()]) == len(files)
    [same_name] = record_uploads.keep([File("two.md", b"other")], tmp_path)
    assert same_name not in paths


def test_texts_that_nothing_refers_to_any_more_are_removed(tmp_path: Path, write_run: Callable[..., Path]) -> None:
    names = ("run", "trash", "waits", "over", "nobody", "new")
    uploads = [File(f"{name}.txt", name.encode()) for name in names]
    paths = dict(
        zip(("run", "trash", "waits", "over", "nobody", "new"), record_uploads.keep(uploads, tmp_path), strict=True)
    )
    for name in ("run", "trash"):
        file = write_run(tmp_path, name, range(1)) / "run.json"
        manifest = json.loads(file.read_text())
        manifest["config"]["corpus"] = ["elsewhere.txt", paths[name]]
        file.write_text(json.dumps(manifest))
    thrown = trash.discard(tmp_path / "trash")
    for name, place in (("waits", 1.0), ("over", None)):
        (tmp_path / ".jobs").mkdir(exist_ok=True)
        command = ["routescope", "record", "--corpus", paths[name]]
        jobs.write(jobs.Job(run_id=name, out=str(tmp_path), command=command, pid=0, started_at=1, steps=1, place=place))
    stray = tmp_path / ".uploads" / "mine"
    stray.mkdir()
    for folder in (stray, *(Path(path).parent for name, path in paths.items() if name != "new")):
        os.utime(folder, (1, 1))

    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    record_uploads.remove_unused(tmp_path)
    assert all(Path(path).exists() for path in paths.values()), "one that cannot be read may need any of them"
    shutil.rmtree(broken)

    record_uploads.remove_unused(tmp_path)
    assert {name for name, path in paths.items() if Path(path).exists()} == {"run", "trash", "waits", "new"}
    assert stray.exists(), "not named as ours are"
    trash.remove_for_good([thrown])
    record_uploads.keep([File("run.txt", b"run")], tmp_path)
    assert {name for name, path in paths.items() if Path(path).exists()} == {"run", "waits", "new"}
