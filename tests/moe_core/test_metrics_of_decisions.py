"""Metrics of decisions and of ranks against hand values (cases.md) and slow, obvious references."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import metrics

pytestmark = pytest.mark.filterwarnings("error")


@st.composite
def decisions(draw, max_tokens=30, probes=None):
    """Expert ids (T, K) (or (P, T, K)), distinct within a token, some of them -1; and E."""
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(num_experts, 4)))
    shape = (draw(st.integers(0, max_tokens)),) if probes is None else (draw(probes), draw(st.integers(0, max_tokens)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = np.argsort(rng.random((*shape, num_experts)), axis=-1)[..., :top_k]
    ids[rng.random(ids.shape) < draw(st.sampled_from([0, 0.2, 1]))] = -1
    kind = draw(st.sampled_from([np.int8, np.int16, np.int64]))
    return ids.astype(kind), num_experts


def chosen(row):
    return {int(e) for e in row if e >= 0}


def mean(values):
    values = [v for v in values if not math.isnan(v)]
    return sum(values) / len(values) if values else math.nan


def overlap_of(now, reference):
    return len(chosen(now) & chosen(reference)) / len(chosen(reference)) if chosen(reference) else math.nan


class TestCoactivation:
    def test_by_hand(self):
        # expert 0 is chosen by three tokens, of which two chose 1 as well and one chose 2
        together = metrics.count_coactivation([[0, 1], [1, 0], [2, 0], [3, -1]], 5)
        assert together.tolist() == [[3, 2, 1, 0, 0], [2, 2, 0, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0] * 5]
        share = metrics.coactivation(together)
        assert share[0].tolist() == [1, 2 / 3, 1 / 3, 0, 0]
        assert share[1].tolist() == [1, 1, 0, 0, 0]
        assert np.isnan(share[4]).all()

    def test_all_pairs_not_only_neighbours_in_rank(self):
        assert metrics.count_coactivation([[0, 1, 2]], 3).tolist() == np.ones((3, 3)).tolist()

    @given(decisions())
    def test_against_sets(self, given):
        ids, num_experts = given
        expected = np.zeros((num_experts, num_experts), dtype=int)
        for row in ids:
            for a in chosen(row):
                for b in chosen(row):
                    expected[a, b] += 1
        assert metrics.count_coactivation(ids, num_experts).tolist() == expected.tolist()

    @given(decisions(), st.integers(1, 7), st.integers(1, 3))
    def test_pairs_of_two_routers_against_sets(self, given, others, k):
        ids, num_experts = given
        rng = np.random.default_rng(0)
        next_ids = rng.integers(-1, others, (len(ids), 1 if others < k else k))
        expected = np.zeros((num_experts, others), dtype=int)
        for row, then in zip(ids, next_ids, strict=True):
            for a in row:
                for b in then:
                    if a >= 0 and b >= 0:
                        expected[a, b] += 1
        assert metrics.count_pairs(ids, next_ids, num_experts, others).tolist() == expected.tolist()

    def test_more_tokens_than_one_block(self):
        rng = np.random.default_rng(0)
        ids = np.argsort(rng.random((40_000, 6)), axis=1)[:, :3]
        one_hot = np.zeros((len(ids), 6), dtype=int)
        np.put_along_axis(one_hot, ids, 1, axis=1)
        assert (metrics.count_coactivation(ids, 6) == one_hot.T @ one_hot).all()

    def test_transition_by_hand(self):
        pairs = metrics.count_pairs([[0], [0], [1]], [[1], [0], [1]], 3, 2)
        assert metrics.transition(pairs)[:2].tolist() == [[0.5, 0.5], [0, 1]]
        assert np.isnan(metrics.transition(pairs)[2]).all()

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda: metrics.count_coactivation([[0, 4]], 4), "expert id 4 is outside"),
            (lambda: metrics.count_coactivation([0, 1], 4), "shape"),
            (lambda: metrics.count_pairs([[0]], [[0], [1]], 2), "1 and of 2 tokens"),
            (lambda: metrics.coactivation([1, 2]), "experts, experts"),
            (lambda: metrics.count_coactivation([[0.5]], 4), "integers"),
        ],
    )
    def test_errors(self, call, words):
        with pytest.raises(ValueError, match=words):
            call()


class TestGateMass:
    def test_by_hand(self):
        mass = metrics.gate_mass([[2, 0], [0, -1], [2, 1]], [[0.5, 0.25], [1, 9], [0.25, np.nan]], 4)
        np.testing.assert_array_equal(mass, [1.25, np.nan, 0.75, 0])

    @given(decisions())
    def test_against_a_loop(self, given):
        ids, num_experts = given
        weights = np.random.default_rng(0).random(ids.shape, dtype=np.float32)
        expected = [0.0] * num_experts
        for row, values in zip(ids.tolist(), weights.tolist(), strict=True):
            for expert, value in zip(row, values, strict=True):
                if expert >= 0:
                    expected[expert] += value
        np.testing.assert_allclose(metrics.gate_mass(ids, weights, num_experts), expected, rtol=1e-12)

    def test_shapes_must_go_together(self):
        with pytest.raises(ValueError, match=r"\(1, 2\) and weights \(1, 1\) do not go together"):
            metrics.gate_mass([[0, 1]], [[0.5]], 2)


class TestSettling:
    probes = (
        ((0, 1), (2, 3), (0, 1), (-1, -1)),
        ((1, 0), (2, 1), (2, 1), (0, 1)),
        ((1, 0), (2, 3), (0, 3), (-1, -1)),
    )

    def test_by_hand(self):
        probes = np.array(self.probes)
        # at probe 0: all of token 0's, all of token 1's, one of two of token 2's; token 3 has no final choice
        assert metrics.saturation(probes, probes[-1]).tolist() == [2.5 / 3, 1.5 / 3, 1]
        # from probe 1 to 2, token 3 loses both of its choices
        assert metrics.churn(probes).tolist() == [1 - (1 + 0.5 + 0.5) / 3, 1 - (1 + 0.5 + 0 + 0) / 4]
        last = metrics.last_fluctuation(probes)
        assert last[:3].tolist() == [0, -1, 1]
        assert np.isnan(last[3])

    def test_order_within_a_token_does_not_matter(self):
        assert metrics.saturation([[0, 1]], [[1, 0]]) == 1

    @given(decisions(probes=st.integers(1, 5)))
    def test_against_sets(self, given):
        probes, _ = given
        final = probes[-1]
        now = [mean([overlap_of(a, b) for a, b in zip(probe, final, strict=True)]) for probe in probes]
        np.testing.assert_allclose(metrics.saturation(probes, final), now, rtol=1e-12)
        step = [
            1 - mean([overlap_of(a, b) for a, b in zip(after, before, strict=True)])
            for before, after in itertools.pairwise(probes)
        ]
        np.testing.assert_allclose(metrics.churn(probes), step, rtol=1e-12, atol=1e-15)
        last = [
            max([p for p in range(len(probes)) if probes[p, t, 0] != final[t, 0]], default=-1)
            if final[t, 0] >= 0
            else math.nan
            for t in range(probes.shape[1])
        ]
        np.testing.assert_array_equal(metrics.last_fluctuation(probes), last)

    def test_nothing_to_compare_is_undefined(self):
        assert np.isnan(metrics.saturation(np.full((2, 1), -1), np.full((2, 1), -1)))
        assert metrics.churn(np.zeros((1, 3, 2), dtype=int)).shape == (0,)


class TestSpecialisation:
    def test_domains_by_hand(self):
        share = metrics.domain_specialisation([[6, 2, 0], [0, 0, 0]], [4, 0])
        assert share[0].tolist() == [1.5, 0.5, 0]
        assert np.isnan(share[1]).all()
        assert metrics.domain_baseline(8, 2) == 0.25

    def test_vocabulary_by_hand(self):
        share = metrics.vocab_specialisation([[9, 1], [9, 0], [0, 0]], [10, 9, 0])
        assert share[0] == 0.9
        assert np.isnan(share[1:]).all(), "below 10 occurrences nothing is said"
        assert metrics.vocab_specialisation([[9, 0]], [9], min_occurrences=9).tolist() == [1]

    @given(decisions(), st.integers(1, 4))
    def test_against_counting(self, given, num_groups):
        ids, num_experts = given
        group = np.random.default_rng(1).integers(0, num_groups, len(ids))
        load = np.array([metrics.count_load(ids[group == g], num_experts)[0] for g in range(num_groups)])
        tokens = np.bincount(group, minlength=num_groups)
        domains = metrics.domain_specialisation(load, tokens)
        main = metrics.vocab_specialisation(load, tokens, min_occurrences=2)
        for g in range(num_groups):
            rows = [chosen(row) for row in ids[group == g]]
            shares = [sum(e in row for row in rows) / len(rows) if rows else math.nan for e in range(num_experts)]
            np.testing.assert_allclose(domains[g], shares)
            np.testing.assert_allclose(main[g], max(shares) if len(rows) >= 2 else math.nan)


class TestRepeats:
    def test_by_hand(self):
        # sequence 0: 3 3 3 1, sequence 1: 1 1 with position 1 missing between them
        found = metrics.count_repeats([3, 3, 3, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 0, 2])
        assert found == (2, 3)
        assert metrics.repeat_rate(*found) == 2 / 3
        assert metrics.repeat_chance([3, 1, 0, 0]) == 0.625

    def test_undefined(self):
        assert np.isnan(metrics.repeat_rate(*metrics.count_repeats([1], [0], [0])))
        assert np.isnan(metrics.repeat_chance([0, 0]))

    @given(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 2)), max_size=30))
    def test_against_a_loop(self, tokens):
        tokens = sorted(tokens, key=lambda token: token[1])
        first, sequence, position, seen = [], [], [], {}
        for choice, number in tokens:
            first.append(choice)
            sequence.append(number)
            position.append(seen.get(number, 0))
            seen[number] = position[-1] + 1
        repeats = pairs = 0
        for t in range(1, len(tokens)):
            if sequence[t] == sequence[t - 1] and first[t] >= 0 and first[t - 1] >= 0:
                pairs += 1
                repeats += first[t] == first[t - 1]
        arrays = [np.array(values, dtype=np.int64) for values in (first, sequence, position)]
        assert metrics.count_repeats(*arrays) == (repeats, pairs)

    def test_independent_neighbours_repeat_by_chance(self):
        first = np.random.default_rng(0).choice(4, size=200_000, p=[0.7, 0.1, 0.1, 0.1])
        rate = metrics.repeat_rate(*metrics.count_repeats(first, np.zeros_like(first), np.arange(len(first))))
        assert rate == pytest.approx(metrics.repeat_chance(np.bincount(first)), abs=0.005)
        assert metrics.repeat_chance(np.bincount(first)) == pytest.approx(0.52, abs=0.005)


class TestDropsByPosition:
    def test_by_hand(self):
        kept = [[True, False], [True, True], [False, False], [False, True]]
        found = metrics.count_drops_by_position([[0, 1], [0, 1], [0, -1], [1, 0]], kept, [0, 1, 0, 3])
        assert [part.tolist() for part in found] == [[2, 0, 0, 1], [3, 2, 0, 2]]
        rate = metrics.drop_rate(*found)
        assert rate[[0, 1, 3]].tolist() == [2 / 3, 0, 0.5]
        assert np.isnan(rate[2])

    def test_shapes_must_go_together(self):
        with pytest.raises(ValueError, match="do not go together"):
            metrics.count_drops_by_position([[0, 1]], [[True]], [0])


class TestRankBalancedness:
    @pytest.mark.parametrize(
        ("rank_loads", "expected"),
        [
            pytest.param([[8, 0], [8, 0]], 0.5, id="P1"),
            pytest.param([[8, 0], [0, 8]], 0.5, id="P1-averaged-over-layers-first-it-would-read-1"),
            pytest.param([[10, 30, 10, 30]] * 3, 2 / 3, id="P2"),
            pytest.param([[5, 5], [0, 0]], 1, id="a-layer-without-tokens-is-left-out"),
        ],
    )
    def test_cases(self, rank_loads, expected):
        assert metrics.rank_balancedness(rank_loads) == pytest.approx(expected, rel=1e-15)

    def test_undefined(self):
        assert np.isnan(metrics.rank_balancedness([[0, 0]]))
        with pytest.raises(ValueError, match="layers, ranks"):
            metrics.rank_balancedness([1, 2])

    @given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=5))
    def test_against_a_loop(self, layers):
        expected = mean([sum(ranks) / len(ranks) / max(ranks) if any(ranks) else math.nan for ranks in layers])
        np.testing.assert_allclose(metrics.rank_balancedness(layers), expected, rtol=1e-12)
        np.testing.assert_allclose(
            metrics.slowest_rank_cost(layers), [max(r) / (sum(r) / 3) if any(r) else math.nan for r in layers]
        )
