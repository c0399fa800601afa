"""A toy run that was cancelled or killed goes on as if it had never stopped, bit for bit."""

import json
import subprocess
import sys

import pandas as pd
import pytest
import torch
from in_process import routescope

from recorder import cli
from recorder.manifest import read_manifest
from recorder.reader import Run
from recorder.storage import locate
from recorder.training.config import ToyConfig
from recorder.training.continuing import CHECKPOINT, why_not
from recorder.training.corpus import Corpus, train_tokenizer
from recorder.training.loop import RunCancelledError, train

REGRESSION = {
    "task": "regression",
    "recipe": "",
    "balancer": "aux+sign-bias",
    "bias_rate": 0.01,
    "z_coef": 1e-3,
    "noise_std": 0.5,
    "num_experts": 4,
    "batch_size": 16,
    "d_model": 8,
    "steps": 12,
    "decisions_every": 1,
    "probe_every": 5,
    "lr": 0.01,
}
TEXT = {
    "recipe": "stable-latent",
    "noise_std": 0.5,
    "num_layers": 2,
    "moe_frequency": 1,
    "num_experts": 4,
    "top_k": 2,
    "d_model": 16,
    "d_ff": 16,
    "expert_d_ff": 16,
    "latent_size": 8,
    "num_heads": 2,
    "batch_size": 4,
    "seq_len": 16,
    "steps": 8,
    "decisions_every": 2,
    "probe_every": 3,
    "vocab_size": 400,
}
KILLED = """
import json, os, signal, sys
from pathlib import Path
import torch
from recorder.training.config import ToyConfig
from recorder.training.corpus import Corpus, train_tokenizer
from recorder.training.loop import train
torch.set_num_threads(1)

def step(done, loss):
    if done == 9:
        os.kill(os.getpid(), signal.SIGKILL)

train(ToyConfig.of(**json.loads(sys.argv[2])), Path(sys.argv[1]), checkpoint_seconds=0.0, on_step=step)
"""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stop_after(steps):
    asked = iter(range(10**6))
    return lambda: next(asked) >= steps  # asked before the first step and before each further one


def rows(path):
    """All that was recorded, as whoever reads the run sees it; times, segments and what was said of them left out."""
    run = Run(path)
    layer_stats = [run.layer_stats(phase=phase) for phase in ("train", "probe")]
    decisions = [
        run.decisions(step, layer, phase)
        for phase in ("train", "probe")
        for step in run.decision_steps(phase)
        for layer in sorted(run.layer_stats(phase=phase)["layer"].unique())
    ]
    steps = [run.steps(phase=phase) for phase in ("train", "probe")]
    return [
        frame.drop(columns=["wall_time_s", "segment"], errors="ignore").reset_index(drop=True)
        for frame in (*steps, *layer_stats, *decisions)
    ]


def assert_same(path, whole):
    ours, expected = rows(path), rows(whole)
    assert len(ours) == len(expected) > 4
    for frame, other in zip(ours, expected, strict=True):
        pd.testing.assert_frame_equal(frame, other, check_exact=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("whole") / "regression"
    train(ToyConfig.of(**REGRESSION), path)
    return path


def test_a_finished_run_keeps_no_checkpoint(whole):
    assert not (whole / CHECKPOINT).exists()
    assert why_not(whole, read_manifest(whole)) == "it has finished: there is no step left"


def test_a_cancelled_regression_goes_on_bit_for_bit(whole, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(RunCancelledError):
        train(ToyConfig.of(**REGRESSION), path, should_stop=stop_after(5))
    manifest = read_manifest(path)
    assert (manifest["status"], manifest["last_step"]) == ("cancelled", 4)
    assert why_not(path, manifest) is None
    # again, and then to the end, with the settings as the manifest has them
    config = ToyConfig.from_manifest(manifest)
    assert config == ToyConfig.of(**REGRESSION)
    with pytest.raises(RunCancelledError):
        train(config, path, continued=True, should_stop=stop_after(2))
    train(config, path, continued=True)
    assert_same(path, whole)
    run = Run(path)
    assert run.status == "finished"
    assert [event["message"] for _, event in run.events().iterrows() if event["kind"] == "resumed"] == [
        "segment 1 starts at step 5",
        "segment 2 starts at step 7",
    ]
    assert not (path / CHECKPOINT).exists()


def test_cancelled_text_goes_on_bit_for_bit(tmp_path):
    config = ToyConfig.of(**TEXT)
    train(config, tmp_path / "whole")
    with pytest.raises(RunCancelledError):
        train(config, tmp_path / "run", should_stop=stop_after(4))
    train(ToyConfig.from_manifest(read_manifest(tmp_path / "run")), tmp_path / "run", continued=True)
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_killed_run_goes_on_from_the_checkpoint_and_the_later_segment_wins(whole, tmp_path):
    path = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), json.dumps(REGRESSION)], capture_output=True)
    assert killed.returncode < 0, killed.stderr
    before = Run(path)
    assert before.status == "unfinished"
    at = torch.load(path / CHECKPOINT, weights_only=True)["step"]
    assert at == 8, "the checkpoint is written after the step's end, where it was killed"
    assert before.steps()["step"].max() == at - 1, "no row is missing before the checkpoint"
    assert why_not(path, read_manifest(path)) is None
    train(ToyConfig.of(**REGRESSION), path, continued=True)
    assert_same(path, whole)
    assert Run(path).segments[-1].first_step == at


