"""What curves run over: tokens and time added up by hand, what is offered, and what is said about it."""

import numpy as np
import pandas as pd
import pytest

from app import x_axis


def steps_of(steps: list[int], **columns: list[float | None]) -> pd.DataFrame:
    frame = pd.DataFrame({"step": steps} | {"tokens": None, "wall_time_s": None} | columns)
    return frame.convert_dtypes(dtype_backend="pyarrow")


def test_tokens_and_time_are_those_of_the_recorded_steps_added_up() -> None:
    frame = steps_of([0, 1, 4], tokens=[100, 50, 100], wall_time_s=[1.0, 2.0, 0.5])
    tokens, time = x_axis.axis(frame, "tokens"), x_axis.axis(frame, "time")
    assert tokens.at_S is not None
    assert time.at_S is not None
    assert tokens.at_S.tolist() == [100, 150, 250]
    assert time.at_S.tolist() == [1.0, 3.0, 3.5]
    assert (tokens.title, time.title) == ("tokens so far", "time in steps so far (s)")
    assert tokens.note == "x adds up the tokens of 3 recorded steps, 60% of those from 0 to 4."
    assert "Pauses between steps are in no step." in time.note


def test_steps_of_another_phase_stand_at_the_last_one_counted() -> None:
    axis = x_axis.axis(steps_of([0, 1, 4], tokens=[100, 50, 100]), "tokens")
    assert axis.at(np.array([0, 2, 3, 4, 9])).tolist() == [100, 150, 150, 250, 250]  # type: ignore[union-attr]
    late = x_axis.axis(steps_of([5, 6], tokens=[10, 10]), "tokens")
    assert late.at(np.array([0, 5])).tolist() == [0, 10]  # type: ignore[union-attr]
    assert x_axis.STEPS.at(np.array([1, 2])) is None


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        pytest.param({"tokens": [8, 8], "wall_time_s": [0.1, 0.1]}, ["step", "tokens", "time"], id="both"),
        pytest.param({"tokens": [8, None], "wall_time_s": [0.1, 0.1]}, ["step", "time"], id="tokens with a gap"),
        pytest.param({"tokens": [0, 0], "wall_time_s": [None, None]}, ["step"], id="no tokens, no time"),
        pytest.param(
            {"tokens": [8, 8], "wall_time_s": [0.1, float("nan")]}, ["step", "tokens"], id="time not a number"
        ),
    ],
)
def test_only_what_is_known_of_every_step_is_offered(columns: dict[str, list[float | None]], names: list[str]) -> None:
    assert x_axis.offered(steps_of([0, 1], **columns)) == names


def test_an_axis_that_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of step, got 'tokens'"):
        x_axis.axis(steps_of([0, 1]), "tokens")


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0.5, "s"), (179, "s"), (180, "min"), (10_799, "min"), (10_800, "h"), (300_000, "days")]
)
def test_the_unit_fits_the_length(seconds: float, unit: str) -> None:
    assert x_axis.unit_of(seconds)[1] == unit


def test_runs_that_share_an_axis_share_its_unit() -> None:
    frame = steps_of([0, 1], wall_time_s=[30.0, 30.0])
    axis = x_axis.axis(frame, "time", longest_s=7200)
    assert axis.at_S is not None
    assert (axis.at_S.tolist(), axis.title) == ([0.5, 1.0], "time in steps so far (min)")


def test_the_table_gets_the_places_too() -> None:
    axis = x_axis.axis(steps_of([0, 2], tokens=[8, 8]), "tokens")
    frame = axis.beside(pd.DataFrame({"step": [0, 2], "loss": [2.0, 1.0]}))
    assert frame.to_dict("list") == {"step": [0, 2], "tokens so far": [8, 16], "loss": [2.0, 1.0]}
