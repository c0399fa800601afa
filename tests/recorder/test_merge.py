"""Rows of several ranks and segments as one, in odd cases; the numbers are worked out by hand."""

import math

import numpy as np
import pytest
from toy_runs import NEVER, log_stats

from recorder.reader import Run
from recorder.writer import RunWriter


@pytest.fixture
def two_ranks(tmp_path):
    return [RunWriter(tmp_path / "run", rank=rank, **NEVER) for rank in range(2)]


def read(writers):
    for writer in reversed(writers):
        writer.finalize()
    return Run(writers[0].path)


def test_a_rank_that_misses_a_step_in_between(two_ranks):
    for step in range(4):
        for rank, writer in enumerate(two_ranks):
            if (rank, step) != (1, 2):
                log_stats(writer, step, load=(4, 2) if rank else (1, 1))
                writer.log_step(step, tokens=3 if rank else 1, loss=8.0 if rank else 4.0)
    run = read(two_ranks)
    assert run.load(0).tolist() == [[5, 3], [5, 3], [1, 1], [5, 3]]
    assert run.steps()["loss"].to_list() == [7.0, 7.0, 4.0, 7.0]
    assert run.incomplete_steps().to_numpy().tolist() == [[2, 1, 2]]
    assert [str(kind) for kind in run.incomplete_steps().dtypes] == ["int64[pyarrow]"] * 3


def test_phases_are_told_apart(two_ranks):
    """A probe on one rank alone is complete; one of which a rank misses a step is not."""
    for step in range(3):
        log_stats(two_ranks[0], step, phase="probe")
        for writer in two_ranks:
            log_stats(writer, step)
            if step < 2:
                log_stats(writer, step, phase="eval")
    log_stats(two_ranks[0], 2, phase="eval")
    run = read(two_ranks)
    assert run.incomplete_steps().empty
    assert run.incomplete_steps("probe").empty
    assert run.incomplete_steps("eval")["step"].to_list() == [2]
    with pytest.raises(ValueError, match="'test'"):
        run.incomplete_steps("test")


@pytest.mark.parametrize("value", [0.1 / 3, 1e-5, 7.0, math.inf, 0.0])
def test_what_all_ranks_agree_on_stays_to_the_last_bit(two_ranks, value):
    for tokens, writer in zip((3, 7), two_ranks, strict=True):
        writer.log_step(0, tokens=tokens, learning_rate=value, grad_norm=value)
    steps = read(two_ranks).steps()
    assert (steps["learning_rate"].to_list(), steps["grad_norm"].to_list()) == ([value], [value])


def test_nan_of_one_rank_shows_and_null_of_one_does_not(two_ranks):
    two_ranks[0].log_step(0, tokens=1, loss=math.nan, ce_loss=2.0, wall_time_s=0.25)
    two_ranks[1].log_step(0, tokens=3, loss=1.0)
    steps = read(two_ranks).steps()
    assert math.isnan(steps["loss"].to_list()[0])
    assert (steps["ce_loss"].to_list(), steps["wall_time_s"].to_list()) == ([2.0], [0.25])
    assert steps["learning_rate"].isna().to_list() == [True]


def test_ranks_without_tokens_count_alike(two_ranks):
    for loss, writer in zip((1.0, 2.0), two_ranks, strict=True):
        writer.log_step(0, tokens=0, loss=loss)
    assert read(two_ranks).steps()["loss"].to_list() == [1.5]


def test_x1_resumed_with_fewer_ranks(tmp_path):
    """Steps 0 to 79 by two ranks (checkpoint at 60, killed), resumed 60 to 119 by one, with other values."""
    for segment, (ranks, steps) in enumerate([(2, range(80)), (1, range(60, 120))]):
        writers = [RunWriter(tmp_path / "run", rank=rank, resume="auto", **NEVER) for rank in range(ranks)]
        for step in steps:
            for writer in writers:
                load = np.array([step, segment + 1])
                log_stats(writer, step, load=load)
                writer.log_step(step, tokens=2, loss=float(segment))
        run = read(writers)
    assert run.steps()["loss"].to_list() == [0.0] * 60 + [1.0] * 60
    assert run.load(0).tolist() == [[2 * step, 2] for step in range(60)] + [[step, 2] for step in range(60, 120)]
    assert run.incomplete_steps().empty
    assert run.events()[["step", "kind"]].to_numpy().tolist() == [[60, "resumed"]]
