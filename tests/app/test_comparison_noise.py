"""When a difference is called noise: against intervals worked out by hand and Student's tables."""

import numpy as np
import pytest

from app.comparison import Window, window_of
from app.comparison_noise import group_as_good, margin, pseudo_values, t_95


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


def test_of_a_mean_the_pseudo_values_are_the_stretches() -> None:
    stretches = [1.4, 0.7, 1.3, 0.8, 1.2]
    without = [np.mean(stretches[:place] + stretches[place + 1 :]) for place in range(5)]
    np.testing.assert_allclose(pseudo_values(float(np.mean(stretches)), without), stretches)


def test_of_what_is_no_mean_they_are_on_its_scale() -> None:
    # the most of summed loads over their mean, minus 1: 10 in turn to each of five experts is balanced in the sum
    loads = 10 * np.eye(5)
    without = [float((left := np.delete(loads, place, 0).sum(axis=0)).max() / left.mean() - 1) for place in range(5)]
    np.testing.assert_allclose(without, 0.25)
    np.testing.assert_allclose(pseudo_values(0.0, without), -1.0)  # single stretches read 4
    assert margin(pseudo_values(0.0, without)) == pytest.approx(0.0)


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
