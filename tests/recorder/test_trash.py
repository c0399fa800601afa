"""Deleted runs: out of every list, back as they were, gone only when someone says so."""

import os
import signal

import pytest
from toy_runs import start

from recorder import trash
from recorder.about import make_about, write_about
from recorder.manifest import RunExistsError, RunNotFoundError
from recorder.reader import Run, list_runs
from recorder.writer import RunWriter


def write(folder, name):
    with RunWriter(folder / name, manifest={"name": f"The {name}"}) as writer:
        writer.log_step(0, tokens=8, loss=1.0)
    return writer.path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def files(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def ids(folder):
    return [info.run_id for info in list_runs(folder)]


def test_a_deleted_run_is_in_no_list_and_comes_back_byte_for_byte(folder):
    for name in ("a", "b"):
        write(folder, name)
    write_about(folder / "a", make_about(name="Mine"))
    before = files(folder / "a")
    gone = trash.discard(folder / "a")
    assert ids(folder) == ["b"]
    assert list_runs(folder / ".trash") == list_runs(gone.path.parents[1]) == []
    assert trash.trashed(folder) == [gone]
    assert (gone.name, gone.folder, gone.size) == ("Mine", folder, sum(map(len, before.values())))
    assert trash.restore(gone) == folder / "a"
    assert files(folder / "a") == before
    assert trash.trashed(folder) == []
    assert list((folder / ".trash").iterdir()) == []


def test_one_name_deleted_twice_and_another_run_in_its_place(folder):
    write(folder, "a")
    first = trash.discard(folder / "a")
    write(folder, "a")
    second = trash.discard(folder / "a")
    assert {run.path for run in trash.trashed(folder)} == {first.path, second.path}
    write(folder, "a")
    with pytest.raises(FileExistsError, match="another a in"):
        trash.restore(first)
    trash.discard(folder / "a")
    assert trash.restore(first) == folder / "a"
    trash.discard(folder / "a")
    trash.remove_for_good([second])
    with pytest.raises(FileNotFoundError, match="no longer in the trash"):
        trash.restore(second)


def test_emptying_removes_these_and_no_other(folder):
    for name in ("a", "b", "c"):
        write(folder, name)
    gone = [trash.discard(folder / name) for name in ("a", "b")]
    trash.remove_for_good(gone[:1])
    assert trash.trashed(folder) == gone[1:]
    trash.remove_for_good(trash.trashed(folder))
    assert trash.trashed(folder) == []
    assert ids(folder) == ["c"]


def test_a_run_that_is_being_written_is_refused(folder):
    writer = RunWriter(folder / "live")
    writer.log_step(0, tokens=8, loss=1.0)
    with pytest.raises(RunExistsError, match="live is still being written; cancel it first"):
        trash.discard(writer.path)
    writer.finalize()
    trash.discard(writer.path)
    assert ids(folder) == []


def test_ranks_that_outlive_a_killed_rank_0_keep_their_run(folder):
    code = """
    writer = RunWriter(args[0], flush_seconds=1e9)
    writer.log_step(0, tokens=8, loss=1.0)
    writer.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert start(code, folder / "run").wait() == -signal.SIGKILL
    part = next((folder / "run" / "steps").glob("part-r00000-*"))
    part.with_name("part-r00001-000000.parquet").write_bytes(part.read_bytes())
    with pytest.raises(RunExistsError, match="rank 1 wrote to"):
        trash.discard(folder / "run")
    os.utime(part.with_name("part-r00001-000000.parquet"), (0, 0))
    trash.discard(folder / "run")


def test_an_unreadable_run_can_be_deleted_and_a_folder_that_is_none_cannot(folder):
    write(folder, "broken")
    (folder / "broken" / "run.json").write_text("{")
    assert trash.discard(folder / "broken").name == "broken"
    (folder / "notes").mkdir()
    for name in ("notes", "nothing", ".trash"):
        with pytest.raises(RunNotFoundError):
            trash.discard(folder / name)


def test_links_are_moved_and_removed_and_never_followed(folder, tmp_path):
    kept = write(tmp_path / "elsewhere", "kept")
    (folder / "link").symlink_to(kept)
    write(folder, "holds-a-link")
    (folder / "holds-a-link" / "more").symlink_to(tmp_path / "elsewhere")
    before = files(kept)
    gone = [trash.discard(folder / name) for name in ("link", "holds-a-link")]
    assert gone[0].size == 0
    trash.remove_for_good(gone)
    assert trash.trashed(folder) == []
    assert files(kept) == before
    assert Run(kept).name == "The kept"


def test_a_trash_that_is_a_link_or_a_file_is_left_alone(folder, tmp_path):
    write(folder, "a")
    elsewhere = tmp_path / "elsewhere"
    entry = elsewhere / "20260101T000000-00000000"
    write(entry, "other")
    (folder / ".trash").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="no folder of its own"):
        trash.discard(folder / "a")
    assert trash.trashed(folder) == []
    (folder / ".trash").unlink()
    (folder / ".trash").write_text("")
    with pytest.raises(ValueError, match="no folder of its own"):
        trash.discard(folder / "a")
    assert ids(folder) == ["a"]


def test_what_others_put_into_the_trash_is_left_alone(folder):
    write(folder, "a")
    trash.discard(folder / "a")
    (folder / ".trash" / "mine").mkdir()
    (folder / ".trash" / "mine" / "diary.txt").write_text("dear")
    trash.remove_for_good(trash.trashed(folder))
    assert (folder / ".trash" / "mine" / "diary.txt").read_text() == "dear"


def test_runs_in_an_object_store_are_refused_with_the_reason(s3):
    with RunWriter(f"{s3}/runs/a") as writer:
        writer.log_step(0, tokens=8, loss=1.0)
    with pytest.raises(ValueError, match="is in an object store, which cannot move a run"):
        trash.discard(writer.path)
    assert ids(f"{s3}/runs") == ["a"]
