"""The Python blocks of the README and of docs/ run as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import python

from recorder import Run
from recorder.verify import verify_run

ROOT = Path(__file__).parent.parent
OWN_MODEL = ROOT / "docs" / "record-your-own-model.md"


def python_blocks(file):
    return re.findall(r"```python\n(.*?)```", file.read_text(), flags=re.DOTALL)


def block_of(file, heading):
    """The Python blocks under one heading."""
    section = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", file.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert section, heading
    return re.findall(r"```python\n(.*?)```", section[1], flags=re.DOTALL)


def run_python(folder, *arguments, **options):
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=200, **options
    )
    assert result.returncode == 0, result.stderr
    return result


def sound(run):
    assert verify_run(run).problems == ()
    return Run(run)


README = python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("block", README, ids=[block.splitlines()[0][:40] for block in README])
def test_readme_blocks_run(block, tmp_path):
    (tmp_path / "sample_runs").symlink_to(ROOT / "sample_runs")
    python(block, tmp_path)


def test_a_plain_loop(tmp_path):
    plain, writing, resumed = block_of(OWN_MODEL, "A plain loop")
    run_python(tmp_path, "-c", plain)
    run = sound(tmp_path / "runs" / "plain-loop")
    assert run.status == "finished"
    assert run.steps("train").tokens.tolist() == [2 * (4 * 16 - 5)] * 10
    assert run.load(0).sum(axis=1).tolist() == [2 * 2 * (4 * 16 - 5)] * 10
    assert run.steps("probe").step.tolist() == [4, 9]

    python(writing, tmp_path)
    run = sound(tmp_path / "runs" / "writing")
    assert run.load(0, phase="generate").sum() == 2 * 2 * (8 + 5 - 1)  # the last token is written, not read
    assert run.tokens(0, phase="generate").token_id.notna().all()

    python(resumed, tmp_path)
    run = sound(tmp_path / "runs" / "resumed")
    assert run.steps("train").step.tolist() == list(range(10))
    assert run.steps("train").segment.tolist() == [0] * 4 + [1] * 6
    assert run.events().kind.tolist() == ["resumed"]


@pytest.mark.slow
def test_trainer(tmp_path):
    (block,) = block_of(OWN_MODEL, "transformers' Trainer")
    run_python(tmp_path, "-c", block)
    run = sound(tmp_path / "runs" / "trainer")
    assert run.status == "finished"
    steps = run.steps("train")
    assert steps.tokens.tolist() == [2 * 4 * 16] * 10
    assert steps[["loss", "grad_norm", "learning_rate"]].notna().all(axis=None)


def test_torchrun(tmp_path):
    (block,) = block_of(OWN_MODEL, "Many processes: torchrun")
    (tmp_path / "train.py").write_text(block)
    command = re.search(r"^torchrun (.*)$", OWN_MODEL.read_text(), flags=re.MULTILINE)
    assert command
    run_python(tmp_path, "-m", "torch.distributed.run", *command[1].split(), env=os.environ | {"OMP_NUM_THREADS": "1"})
    run = sound(tmp_path / "runs" / "torchrun")
    assert run.ranks == 2
    assert run.load(1).sum(axis=1).tolist() == [2 * 2 * 4 * 16] * 10


def test_object_store(tmp_path, s3):
    (block,) = block_of(OWN_MODEL, "Into an object store: S3")
    printed = run_python(tmp_path, "-c", block.replace("s3://my-bucket", s3)).stdout
    assert sum(map(int, re.findall(r"\d+", printed))) == 10 * 4 * 16 * 2
    command = re.search(r"^routescope (summary s3://.*)$", OWN_MODEL.read_text(), flags=re.MULTILINE)
    assert command
    shown = run_python(tmp_path, "-m", "recorder.cli", *command[1].replace("s3://my-bucket", s3).split()).stdout
    assert "finished, last step 9" in shown


@pytest.mark.slow
def test_a_router_of_your_own(tmp_path):
    (block,) = block_of(OWN_MODEL, "A router of your own")
    run_python(tmp_path, "-c", block)
    assert sound(tmp_path / "runs" / "my-gate").load(1).sum() == 64


def test_the_notebook(tmp_path):
    (tmp_path / "sample_runs").symlink_to(ROOT / "sample_runs")
    printed = run_python(tmp_path, str(ROOT / "docs" / "notebook.py")).stdout
    plain, planned, spare = [float(value) for value in re.findall(r"(?m)^(?:experts in|a plan).*: ([\d.]+)$", printed)]
    assert plain >= planned > spare >= 1
    assert "without specialisation: 0.25" in printed


def test_analysis(tmp_path):
    (tmp_path / "sample_runs").symlink_to(ROOT / "sample_runs")
    printed = run_python(tmp_path, "-c", "\n".join(python_blocks(ROOT / "docs" / "analysis.md"))).stdout
    costs = [float(line) for line in printed.splitlines() if re.fullmatch(r"1\.\d+", line)]
    assert len(costs) == 2
    assert costs[1] < costs[0]


def test_links_lead_somewhere():
    for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)", file.read_text()):
            assert (file.parent / target).exists(), f"{file.name}: {target}"


def test_pictures_are_there():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(pictures) == 3
    assert all((ROOT / picture).stat().st_size > 10_000 for picture in pictures)
