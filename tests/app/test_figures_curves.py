"""Curves and shares over steps: the data in the figures against hand values."""

import numpy as np
import pytest

from app.figures.balance_curves import pooled_shares, share_area, unused_curves, violation_curves
from app.figures.breaks import breaks
from app.figures.curves import metric_curves, sparkline
from app.figures.inputs import Curve, LoadSeries, ReferenceLine
from app.figures.theme import categorical_colour


def curve(values, *, steps=None, group="run", colour=0, **settings):
    values = np.asarray(values, dtype=float)
    steps = np.arange(len(values)) if steps is None else np.asarray(steps)
    return Curve(name=group, steps_S=steps, values_S=values, group=group, colour=colour, **settings)


def series(load, *, run="run", layer=1, top_k=1, restarts=()):
    load = np.asarray(load)
    return LoadSeries(run=run, layer=layer, steps_S=np.arange(len(load)), load_SE=load, top_k=top_k, restarts=restarts)


def lines(fig):
    return [t for t in fig.data if t.type == "scatter" and "lines" in (t.mode or "")]


def reference_values(fig):
    return sorted(s.y0 for s in fig.layout.shapes if s.y0 == s.y1)


def test_runs_keep_their_colours_and_one_legend_entry():
    curves = [
        curve([1, 2], group="none", colour=0, style="thin"),
        curve([1, 2], group="none", colour=0, style="thick"),
        curve([3, 4], group="aux", colour=1),
    ]
    fig = metric_curves(curves, title="t", y_title="loss")
    shown = [t for t in fig.data if t.showlegend]
    assert [(t.name, t.line.color) for t in shown] == [
        ("none", categorical_colour(0)),
        ("aux", categorical_colour(1)),
    ]
    assert shown[0].line.width == 3.0  # the entry is the thick line, not the faint one
    only_aux = metric_curves(curves[2:], title="t", y_title="loss")
    assert only_aux.data[0].line.color == categorical_colour(1)


def test_x4_spike_survives_down_sampling_and_the_note_says_so():
    values = np.zeros(10_000)
    values[5432] = 9.0
    fig = metric_curves([curve(values)], title="t", y_title="loss")
    (line,) = lines(fig)
    assert len(line.x) <= 2000
    assert dict(zip(line.x, line.y, strict=True))[5432] == 9.0
    assert (line.x[0], line.x[-1]) == (0, 9999)
    assert "10,000" in fig.layout.title.text


def test_r23_values_that_are_not_finite_are_gaps_with_marks_and_null_is_a_plain_gap():
    values = [2.0, np.inf, np.nan, -np.inf, np.nan, 3.0]
    null = np.array([False, False, False, False, True, False])
    fig = metric_curves([curve(values, null_S=null)], title="t", y_title="loss")
    (line,) = lines(fig)
    np.testing.assert_equal(line.y, [2.0, np.nan, np.nan, np.nan, np.nan, 3.0])
    assert line.connectgaps is False
    (marks,) = [t for t in fig.data if t.mode == "markers"]
    assert marks.x.tolist() == [1, 2, 3]
    assert list(marks.text) == ["inf", "nan", "-inf"]
    low, high = fig.layout.yaxis.range
    assert set(marks.y) == {low}
    assert low < 2.0 < 3.0 < high


def test_x1_restart_is_a_dotted_line_before_its_first_step():
    fig = metric_curves([curve(np.ones(120), restarts=(60,))], title="t", y_title="loss")
    dotted = [s for s in fig.layout.shapes if s.line.dash == "dot"]
    assert [s.x0 for s in dotted] == [59.5]
    assert any(a.text == "resumed" for a in fig.layout.annotations)


def test_x2_smoothing_by_hand_with_the_values_behind():
    fig = metric_curves([curve([8, 2, 2, 2])], title="t", y_title="loss", smoothing=0.8)
    raw, soft = lines(fig)
    assert raw.y.tolist() == [8, 2, 2, 2]
    np.testing.assert_allclose(soft.y, [8, 4.6667, 3.5738, 3.0407], atol=5e-5)
    assert raw.opacity < soft.opacity
    assert "0.8" in fig.layout.title.text


