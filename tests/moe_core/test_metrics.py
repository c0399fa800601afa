"""Load metrics against hand values (cases.md) and slow, obvious references."""

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_core import curves, metrics

# A RuntimeWarning on zeros would fail every test here.
pytestmark = pytest.mark.filterwarnings("error")

NAN = float("nan")
LOAD_METRICS = (
    *("max_violation", "load_cv", "effective_experts", "gini"),
    *("min_load", "max_load", "dead_experts", "idle_experts"),
)

counts = st.lists(st.integers(0, 500), min_size=1, max_size=40)
load_tables = st.integers(1, 6).flatmap(
    lambda num_experts: st.lists(
        st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts), min_size=1, max_size=30
    )
)
any_float = st.floats(allow_nan=True, allow_infinity=True, width=32)


def reference_metrics(load: list[int]) -> dict[str, float]:
    """Straight from the definitions, one Python number at a time."""
    total, num_experts = sum(load), len(load)
    if total == 0:
        return dict.fromkeys(LOAD_METRICS, NAN)
    mean = Fraction(total, num_experts)
    entropy = sum(-c / total * math.log(c / total) for c in load if c)
    return {
        "max_violation": float(max(load) / mean - 1),
        "load_cv": math.sqrt(sum((c - mean) ** 2 for c in load) / num_experts) / mean,
        "effective_experts": math.exp(entropy),
        "gini": float(sum(abs(a - b) for a in load for b in load) / (2 * num_experts**2 * mean)),
        "min_load": min(load),
        "max_load": max(load),
        "dead_experts": sum(c == 0 for c in load),
        "idle_experts": sum(c < mean / 10 for c in load),
    }


