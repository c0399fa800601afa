"""When a difference is called noise: against intervals worked out by hand and Student's tables."""

import numpy as np
import pytest

from app.comparison import Window, window_of
from app.comparison_noise import as_good, group_as_good, margin, t_95


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (4, 2.776), (4.9, 2.776), (10.5, 2.228), (19, 2.131), (25, 2.086), (1e6, 1.96)]
)
def test_t_is_that_of_the_tables_and_never_too_small(freedom: float, t: float) -> None:
    assert t_95(freedom) == t


def test_no_freedom_no_t() -> None:
    with pytest.raises(ValueError, match="freedom=0.5 must be at least 1"):
        t_95(0.5)


def test_margin_by_hand() -> None:
    # mean 3, squared deviations 4 + 1 + 0 + 1 + 4 = 10, variance 10/4, error sqrt(2.5/5) = 0.7071
    assert margin([1, 2, 3, 4, 5]) == pytest.approx(2.776 * 0.5**0.5)
    assert np.isnan(margin([1.0]))


def test_a_steady_distance_counts_and_a_wavering_one_does_not() -> None:
    steady = [1.01, 1.02, 1.01, 1.02, 1.01]
    assert not as_good([1.0] * 5, steady, "lower")
    assert as_good([1.0] * 5, steady, "higher"), "more is better here"
    assert as_good([1.0] * 5, [1.4, 0.7, 1.3, 0.8, 1.2], "lower")
    assert as_good([1.0] * 5, [1.0] * 5, "lower")


def test_groups_are_told_apart_by_their_spread_and_not_where_one_is_alone() -> None:
    # means 1 and 3, variances 1 and 1, error sqrt(1/3 + 1/3) = 0.8165, 4 degrees of freedom: 2.267 > 2
    assert group_as_good([0, 1, 2], [2, 3, 4], "lower") is True
    # means 1 and 4: 3 > 2.267
    assert group_as_good([0, 1, 2], [3, 4, 5], "lower") is False
    assert group_as_good([1.0], [5.0, 6.0], "lower") is None
    assert group_as_good([1.0, 1.0], [1.0, 1.0], "lower") is True
    assert group_as_good([1.0, 1.0], [2.0, 2.0], "lower") is None


def test_a_window_is_cut_into_five_stretches_in_order() -> None:
    window = window_of(np.arange(0, 120, 2))
    assert [len(part) for part in window.stretches] == [10] * 5
    assert sum(window.stretches, ()) == window.steps == tuple(range(20, 120, 2))
    assert [len(part) for part in window_of(np.arange(7)).stretches] == [2, 2, 1, 1, 1]
    assert window_of(np.arange(4)).stretches == []
    assert Window(steps=(), shared=False, words="").stretches == []
