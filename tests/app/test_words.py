"""Numbers as pages write them."""

import math

import pytest

from app.words import percent


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.0, "0%"),
        (0.0004, "<0.1%"),
        (0.004, "0.4%"),
        (0.5049, "50%"),
        (1021 / 1024, "99.7%"),
        (0.99951, ">99.9%"),
        (1.0, "100%"),
        (math.nan, "-"),
        (None, "-"),
    ],
)
def test_none_and_all_are_said_of_none_and_all_alone(share: float | None, said: str) -> None:
    assert percent(share) == said


def test_more_decimals() -> None:
    assert [percent(share, 1) for share in (0.99951, 0.9994, 0.12345)] == [">99.9%", "99.9%", "12.3%"]