@pytest.mark.parametrize("log_y", [False, True])
def test_reference_line_is_inside_the_picture_and_labelled(log_y):
    fig = metric_curves(
        [curve([0.1, 0.2])], title="t", y_title="v", lines=[ReferenceLine(value=15.0, label="bound 15")], log_y=log_y
    )
    assert reference_values(fig) == [15.0]
    high = fig.layout.yaxis.range[1]
    assert high > (np.log10(15) if log_y else 15)
    (label,) = [a for a in fig.layout.annotations if a.text == "bound 15"]
    assert label.y == pytest.approx(np.log10(15) if log_y else 15)


def test_zero_on_a_log_axis_is_marked_not_lost():
    fig = metric_curves([curve([1.0, 0.0, 10.0])], title="t", y_title="v", log_y=True)
    (marks,) = [t for t in fig.data if t.mode == "markers"]
    assert marks.x.tolist() == [1]
    assert marks.text[0].startswith("0,")
    assert marks.y[0] == pytest.approx(10 ** fig.layout.yaxis.range[0])


def test_x9_balanced_runs_lie_on_the_uniform_line():
    # E * sum f P is 1 for any E and k when balanced: the curve and the line coincide
    fig = metric_curves(
        [curve([1.0, 1.0], group=name, colour=i) for i, name in enumerate(("8/2", "32/4", "128/8"))],
        title="t",
        y_title="aux loss (uniform = 1)",
        lines=[ReferenceLine(value=1.0, label="uniform = 1")],
    )
    assert reference_values(fig) == [1.0]
    low, high = fig.layout.yaxis.range
    assert low < 1 < high


def test_c30_a_layer_without_a_value_stays_empty():
    nothing = curve([np.nan, np.nan], null_S=np.array([True, True]), panel="layer 0")
    fig = metric_curves([nothing, curve([1.2, 1.0], panel="layer 1")], title="t", y_title="aux loss")
    assert np.isnan(lines(fig)[0].y).all()
    assert not [t for t in fig.data if t.mode == "markers"]


def test_a8_one_step_shows_a_point():
    fig = metric_curves([curve([1.5], steps=[500])], title="t", y_title="loss")
    (line,) = lines(fig)
    assert line.mode == "lines+markers"
    assert line.marker.size.tolist() == [8]
    low, high = fig.layout.xaxis.range
    assert low < 500 < high


def test_panels_share_the_value_axis():
    fig = metric_curves([curve([1, 2], panel="a"), curve([5, 9], panel="b")], title="t", y_title="v")
    assert fig.layout.yaxis.range == fig.layout.yaxis2.range
    apart = metric_curves([curve([1, 2], panel="a"), curve([5, 9], panel="b")], title="t", y_title="v", share_y=False)
    assert apart.layout.yaxis.range != apart.layout.yaxis2.range


def test_no_curves():
    metric_curves([], title="nothing recorded yet", y_title="loss", theme="dark").to_json()


def test_curve_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="2 values|\\(2,\\)"):
        curve([1, 2], steps=[1, 2, 3])
    with pytest.raises(ValueError, match="wavy"):
        curve([1], style="wavy")
    with pytest.raises(ValueError, match="null_S"):
        curve([1], null_S=np.array([True, False]))


# ------------------------------------------------------------------------------------------------ balance


def test_x10_violation_batch_window_and_bound():
    # max / mean - 1 of each step: 1, 3; of the two summed, [40, 20, 20, 0] + [80, 0, 0, 0] = [120, 20, 20, 0]: 2
    fig = violation_curves([series([[40, 20, 20, 0], [80, 0, 0, 0]])], title="t", window=2)
    thin, thick = lines(fig)
    assert thin.y.tolist() == [1.0, 3.0]
    assert thick.y.tolist() == [1.0, 2.0]
    assert reference_values(fig) == [3.0]
    assert any("E/k - 1 = 3" in a.text for a in fig.layout.annotations)


