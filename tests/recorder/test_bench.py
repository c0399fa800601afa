"""`routescope bench dispatch`: what it measures, prints and refuses."""

import json

import pytest
import torch
from in_process import routescope

from recorder.bench import _peak_bytes, measure_dispatch
from recorder.dispatch_shape import DispatchShape

SMALL = DispatchShape(d_model=16, d_ff=8, num_experts=4, top_k=2, num_tokens=30)


def test_dispatchers_agree_and_every_one_is_timed():
    report = measure_dispatch(SMALL, rounds=3)
    timings = {timing.name: timing for timing in report.timings}
    assert set(timings) == {"dense", "routing", "layer", "auto", "naive", "masked", "sorted", "grouped"}
    assert sum(report.load) == 60
    assert timings["dense"].relative == 1
    for timing in timings.values():
        assert timing.milliseconds >= timing.least_milliseconds > 0
        assert timing.peak_mib > 0
    assert timings["naive"].difference == 0
    assert max(timings[name].difference for name in ("auto", "masked", "sorted", "grouped")) < 1e-4
    assert timings["dense"].difference is None
    assert 0 < report.routing_share < 1


def test_a_peer_that_errs_is_seen():
    def twice(bank):
        return (lambda x, ids, weights: 2 * x), list(bank.parameters())

    report = measure_dispatch(SMALL, names=["naive"], peers={"twice x": twice}, rounds=1)
    assert report.timings[-1].name == "twice x"
    assert report.timings[-1].difference > 0.1


def test_memory_of_one_run():
    mebibyte = torch.empty(2**18)  # float32

    def three_at_most():
        a = mebibyte + 1
        b = a + 1
        return (a + b).sum()

    assert _peak_bytes(three_at_most) == pytest.approx(3 * 2**20, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_ff": 0}, "d_ff=0"),
        ({"activation": "relu"}, "'relu'"),
        ({"skew": float("nan")}, "skew=nan"),
        ({"top_k": 5}, "top_k=5.*num_experts=4"),
        ({"num_tokens": -1}, "num_tokens=-1"),
    ],
)
def test_bad_shapes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DispatchShape(**{"num_experts": 4, **changes})


def test_bad_rounds_and_names_are_named():
    with pytest.raises(ValueError, match="rounds=0"):
        measure_dispatch(SMALL, rounds=0)
    with pytest.raises(ValueError, match="'magic'"):
        measure_dispatch(SMALL, names=["magic"])


def test_the_command_prints_a_table_or_json():
    options = ["--d-model", "16", "--d-ff", "8", "--num-experts", "4", "--tokens", "30", "--rounds", "2"]
    plain = routescope("bench", "dispatch", *options, "--threads", "1")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "1 threads" in plain.stdout
    for name in ("dense", "routing", "auto", "naive", "masked", "sorted", "grouped"):
        assert f"\n{name} " in plain.stdout
    told = routescope("bench", "dispatch", *options, "--json", "--progress")
    assert told.stderr.splitlines() == ["round 0 of 2", "round 1 of 2", "round 2 of 2"]
    result = json.loads(told.stdout)
    assert result["shape"]["num_tokens"] == 30
    assert len(result["load"]) == 4
    keys = {"name", "milliseconds", "least_milliseconds", "relative", "peak_mib", "difference", "rounds"}
    assert set(result["timings"][0]) == keys


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-k", "9"], "--top-k 9 is not between 1 and --num-experts 8"),
        (["--tokens", "0"], "--tokens 0 is not between 1 and 10000000"),
        (["--activation", "relu"], "'relu' is unknown"),
        (["--rounds", "0"], "--rounds 0"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    result = routescope("bench", "dispatch", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
