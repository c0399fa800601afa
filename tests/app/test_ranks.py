"""The overview says from how many ranks its numbers come."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from recorder.writer import RunWriter


def rank_1(path: Path, steps: range) -> None:
    writer = RunWriter(path, rank=1)
    for step in steps:
        writer.log_step(step, tokens=8, loss=1.0, ce_loss=1.0)
        for router, layer in enumerate((1, 3)):
            load_E = np.full(4, 2)
            writer.log_layer_stats(
                step, layer=layer, router=router, tokens=8, load=load_E, gate_mass=load_E, mean_prob=load_E / 8
            )
    writer.finalize()


def close(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(manifest | {"status": "finished", "process": None} | changes))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (range(10), "Rows of 2 ranks, added up."),
        (range(9), "Step 9 has rows of only 1 of 2 data-parallel ranks: a load that falls there is no real fall."),
        (range(6), "Of steps 6 to 9, 4 have rows of only 1 of 2 data-parallel ranks: a load that falls"),
    ],
)
def test_two_ranks(
    shown: Path,
    write_run: Callable[..., Path],
    open_page: Callable[..., AppTest],
    steps: range,
    said: str,
) -> None:
    path = write_run(shown, "a", range(10), status="running")
    rank_1(path, steps)
    close(path, world_size=2)
    test = open_page("overview", run="a")
    assert not test.exception, test.exception
    captions = [caption.value for caption in test.caption if "ranks" in caption.value]
    assert len(captions) == 1
    assert said in captions[0]
    assert ("no real fall" in captions[0]) == (len(steps) < 10)


def test_one_rank_of_two(shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]) -> None:
    close(write_run(shown, "a", range(10)), world_size=2)
    test = open_page("overview", run="a")
    assert [caption.value for caption in test.caption if "ranks" in caption.value] == [
        "Rows of 1 of 2 ranks: loads are of the tokens that these saw."
    ]


def test_one_rank_says_nothing(shown: Path, write_run: Callable[..., Path], open_page: Callable[..., AppTest]) -> None:
    write_run(shown, "a", range(10))
    assert not [caption.value for caption in open_page("overview", run="a").caption if "rank" in caption.value]
