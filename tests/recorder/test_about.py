"""Names, notes and tags that people give runs: beside run.json, never in it."""

import json
import os
import subprocess
import sys

import pytest

from recorder.about import About, make_about, parse_about, read_about, write_about
from recorder.reader import Run, list_runs
from recorder.storage import locate
from recorder.writer import RunWriter


@pytest.fixture
def run(tmp_path):
    with RunWriter(tmp_path / "runs" / "first", manifest={"name": "As recorded"}) as writer:
        writer.log_step(0, tokens=8, loss=1.0)
    return writer.path


def test_a_rename_shows_everywhere_and_leaves_the_writers_file_alone(run):
    before = (run / "run.json").read_bytes()
    opened = Run(run)
    assert (opened.name, read_about(run)) == ("As recorded", About())
    stamp = opened.fingerprint
    write_about(run, make_about(name=" A better\n name ", notes="why\nso", tags="one, two , one,"))
    assert json.loads((run / "about.json").read_text()) == {
        "name": "A better name",
        "notes": "why\nso",
        "tags": ["one", "two"],
    }
    assert (run / "run.json").read_bytes() == before
    assert opened.refresh(), "figures with the old name are no longer the run's"
    assert opened.fingerprint != stamp
    assert opened.name == Run(run).name == list_runs(run.parent)[0].name == "A better name"
    assert opened.manifest["name"] == "As recorded"
    write_about(run, make_about(name="", tags=["one"]))
    assert (Run(run).name, Run(run).about.tags) == ("As recorded", ("one",))


def test_a_run_that_is_being_written_can_be_renamed(tmp_path):
    writer = RunWriter(tmp_path / "live")
    write_about(writer.path, make_about(name="Live"))
    writer.log_step(0, tokens=8, loss=1.0)
    writer.finalize()
    assert (Run(writer.path).name, Run(writer.path).status) == ("Live", "finished")


def test_runs_json_has_the_name_and_the_tags(run):
    write_about(run, make_about(name="Better", tags="b, a"))
    command = [sys.executable, "-m", "recorder.cli", "runs", str(run.parent), "--json"]
    row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]
    assert (row["name"], row["tags"], row["run_id"]) == ("Better", ["b", "a"], "first")


def test_in_an_object_store_too(s3):
    uri = f"{s3}/runs/first"
    with RunWriter(uri) as writer:
        writer.log_step(0, tokens=8, loss=1.0)
    write_about(locate(uri), make_about(name="Far away", tags="s3"))
    assert (Run(uri).name, list_runs(f"{s3}/runs")[0].about.tags) == ("Far away", ("s3",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "x" * 201}, "a name has at most 200 characters, got 201"),
        ({"notes": "x" * 20_001}, "notes have at most 20,000 characters, got 20,001"),
        ({"tags": "ok," + "y" * 41}, f"a tag has at most 40 characters, got 41: {'y' * 40}..."),
        ({"tags": [str(number) for number in range(21)]}, "a run has at most 20 tags, got 21"),
    ],
)
def test_what_is_too_long_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        make_about(**given)


@pytest.mark.parametrize(
    ("content", "about"),
    [
        (b"", None),
        (b"{", None),
        (b"[1]", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b'{"notes": "' + b"x" * 300_000 + b'"}', None),
        (b"{}", About()),
        (b'{"name": 7, "notes": ["a"], "tags": "abc", "more": 1}', About()),
        (b'{"name": "n", "tags": ["a", 5, null, "b,c", " "]}', About(name="n", tags=("a", "b c"))),
        (b'{"name": "' + b"x" * 500 + b'", "notes": "kept"}', About(notes="kept")),
        (b'{"name": "half \\ud800 pair\\u0000"}', About(name="half ? pair")),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_of_any_content_does_no_harm(run, content, about):
    assert parse_about(content) == about
    (run / "about.json").write_bytes(content)
    assert read_about(run) == (about or About())
    assert list_runs(run.parent)[0].status == "finished"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_does_no_harm(run, make):
    make(run / "about.json")
    assert Run(run).name == "As recorded"