def test_rows_after_the_checkpoint_are_those_of_the_later_segment(whole, tmp_path):
    path = tmp_path / "run"

    def fail(done, loss):
        if done == 9:  # its rows are written, its checkpoint is not
            raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        train(ToyConfig.of(**REGRESSION), path, checkpoint_seconds=0.0, on_step=fail)
    assert Run(path).steps()["step"].max() == 8
    train(ToyConfig.of(**REGRESSION), path, continued=True)
    assert_same(path, whole)
    first, second = Run(path).segments
    assert (first.last_step, second.first_step, second.last_step) == (7, 8, 11)


def test_a_run_in_an_object_store_goes_on_there(whole, s3):
    place = locate(f"{s3}/runs/run")
    with pytest.raises(RunCancelledError):
        train(ToyConfig.of(**REGRESSION), place, should_stop=stop_after(3))
    assert why_not(place, read_manifest(place)) is None
    train(ToyConfig.of(**REGRESSION), place, continued=True)
    assert_same(place, whole)
    assert not (place / CHECKPOINT).exists()


@pytest.fixture
def cancelled(tmp_path):
    path = tmp_path / "cancelled"
    with pytest.raises(RunCancelledError):
        train(ToyConfig.of(**REGRESSION), path, should_stop=stop_after(2))
    return path


def change(path, **changes):
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(manifest | changes))


def test_the_command_goes_on_under_the_name_it_has_now(cancelled):
    change(cancelled, name="Renamed since")
    result = routescope("record", "--continue", "cancelled", "--out", cancelled.parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(cancelled)
    run = Run(cancelled)
    assert (run.name, run.status, len(run.steps("train"))) == ("Renamed since", "finished", 12)


@pytest.mark.parametrize(
    ("spoil", "arguments", "line"),
    [
        (lambda path: None, ["--steps", "5"], "--continue takes the settings of the run: leave out --steps"),
        (lambda path: (path / CHECKPOINT).unlink(), [], "it keeps no checkpoint"),
        (lambda path: change(path, status="finished"), [], "it has finished: there is no step left"),
        (lambda path: change(path, source="my script"), [], "it was recorded by my script, not by routescope record"),
        (lambda path: change(path, config={"d_model": "wide"}), [], "its settings are not those of a toy run"),
    ],
    ids=["option", "no-checkpoint", "finished", "foreign", "odd-settings"],
)
def test_what_cannot_be_continued_is_one_line(cancelled, spoil, arguments, line, capsys):
    spoil(cancelled)
    with pytest.raises(SystemExit) as exit:
        cli.main(["record", "--continue", str(cancelled), *arguments])
    assert exit.value.code == 2
    [said] = capsys.readouterr().err.splitlines()
    assert line in said


def with_other_data(path):
    saved = torch.load(path / CHECKPOINT, weights_only=True)
    torch.save(saved | {"data": "other"}, path / CHECKPOINT)


@pytest.mark.parametrize(
    ("spoil", "settings", "line"),
    [
        (lambda path: (path / CHECKPOINT).write_bytes(b"PK"), {}, "is not a checkpoint of a toy run"),
        (lambda path: torch.save([1], path / CHECKPOINT), {}, "is not a checkpoint of a toy run"),
        (lambda path: None, {"d_model": 16}, "is of another model than the settings"),
        (with_other_data, {}, "was recorded on other text than its settings give now"),
    ],
    ids=["broken", "something-else", "another-model", "other-text"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_the_run_stays(cancelled, spoil, settings, line):
    spoil(cancelled)
    before = {file: file.read_bytes() for file in cancelled.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=line):
        train(ToyConfig.of(**REGRESSION | settings), cancelled, continued=True)
    assert {file: file.read_bytes() for file in cancelled.rglob("*") if file.is_file()} == before


def test_the_digest_tells_text_apart():
    texts = {"a": "one two three four " * 100, "b": "five six seven eight " * 100}
    tokenizer = train_tokenizer(texts, vocab_size=300, seed=0)
    digest = Corpus(texts, tokenizer, 8).digest()
    assert digest == Corpus(dict(texts), tokenizer, 8).digest()
    for other in (texts | {"b": "five six seven night " * 100}, {"a": texts["b"], "b": texts["a"]}):
        assert Corpus(other, tokenizer, 8).digest() != digest
