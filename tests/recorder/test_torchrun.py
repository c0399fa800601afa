"""Real torchrun with 2 and 4 gloo processes: what the run says against what each rank saved on its own.

The ranks run torchrun_worker.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from recorder.reader import Run

WORKER = Path(__file__).with_name("torchrun_worker.py")
LAYERS, EXPERTS = 2, 4

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
    pytest.mark.timeout(200),
]


def torchrun(ranks, mode, tmp_path, *, check=True, restarts=0, **settings):
    """Launch the workers; `check`: they must end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", str(WORKER), mode, str(tmp_path / "run"), str(tmp_path)]
    command += [f"{name}={value}" for name, value in settings.items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert (result.returncode == 0) == check, result.stderr


def train(ranks, tmp_path, *, launch, **options):
    """What each rank saw of a training."""
    torchrun(ranks, "train", tmp_path, launch=launch, **options)
    return saved(tmp_path, launch, ranks)


def saved(tmp_path, launch, ranks):
    return [torch.load(tmp_path / f"{launch}-{rank}.pt") for rank in range(ranks)]


def loads(ranks, step, layer):
    """Assignments per expert over these ranks, counted one by one."""
    counts = [0] * EXPERTS
    for seen in ranks:
        for expert in seen[step]["ids"][layer].flatten().tolist():
            counts[expert] += 1
    return counts


def mean_loss(ranks, step):
    tokens = [seen[step]["ids"][0].shape[0] for seen in ranks]
    return np.average([seen[step]["loss"] for seen in ranks], weights=tokens)


def assert_loads(run, sources):
    """sources: by step, what the ranks that recorded it saw."""
    for layer in range(LAYERS):
        assert run.load_steps(layer).tolist() == sorted(sources)
        assert run.load(layer).tolist() == [loads(sources[step], step, layer) for step in sorted(sources)]


def assert_decisions(run, sources):
    for step, ranks in sources.items():
        for layer in range(LAYERS):
            rows = run.decisions(step, layer)
            for rank, seen in enumerate(ranks):
                ids = [list(row) for row in rows["experts"][rows["rank"] == rank]]
                assert ids == seen[step]["ids"][layer].tolist(), (step, layer, rank)


def test_two_ranks(tmp_path):
    ranks = train(2, tmp_path, launch=0, first=0, last=4)
    run = Run(tmp_path / "run")
    assert (run.status, run.ranks, run.problems, run.manifest["world_size"]) == ("finished", 2, [], 2)
    sources = dict.fromkeys(range(4), ranks)
    assert_loads(run, sources)
    assert_decisions(run, sources)
    steps = run.steps()
    assert steps["step"].to_list() == [0, 1, 2, 3]
    assert steps["tokens"].to_list() == [(2 + 3) * 6] * 4
    assert steps["loss"].to_list() == pytest.approx([mean_loss(ranks, step) for step in range(4)])
    assert steps["wall_time_s"].to_list() == [2.0] * 4  # the slowest
    assert steps["learning_rate"].to_list() == [0.1 / 3] * 4  # the same on both, so to the last bit
    assert run.incomplete_steps().empty
    assert len(run.tokens(2)) == (2 + 3) * 6
    assert run.events().empty


@pytest.mark.slow
def test_rank_1_is_killed_and_all_resume_from_a_checkpoint(tmp_path):
    killed = train(2, tmp_path, check=False, launch=1, first=0, last=20, victim=1, dies_at=5)
    run = Run(tmp_path / "run")
    # rank 0 may have seen the connection break before torchrun ended it
    assert run.status in ("unfinished", "failed")
    assert run.problems == []
    assert run.ranks == 2
    first = dict.fromkeys(range(5), killed) | {5: killed[:1]}
    assert_loads(run, first)
    assert run.incomplete_steps().to_numpy().tolist() == [[5, 1, 2]]

    resumed = train(2, tmp_path, launch=2, first=3, last=7)
    run = Run(tmp_path / "run")
    assert (run.status, run.ranks, run.manifest["segment"]) == ("finished", 2, 1)
    sources = dict.fromkeys(range(3), killed) | dict.fromkeys(range(3, 7), resumed)
    assert_loads(run, sources)
    assert_decisions(run, sources)
    losses = run.steps()["loss"].to_list()
    assert losses == pytest.approx([mean_loss(sources[step], step) for step in range(7)])
    assert [(segment.first_step, segment.last_step) for segment in run.segments] == [(0, 2), (3, 6)]
    assert run.events()[["step", "kind", "message"]].to_numpy().tolist() == [
        [3, "resumed", "segment 1 starts at step 3"]
    ]
    assert run.incomplete_steps().empty


@pytest.mark.slow
def test_four_ranks_lose_rank_0_and_two_go_on(tmp_path):
    killed = train(4, tmp_path, check=False, launch=1, first=0, last=20, victim=0, dies_at=2)
    run = Run(tmp_path / "run")
    assert (run.status, run.ranks) == ("unfinished", 4)
    assert_loads(run, {0: killed, 1: killed, 2: killed[1:]})
    assert run.incomplete_steps().to_numpy().tolist() == [[2, 3, 4]]

    resumed = train(2, tmp_path, launch=2, first=2, last=4)
    run = Run(tmp_path / "run")
    assert (run.status, run.manifest["segment"], run.manifest["world_size"]) == ("finished", 1, 2)
    sources = {0: killed, 1: killed, 2: resumed, 3: resumed}
    assert_loads(run, sources)
    assert_decisions(run, sources)
    assert run.steps()["loss"].to_list() == pytest.approx([mean_loss(sources[step], step) for step in range(4)])
    assert run.incomplete_steps().empty  # two ranks are all there are in the second segment


@pytest.mark.slow
def test_torchrun_starts_all_again_and_they_go_on_without_a_process_group(tmp_path):
    torchrun(2, "without_process_group", tmp_path, restarts=1)
    before, after = (saved(tmp_path, attempt, 2) for attempt in range(2))
    run = Run(tmp_path / "run")
    assert (run.status, run.ranks, run.manifest["segment"]) == ("finished", 2, 1)
    assert_loads(run, {0: before, 1: before, 2: after})
    assert run.decisions(2, 0)["segment"].unique().tolist() == [1]  # rank 1 did not join what was there before


@pytest.mark.slow
def test_replicas_and_pipeline_stages_are_counted_once(tmp_path):
    torchrun(4, "parallel", tmp_path)

    run, ranks = Run(tmp_path / "run-replicas"), saved(tmp_path, "replicas", 4)
    assert torch.equal(ranks[0][0]["ids"][0], ranks[1][0]["ids"][0])
    shares = ranks[::2]
    assert (run.status, run.ranks, run.problems) == ("finished", 4, [])
    assert (run.manifest["world_size"], run.manifest["data_parallel_size"]) == (4, 2)
    assert_loads(run, {0: shares, 1: shares})
    assert_decisions(run, {0: shares, 1: shares})
    assert run.steps()["tokens"].to_list() == [(2 + 3) * 6] * 2
    assert run.steps()["loss"].to_list() == pytest.approx([mean_loss(shares, step) for step in range(2)])
    assert len(run.tokens(1)) == (2 + 3) * 6
    assert sorted(file.name[:11] for file in (run.path / "decisions").iterdir()) == ["part-r00000", "part-r00002"]

    run, ranks = Run(tmp_path / "run-stages"), saved(tmp_path, "stages", 4)
    assert (run.status, run.ranks, run.problems) == ("finished", 4, [])
    assert [(layer["index"], layer["module"], layer["router"]) for layer in run.moe_layers] == [
        (2, "layers.2", 0),
        (3, "layers.3", 1),
    ]
    assert run.manifest["recorded"]["text"] is None  # rank 0, which has no router, cannot tell
    shares = ranks[1::2]  # the second stage has the routers
    for layer in range(2):
        assert run.load(2 + layer).tolist() == [loads(shares, step, layer) for step in range(2)]
    steps = run.steps()
    assert steps["tokens"].to_list() == [(2 + 3) * 6] * 2
    # (12 tokens of share 0, loss `step`; 18 of share 1, loss `step + 1`)
    assert steps["loss"].to_list() == pytest.approx([18 / 30, 1 + 18 / 30])
    assert run.incomplete_steps().empty
    assert len(run.tokens(0)) == (2 + 3) * 6