def test_violation_bounds_differ_by_layer_shape():
    fig = violation_curves([series(np.ones((2, 8)), layer=1, top_k=2), series(np.ones((2, 16)), layer=3)], title="t")
    assert reference_values(fig) == [3.0, 15.0]
    assert [a.text for a in fig.layout.annotations][:2] == ["layer 1", "layer 3"]


def test_steps_without_tokens_are_gaps_in_violation():
    fig = violation_curves([series([[1, 1], [0, 0], [2, 0]])], title="t", window=1)
    np.testing.assert_equal(lines(fig)[0].y, [0.0, np.nan, 1.0])
    assert not [t for t in fig.data if t.mode == "markers"]


def test_idle_and_dead_over_a_window_by_hand():
    # window 2: after step 0 experts 2 and 3 are dead; after step 1 expert 2 has 3 of 200, below a tenth of 50
    fig = unused_curves([series([[50, 50, 0, 0], [50, 47, 3, 0]])], title="t", window=2)
    by_dash = {t.line.dash: t.y.tolist() for t in lines(fig)}
    assert by_dash == {"solid": [2.0, 2.0], "dot": [2.0, 1.0]}
    assert reference_values(fig) == [4.0]


def test_shares_by_hand_and_uniform_lines():
    fig = share_area(series([[40, 20, 20, 0], [20, 20, 20, 20], [0, 0, 0, 0]]), title="t")
    traces = {t.name.split(" ·")[0]: t for t in fig.data}
    assert list(traces["expert 0"].y) == [50, 25], "a step without tokens has no shares"
    assert list(traces["expert 3"].y) == [0, 25]
    assert {t.stackgroup for t in fig.data} == {"experts"}
    assert reference_values(fig) == [25.0, 50.0, 75.0]
    assert "25% each" in fig.layout.title.text
    assert tuple(fig.layout.yaxis.range) == (0, 100)


def test_shares_as_lines_draw_the_uniform_share():
    fig = share_area(series(np.ones((3, 8)), top_k=2), title="t", kind="lines")
    assert reference_values(fig) == [12.5]
    with pytest.raises(ValueError, match="pie"):
        share_area(series(np.ones((3, 8))), title="t", kind="pie")


@pytest.mark.parametrize("experts", [8, 64, 200])
def test_stacked_shares_add_up_to_hundred(experts):
    load = np.random.default_rng(0).integers(0, 50, (700, experts))
    fig = share_area(series(load), title="t")
    total = np.sum([np.asarray(t.y) for t in fig.data], axis=0)
    np.testing.assert_allclose(total, 100)
    assert sum(len(t.y) for t in fig.data) <= 20_000
    assert len(reference_values(fig)) >= 1


def test_pooled_shares_sum_loads():
    middle, shares, pooled = pooled_shares(series([[4, 0], [0, 12], [1, 1]]), 2)
    assert pooled == 2
    assert middle.tolist() == [0.5, 2.0]
    assert shares.tolist() == [[25, 75], [50, 50]]


def test_experts_that_are_hardly_used_have_no_colour():
    load = np.zeros((5, 16), dtype=int)
    load[:, 3], load[:, 9], load[:, 1] = 600, 400, 1
    fig = share_area(series(load), title="t")
    assert [t.name for t in sorted(fig.data, key=lambda t: t.legendrank) if t.showlegend] == [
        "expert 3 · 60%",
        "expert 9 · 40%",
    ]


def test_sparkline_keeps_the_spike():
    values = np.zeros(1000)
    values[321] = 7
    short = sparkline(np.append(values, [np.nan, np.inf]), points=40)
    assert len(short) <= 40
    assert max(short) == 7
    assert sparkline([1, 2]) == [1.0, 2.0]
    assert sparkline([]) == []