class TestX10:
    """Loads [40,20,20,0], [20] x 8, [80, 0 x 7], and a layer with no tokens."""

    uneven = (40, 20, 20, 0)
    even = (20,) * 8
    collapsed = (80,) + (0,) * 7
    no_tokens = (0,) * 4

    def test_x10_load_ratio(self) -> None:
        assert metrics.load_ratio(self.uneven).tolist() == [2, 1, 1, 0]
        assert metrics.load_ratio(self.even).tolist() == [1] * 8
        assert metrics.load_ratio(self.collapsed).tolist() == [8] + [0] * 7
        assert np.isnan(metrics.load_ratio(self.no_tokens)).all()

    @pytest.mark.parametrize(
        ("name", "uneven", "even", "collapsed"),
        [
            pytest.param("load_entropy", 0.75, 1, 0, id="X10-entropy"),
            pytest.param("effective_experts", 2**1.5, 8, 1, id="X10-effective"),
            pytest.param("max_violation", 1, 0, 7, id="X10-max_violation"),
            pytest.param("load_cv", math.sqrt(0.5), 0, math.sqrt(7), id="X10-cv"),
            pytest.param("gini", 0.375, 0, 0.875, id="X10-gini"),
            pytest.param("min_load", 0, 20, 0, id="X10-min"),
            pytest.param("max_load", 40, 20, 80, id="X10-max"),
            pytest.param("dead_experts", 1, 0, 7, id="X10-dead"),
            pytest.param("idle_experts", 1, 0, 7, id="X10-idle"),
        ],
    )
    def test_x10_load_metrics(self, name: str, uneven: float, even: float, collapsed: float) -> None:
        metric = getattr(metrics, name)
        assert metric(self.uneven) == pytest.approx(uneven, abs=1e-12)
        assert metric(self.even) == pytest.approx(even, abs=1e-12)
        assert metric(self.collapsed) == pytest.approx(collapsed, abs=1e-12)
        assert math.isnan(metric(self.no_tokens))
        # Stacked, each row says the same, and leading axes stay.
        stacked = metric([[self.even], [self.collapsed], [[0] * 8]])
        assert stacked.shape == (3, 1)
        np.testing.assert_allclose(stacked[:, 0], [even, collapsed, NAN], atol=1e-12)

    def test_x10_masks(self) -> None:
        assert metrics.dead_mask(self.uneven).tolist() == [False, False, False, True]
        assert metrics.dead_mask(self.collapsed).tolist() == [False] + [True] * 7
        # No data is not "never used".
        assert not metrics.dead_mask(self.no_tokens).any()
        assert not metrics.idle_mask(self.no_tokens).any()

    def test_x10_aux_loss_of_no_tokens(self) -> None:
        assert math.isnan(metrics.aux_loss(self.no_tokens, [0.25] * 4))

    def test_x10_bound_is_reached_by_full_collapse(self) -> None:
        assert metrics.max_violation_bound(8, 1) == 7 == metrics.max_violation(self.collapsed)
        assert metrics.max_violation_bound(8, 2) == 3
        assert metrics.max_violation_bound(4, 4) == 0


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [pytest.param(8, 2, id="X9-8-2"), pytest.param(32, 4, id="X9-32-4"), pytest.param(128, 8, id="X9-128-8")],
)
def test_x9_balanced_aux_loss_is_one(num_experts: int, top_k: int) -> None:
    tokens = 256
    load = np.full(num_experts, tokens * top_k // num_experts)
    assert load.sum() == tokens * top_k
    assert metrics.aux_loss(load, np.full(num_experts, 1 / num_experts)) == pytest.approx(1.0, abs=1e-12)


def test_c1_aux_loss_per_layer_not_pooled() -> None:
    # Logit 5 on the layer's own expert: P = e^5 / (e^5 + 3) there.
    own, other = math.exp(5) / (math.exp(5) + 3), 1 / (math.exp(5) + 3)
    load = 8 * np.eye(4)
    mean_prob = np.where(np.eye(4) == 1, own, other)
    np.testing.assert_allclose(metrics.aux_loss(load, mean_prob), [3.9207] * 4, atol=5e-5)
    assert metrics.aux_loss(load.sum(axis=0), mean_prob.mean(axis=0)) == pytest.approx(1.0)


def test_c4_aux_loss() -> None:
    assert metrics.aux_loss([6, 2, 0, 0], [0.7153, 0.25, 0.0174, 0.0174]) == pytest.approx(2.3958, abs=2e-4)


def test_c30_only_layers_with_a_loss_enter_the_mean() -> None:
    # Four blocks, MoE at 1 and 3; blocks 0 and 2 have no load: NaN (null where stored), not 0.
    load = np.array([[0, 0], [8, 2], [0, 0], [5, 5]])
    losses = metrics.aux_loss(load, [[0.5, 0.5], [2 / 3, 1 / 3], [0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(losses, [NAN, 1.2, NAN, 1.0], atol=1e-12)
    assert np.nanmean(losses) == pytest.approx(1.1)


class TestCountLoad:
    def test_c28_sentinels(self) -> None:
        load, unrouted = metrics.count_load([0, 1, -1, 3, 3, -1], 4)
        assert load.tolist() == [1, 1, 0, 2]
        assert load.dtype == np.int64
        assert unrouted == 2

    def test_c28_any_leading_shape(self) -> None:
        load, unrouted = metrics.count_load(np.array([[[0, 1], [-1, 3]], [[3, -1], [0, 0]]]), 4)
        assert load.tolist() == [3, 1, 0, 2]
        assert unrouted == 2

    def test_r16_wide_ids(self) -> None:
        load, unrouted = metrics.count_load(np.array([0, 299, -1], dtype=np.int16), 300)
        assert (load[0], load[299], load.sum(), unrouted) == (1, 1, 2, 1)
        load, unrouted = metrics.count_load(np.array([255, 255], dtype=np.uint8), 256)
        assert (load[255], unrouted) == (2, 0)

    @pytest.mark.parametrize("ids", [[], np.zeros((0, 2), dtype=np.int64)])
    def test_nothing_to_count(self, ids: object) -> None:
        load, unrouted = metrics.count_load(ids, 3)  # type: ignore[arg-type]
        assert (load.tolist(), unrouted) == ([0, 0, 0], 0)

    @pytest.mark.parametrize(
        ("ids", "named"),
        [
            ([0, 4], "expert id 4"),
            ([-2, 1], "expert id -2"),
            (np.array([2**64 - 1], dtype=np.uint64), f"expert id {2**64 - 1}"),
            ([0.0, 1.0], "float64"),
        ],
    )
    def test_refuses_what_is_no_expert(self, ids: object, named: str) -> None:
        with pytest.raises(ValueError, match=named):
            metrics.count_load(ids, 4)  # type: ignore[arg-type]

    @given(st.lists(st.integers(-1, 6), max_size=50))
    def test_equals_counting_one_by_one(self, ids: list[int]) -> None:
        load, unrouted = metrics.count_load(ids, 7)
        assert load.tolist() == [ids.count(e) for e in range(7)]
        assert unrouted == ids.count(-1)


class TestAgainstReference:
    @given(counts)
    def test_load_metrics(self, load: list[int]) -> None:
        for name, expected in reference_metrics(load).items():
            assert getattr(metrics, name)(load) == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True), name

    @given(counts)
    def test_entropy_is_the_logarithm_of_effective_experts(self, load: list[int]) -> None:
        value = metrics.load_entropy(load)
        if len(load) == 1 or sum(load) == 0:
            assert math.isnan(value)
        else:
            expected = math.log(reference_metrics(load)["effective_experts"]) / math.log(len(load))
            assert value == pytest.approx(expected, abs=1e-12)
            assert 0 <= value <= 1

    @given(counts)
    def test_idle_ids_are_exact_at_the_tenth(self, load: list[int]) -> None:
        total = sum(load)
        expected = [total > 0 and Fraction(c * len(load), max(total, 1)) < Fraction(1, 10) for c in load]
        assert metrics.idle_mask(load).tolist() == expected

    def test_a_tenth_of_the_uniform_share_is_not_idle(self) -> None:
        # 0.1 * 30 in floating point is a hair above 3.
        assert metrics.idle_experts([3, 57, 30, 30]) == 0
        assert metrics.idle_experts([2, 58, 30, 30]) == 1

    @given(load_tables, st.integers(1, 40))
    def test_windows(self, rows: list[list[int]], window: int) -> None:
        expected = [
            [sum(column) for column in zip(*rows[max(0, i + 1 - window) : i + 1], strict=True)]
            for i in range(len(rows))
        ]
        rolling = metrics.rolling_window_load(rows, window)
        assert rolling.tolist() == expected
        assert metrics.window_load(rows, window).tolist() == expected[-1]
        stacked = metrics.rolling_window_load([rows, rows[::-1]], window)
        assert stacked[0].tolist() == expected

    @given(st.lists(any_float, max_size=30), st.floats(0, 1))
    def test_smoothing(self, values: list[float], weight: float) -> None:
        capped = min(weight, curves.MAX_SMOOTHING)
        expected, finite = [], []
        for value in values:
            if math.isfinite(value):
                finite.append(value)
                past = [capped ** (len(finite) - 1 - i) for i in range(len(finite))]
                expected.append(math.fsum(p * v for p, v in zip(past, finite, strict=True)) / math.fsum(past))
            else:
                expected.append(value)
        np.testing.assert_allclose(
            curves.smooth(values, weight),
            expected,
            rtol=1e-6,
            atol=1e-9 * max([1.0, *map(abs, finite)]),
        )

    @settings(max_examples=200)
    @given(st.lists(st.one_of(any_float, st.just(0.0)), max_size=200), st.integers(5, 60))
    def test_downsampling_keeps_what_matters(self, values: list[float], max_points: int) -> None:
        x, y = curves.downsample(np.arange(len(values)), values, max_points)
        assert len(x) <= max(max_points, 0)
        assert (np.diff(x) > 0).all()
        np.testing.assert_array_equal(y, np.asarray(values)[x.astype(int)])
        if values:
            assert (x[0], x[-1]) == (0, len(values) - 1)
        finite = [v for v in values if math.isfinite(v)]
        if finite:
            assert min(finite) in y
            assert max(finite) in y
        if len(finite) < len(values):
            assert not np.isfinite(y).all()

    @given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**32 - 1), st.floats(0, 1))
    def test_router_entropy(self, layers: int, tokens: int, num_experts: int, seed: int, lost: float) -> None:
        rng = np.random.default_rng(seed)
        probs = rng.dirichlet(np.full(num_experts, 0.3), size=(layers, tokens))
        probs[rng.random((layers, tokens)) < lost] = np.nan
        expected = []
        for layer in probs.tolist():
            kept = [row for row in layer if not any(map(math.isnan, row))]
            entropies = [
                sum(-p * math.log(p) for p in row if p) / math.log(num_experts) for row in kept if num_experts > 1
            ]
            expected.append(sum(entropies) / len(entropies) if entropies else NAN)
        np.testing.assert_allclose(metrics.router_entropy(probs), expected, rtol=1e-9, atol=1e-12)


def test_x2_smoothing() -> None:
    np.testing.assert_allclose(curves.smooth([8, 2, 2, 2], 0.8), [8, 4.6667, 3.5738, 3.0407], atol=5e-5)
    np.testing.assert_allclose(curves.smooth([1, 3], 0.6), [1, 2.25], atol=1e-12)
    assert curves.smooth([1e-4] * 500, 0.9).tolist() == [1e-4] * 500


@pytest.mark.parametrize("weight", [1, 1.0, 5.0, math.inf])
def test_x2_weight_is_capped_below_one(weight: float) -> None:
    smoothed = curves.smooth([0.0] + [1.0] * 20_000, weight)
    assert smoothed[1] > 0
    assert smoothed[-1] == pytest.approx(1.0, abs=1e-6)


def test_x2_non_finite_values_are_skipped() -> None:
    smoothed = curves.smooth([8, NAN, 2, math.inf, 2, -math.inf], 0.8)
    np.testing.assert_allclose(smoothed, [8, NAN, 4.6667, math.inf, 3.5738, -math.inf], atol=5e-5)
    # An optional column: null before the first value.
    np.testing.assert_allclose(curves.smooth([None, 3.0, None], 0.5), [NAN, 3.0, NAN])  # type: ignore[arg-type]
    assert curves.smooth([], 0.5).shape == (0,)


def test_x4_a_single_spike_survives() -> None:
    y = np.zeros(10_000)
    y[5432] = 9.0
    for max_points in (5, 100, 2000):
        x, kept = curves.downsample(np.arange(10_000), y, max_points)
        assert len(x) <= max_points
        assert (x[0], x[-1]) == (0, 9_999)
        assert kept[x == 5432].tolist() == [9.0]
        assert kept.sum() == 9.0


def test_x4_a_downward_spike_beside_a_gap_survives() -> None:
    y = np.ones(10_000)
    y[[4000, 4001]] = [NAN, -3.0]
    x, kept = curves.downsample(np.arange(500, 10_500), y, 200)
    assert len(x) <= 200
    assert kept[x == 4501].tolist() == [-3.0]
    assert np.isnan(kept[x == 4500]).all()


def test_x4_short_curves_are_left_alone() -> None:
    x, y = curves.downsample(["a", "b"], [1, 2], 5)
    assert (x.tolist(), y.tolist(), y.dtype.kind) == (["a", "b"], [1, 2], "i")


def test_empty_window_has_no_metrics() -> None:
    nothing = metrics.window_load(np.zeros((0, 3), dtype=np.int64))
    assert nothing.tolist() == [0, 0, 0]
    assert math.isnan(metrics.dead_experts(nothing))
    assert metrics.rolling_window_load(np.zeros((0, 3), dtype=np.int64), 5).shape == (0, 3)


def test_window_of_last_fifty_by_default() -> None:
    loads = np.stack([np.arange(60), np.ones(60, dtype=int)], axis=1)
    assert metrics.window_load(loads).tolist() == [sum(range(10, 60)), 50]


def test_small_integers_do_not_overflow() -> None:
    loads = np.full((40, 2), 200, dtype=np.uint8)
    assert metrics.window_load(loads).tolist() == [8000, 8000]
    assert metrics.rolling_window_load(loads, 40)[-1].tolist() == [8000, 8000]


def test_rolling_window_of_floats_forgets_nan_and_leaves_no_dust() -> None:
    loads = np.array([[0.1], [0.2], [NAN], [0.3], [0.0], [0.0]])
    np.testing.assert_array_equal(
        metrics.rolling_window_load(loads, 2), [[0.1], [0.1 + 0.2], [NAN], [NAN], [0.3], [0.0]]
    )


def test_rates() -> None:
    assert metrics.drop_rate(2, 6) == pytest.approx(1 / 3)
    np.testing.assert_array_equal(metrics.drop_rate([0, 3, 0], [4, 4, 0]), [0, 0.75, NAN])
    np.testing.assert_array_equal(metrics.rerouted_share([1, None], [4, 4]), [0.25, NAN])  # type: ignore[arg-type]


def test_router_and_load_entropy_are_different_things() -> None:
    # Each token is certain, and the tokens are spread evenly.
    certain = np.eye(4)
    assert metrics.router_entropy(certain) == 0
    assert metrics.load_entropy(certain.sum(axis=0)) == 1
    assert math.isnan(metrics.router_entropy(np.zeros((0, 4))))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: metrics.load_ratio(3), r"shape \(\)"),
        (lambda: metrics.max_violation(np.zeros((2, 0))), r"\(2, 0\)"),
        (lambda: metrics.max_violation_bound(2, 3), "top_k=3 is more than num_experts=2"),
        (lambda: metrics.max_violation_bound(2, 0), "top_k=0"),
        (lambda: metrics.window_load([[1]], 0), "window=0"),
        (lambda: metrics.window_load([[1]], 2.5), "window=2.5"),  # type: ignore[arg-type]
        (lambda: metrics.window_load([1, 2]), r"\(2,\)"),
        (lambda: metrics.rolling_window_load([[1]], -1), "window=-1"),
        (lambda: metrics.aux_loss([1, 2], [0.5, 0.25, 0.25]), r"2 experts, mean_prob has shape \(3,\)"),
        (lambda: metrics.router_entropy([0.5, 0.5]), r"\(2,\)"),
        (lambda: curves.smooth([1], -0.1), "weight=-0.1"),
        (lambda: curves.smooth([1], NAN), "weight=nan"),
        (lambda: curves.smooth([[1]], 0.5), r"\(1, 1\)"),
        (lambda: curves.downsample([1, 2], [1], 10), r"\(2,\) and \(1,\)"),
        (lambda: curves.downsample([1], [1], 4), "max_points=4"),
        (lambda: metrics.count_load([0], 0), "num_experts=0"),
    ],
)
def test_refusals_name_the_value(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()  # type: ignore[operator]


def test_importing_metrics_loads_no_torch() -> None:
    code = "import sys, moe_core.metrics, moe_core.layout, moe_core.curves; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
