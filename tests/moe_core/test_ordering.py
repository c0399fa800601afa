"""The order of a clustering: blocks come out whole, wherever their members stood."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core.ordering import cluster_order


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 1000))
def test_blocks_come_out_whole(sizes, seed):
    rng = np.random.default_rng(seed)
    block = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    similarity = np.where(block[:, None] == block[None, :], 0.8, 0.1) + rng.uniform(0, 0.05, (len(block), len(block)))
    order = cluster_order(similarity)
    assert sorted(order.tolist()) == list(range(len(block)))
    changes = np.count_nonzero(np.diff(block[order]))
    assert changes == len(sizes) - 1


def test_a_chain_stays_a_chain():
    place = np.array([3, 0, 4, 1, 2])
    similarity = np.exp(-np.abs(place[:, None] - place[None, :]).astype(float))
    found = place[cluster_order(similarity)]
    assert np.abs(np.diff(found)).sum() <= 6


def test_nothing_one_thing_and_no_number():
    assert cluster_order(np.zeros((0, 0))).tolist() == []
    assert cluster_order([[np.nan]]).tolist() == [0]
    assert sorted(cluster_order(np.full((4, 4), np.nan)).tolist()) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"square matrix, got shape \(2, 3\)"):
        cluster_order(np.zeros((2, 3)))