def test_many_long_run_names_get_room_for_their_legend():
    def top(count):
        curves = [curve([1, 2], group=f"a run with quite a long name {i}", colour=i) for i in range(count)]
        return metric_curves(curves, title="t", y_title="v").layout.margin.t

    assert top(12) >= top(2) + 22


# ------------------------------------------------------------------------------------- resumed runs and other axes


def test_x1_a_resumed_run_is_not_joined_over_missing_steps():
    steps = [0, 1, 2, 3, 10, 11, 12]
    fig = metric_curves([curve([1, 2, 3, 4, 5, 6, 7], steps=steps, restarts=[10])], title="t", y_title="loss")
    (line,) = lines(fig)
    np.testing.assert_equal(np.asarray(line.y), [1, 2, 3, 4, np.nan, 5, 6, 7])
    assert list(np.asarray(line.x)[:4]) == [0, 1, 2, 3]
    assert line.connectgaps is False
    assert [shape.x0 for shape in fig.layout.shapes] == [9.5]
    assert [note.text for note in fig.layout.annotations] == ["resumed"]


@pytest.mark.parametrize(
    ("steps", "restarts", "places"),
    [
        pytest.param([0, 1, 2, 3, 4], [3], [], id="resumed where it stopped"),
        pytest.param([0, 20, 40, 60, 80], [60], [], id="recorded every 20 steps, none missing"),
        pytest.param([0, 20, 40, 100, 120], [100], [3], id="recorded every 20 steps, two missing"),
        pytest.param([0, 1, 9], [9], [2], id="nothing after it to compare with"),
        pytest.param([0, 5], [5], [1], id="one record on either side"),
        pytest.param([0, 1, 5, 6, 9, 10], [5, 9], [2, 4], id="resumed twice"),
        pytest.param([0, 1, 7, 8], [], [], id="not resumed"),
        pytest.param([5, 6], [5], [], id="nothing before it"),
    ],
)
def test_where_a_curve_ends(steps, restarts, places):
    assert breaks(np.array(steps), restarts).tolist() == places


def test_bands_end_at_a_hole_and_go_on_behind_it():
    load = np.array([[3, 1]] * 4 + [[1, 1]] * 4)
    one = LoadSeries(
        run="run", layer=1, steps_S=np.array([0, 1, 2, 3, 50, 51, 52, 53]), load_SE=load, top_k=1, restarts=[50]
    )
    fig = share_area(one, title="t")
    first = [trace for trace in fig.data if trace.name.startswith("expert 0")]
    assert [list(trace.x) for trace in first] == [[0, 1, 2, 3], [50, 51, 52, 53]]
    assert [list(trace.y) for trace in first] == [[75] * 4, [50] * 4]
    assert len({trace.stackgroup for trace in first}) == 2, "one stack would bridge the hole"
    assert [trace.showlegend for trace in first] == [True, False]


def test_curves_over_tokens_keep_the_step_in_the_hover_and_mark_the_restart():
    one = Curve(
        name="run",
        group="run",
        colour=0,
        steps_S=np.array([0, 1, 5, 6]),
        values_S=np.array([4.0, 3.0, 2.0, np.nan]),
        at_S=np.array([100.0, 200.0, 300.0, 400.0]),
        restarts=[5],
    )
    fig = metric_curves([one], title="t", y_title="loss", x_title="tokens so far")
    (line,) = lines(fig)
    np.testing.assert_equal(np.asarray(line.x, float), [100, 200, np.nan, 300, 400])
    np.testing.assert_equal(np.asarray(line.customdata, float), [0, 1, np.nan, 5, 6])
    assert "step %{customdata:,d}<br>tokens so far" in line.hovertemplate
    mark = next(trace for trace in fig.data if trace.mode == "markers")
    assert (list(mark.x), list(mark.customdata)) == ([400], [6])
    assert [shape.x0 for shape in fig.layout.shapes] == [250]
    assert fig.layout.xaxis.title.text == "tokens so far"
