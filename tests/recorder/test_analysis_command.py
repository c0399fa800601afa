"""`routescope analyse`."""

import json
import shutil
from pathlib import Path

import pytest

from recorder.cli import main

SAMPLES = Path(__file__).parents[2] / "sample_runs"


def run_command(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["analyse", *map(str, arguments)])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_a_run_is_analysed_once(tmp_path, capsys):
    shutil.copytree(SAMPLES / "top2-shared", tmp_path / "mine")
    code, out, _ = run_command(capsys, tmp_path / "mine")
    assert code == 0
    assert out.startswith("top2-shared: 3 of 3 results counted anew, kept in ")
    code, out, _ = run_command(capsys, tmp_path / "mine", "--json")
    report = json.loads(out)
    assert (code, report["kept"], report["read_jobs"], report["counted_jobs"]) == (0, True, 3, 0)
    assert report["tables"]["coactivation"] == 2 * 2 * 8
    assert {(row["phase"], row["layer"]) for row in report["layers"]} == {
        (phase, layer) for phase in ("train", "probe") for layer in (1, 3)
    }
    assert all(row["assignments"] == 2 * row["tokens"] for row in report["layers"])


def test_samples_stay_as_they_are(capsys):
    code, out, _ = run_command(capsys, SAMPLES / "top2-shared")
    assert code == 0
    assert "not kept: sample runs are read-only" in out
    assert not (SAMPLES / "top2-shared" / "analysis").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing-here"], 2, "no run 'nothing-here'"),
        ([SAMPLES / "none", "--scheduler", "nonsense://"], 2, "--scheduler nonsense://: "),
    ],
)
def test_errors_are_one_line(arguments, code, words, capsys):
    found, out, err = run_command(capsys, *arguments)
    assert (found, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1
