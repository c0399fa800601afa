"""Two real gloo processes against one: same loads, biases and router gradients. The ranks run distributed_worker.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

WORKER = Path(__file__).with_name("distributed_worker.py")
SPLITS = ("even", "uneven", "one-rank-empty")
BIASED = ("sign-bias", "quantile", "quantile-step", "quantile-histogram", "sign-bias+global-aux")
LOSSES = ("none", "global-aux", "global-z")
TIME_LIMIT = 280

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
    pytest.mark.timeout(TIME_LIMIT + 20),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(one process with all tokens, rank 0 of two, rank 1 of two)."""
    folder = tmp_path_factory.mktemp("ranks")
    # the ranks meet on this machine alone, whatever its name resolves to
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else dict(os.environ)
    ranks = [(0, 1), (0, 2), (1, 2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(of), str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, of in ranks
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return [torch.load(folder / f"{of}-{rank}.pt") for rank, of in ranks]


def assert_as_one_process(results, key):
    one, first, second = (result[key] for result in results)
    for step, (alone, a, b) in enumerate(zip(one, first, second, strict=True)):
        assert torch.equal(a["load"], alone["load"]), step
        for name, value in a["state"].items():
            assert torch.equal(value, b["state"][name]), (step, name)  # to the last bit, or ranks drift apart
            torch.testing.assert_close(value, alone["state"][name], rtol=1e-5, atol=1e-6)
        assert alone["gradient"].abs().max() > 1e-4
        for rank in (a, b):
            torch.testing.assert_close(rank["gradient"], alone["gradient"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", [*LOSSES, *BIASED])
def test_two_processes_equal_one(results, kind, split):
    assert_as_one_process(results, (kind, split))


@pytest.mark.parametrize("kind", BIASED)
def test_the_bias_that_ranks_share_has_moved(results, kind):
    biases = [value for name, value in results[1][kind, "uneven"][-1]["state"].items() if name.endswith("expert_bias")]
    assert len(biases) == 1
    assert biases[0].abs().max() > 1e-3


def test_global_losses_are_in_the_gradient(results):
    without = results[0]["none", "even"][0]["gradient"]
    for kind in ("global-aux", "global-z"):
        assert (results[0][kind, "even"][0]["gradient"] - without).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["sign-bias", "quantile", "global-aux"])
def test_under_distributed_data_parallel_with_accumulation(results, kind):
    # it copies rank 0's buffers to the others before each forward, between micro-batches too
    assert_as_one_process(results, ("ddp", kind))


def test_rows_and_shares(results):
    one, first, second = results
    assert one["rows"].shape == (0, 3)
    for rank in (first, second):  # rank 0 has no row, rank 1 has one
        assert rank["rows"].tolist() == [[10.0, 11.0, 12.0]]
    assert [result["share"].item() for result in results] == pytest.approx([1.0, 2 / 3, 4 / 3])
    assert [result["no share"].item() for result in results] == [0, 0, 0]
