"""Load heatmap, bars and pooling: the numbers in the figures against hand values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.figures import theme
from app.figures.inputs import LoadSeries
from app.figures.load_bars import load_bars
from app.figures.load_heatmap import MAX_CLICKABLE_POINTS, has_click_points, heatmap_cells, load_heatmap
from app.figures.pooling import expert_groups, group_labels, pool_columns, pool_experts, step_columns


def series(load, *, run="run", layer=1, steps=None, top_k=1, restarts=()):
    load = np.asarray(load)
    steps = np.arange(len(load)) if steps is None else np.asarray(steps)
    return LoadSeries(run=run, layer=layer, steps_S=steps, load_SE=load, top_k=top_k, restarts=restarts)


def heatmaps(fig):
    return [trace for trace in fig.data if trace.type == "heatmap"]


# ------------------------------------------------------------------------------------------------ pooling


def test_step_columns_by_hand():
    one_each = step_columns(np.array([0, 10, 20]), 10)
    assert one_each.edges.tolist() == [-5, 5, 15, 25]
    pairs = step_columns(np.array([0, 1, 2, 3, 4]), 3)
    assert pairs.per_column == 2
    assert pairs.start_C.tolist() == [0, 2, 4]
    assert pairs.stop_C.tolist() == [2, 4, 5]
    assert pairs.edges.tolist() == [-0.5, 1.5, 3.5, 4.5]


def test_a_stretch_without_records_is_a_hole_and_a_new_interval_is_not():
    resumed = step_columns(np.array([0, 1, 2, 500, 501]), 100)
    assert resumed.hole_C.tolist() == [False, False, False, True, False, False]
    assert resumed.edges.tolist() == [-0.5, 0.5, 1.5, 2.5, 499.5, 500.5, 501.5]
    assert not step_columns(np.array([0, 1, 2, 12, 22, 32]), 100).hole_C.any()


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=80, unique=True),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 2**31),
)
def test_pooled_columns_equal_a_naive_loop(steps, max_columns, experts, seed):
    steps = np.array(sorted(steps))
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 9, size=(len(steps), experts))
    columns = step_columns(steps, max_columns)
    pooled = pool_columns(load, columns)
    covered = []
    for c, (start, stop) in enumerate(zip(columns.start_C, columns.stop_C, strict=True)):
        covered.extend(range(start, stop))
        for e in range(experts):
            expected = sum(load[start:stop, e].tolist()) if stop > start else np.nan
            np.testing.assert_equal(pooled[c, e], expected)
    assert covered == list(range(len(steps)))
    assert np.all(np.diff(columns.edges) > 0)
    # every step lies inside the column that covers it
    for c in np.flatnonzero(~columns.hole_C):
        inside = steps[columns.start_C[c] : columns.stop_C[c]]
        assert columns.edges[c] < inside[0] <= inside[-1] < columns.edges[c + 1]


def test_experts_pool_by_maximum():
    first = expert_groups(10, 4)  # 3, 3, 3, 1
    assert first.tolist() == [0, 3, 6, 9]
    assert group_labels(first, 10) == ["0-2", "3-5", "6-8", "9"]
    ratio = np.array([0, 0, 0, 0, 9, 0, np.nan, 1, 0, np.nan])
    np.testing.assert_equal(pool_experts(ratio, first), [0, 9, 1, np.nan])


# ------------------------------------------------------------------------------------------------ heatmap


def test_x10_heatmap_values():
    load = [[40, 20, 20, 0], [20, 20, 20, 20], [0, 0, 0, 0]]
    fig = load_heatmap([series(load)], title="t")
    (trace,) = heatmaps(fig)
    np.testing.assert_allclose(
        np.asarray(trace.z, dtype=float),
        [[1, 0, np.nan], [0, 0, np.nan], [0, 0, np.nan], [theme.IDLE_Z, 0, np.nan]],
    )
    # hover: step, load / uniform share, assignments
    assert np.asarray(trace.customdata)[0, 0].tolist() == [0, 2, 40]
    assert np.asarray(trace.customdata)[3, 1].tolist() == [1, 1, 20]


def test_beyond_sixteen_is_clipped_and_marked():
    load = np.zeros((3, 32), dtype=int)
    load[:, 7] = 100  # 32 times the uniform share, all steps
    fig = load_heatmap([series(load)], title="t")
    (trace,) = heatmaps(fig)
    assert np.asarray(trace.z)[7].tolist() == [theme.BEYOND_Z] * 3
    marks = [t for t in fig.data if t.name == "beyond 16x"]
    assert [(list(m.x), list(m.y)) for m in marks] == [([1.0], ["7"])]  # one mark for the stretch, in its middle


def test_a3_axes_are_categorical_and_in_order():
    load = np.ones((2, 11), dtype=int)
    fig = load_heatmap([series(load, layer=0), series(load, layer=3), series(load, layer=10)], title="t")
    for axis in (fig.layout.yaxis, fig.layout.yaxis2, fig.layout.yaxis3):
        assert axis.type == "category"
        assert list(axis.categoryarray) == [str(e) for e in range(11)]
    assert [a.title.text for a in (fig.layout.yaxis, fig.layout.yaxis2, fig.layout.yaxis3)] == [
        "layer 0<br>expert",
        "layer 3<br>expert",
        "layer 10<br>expert",
    ]


def test_a5_one_colour_range_for_every_panel_and_run():
    calm, collapsed = [[25, 25, 25, 25]], [[97, 1, 1, 1]]
    fig = load_heatmap([series(calm, run="a"), series(collapsed, run="b")], title="t")
    assert {trace.coloraxis for trace in heatmaps(fig)} == {"coloraxis"}
    assert (fig.layout.coloraxis.cmin, fig.layout.coloraxis.cmax) == (-5, 5)
    np.testing.assert_allclose(np.asarray(heatmaps(fig)[1].z)[0, 0], np.log2(0.97 * 4), rtol=1e-6)


def test_pooled_steps_are_one_window_and_the_hover_keeps_the_extremes():
    load = np.full((1000, 4), 30)
    load[:, 3] = 0
    load[543] = [0, 90, 0, 0]
    fig = load_heatmap([series(load)], title="t", max_columns=100)
    z = np.asarray(heatmaps(fig)[0].z)
    assert z.shape == (4, 100)
    # steps 540 to 549 together: 9 * 30 + 90 of 10 * 90 assignments, 4 experts
    assert z[1, 54] == pytest.approx(np.log2(360 / 900 * 4), rel=1e-6)
    assert set(z[3].tolist()) == {theme.IDLE_Z}
    assert "10 recorded steps" in fig.layout.title.text
    data = np.asarray(heatmaps(fig)[0].customdata)[1, 54]
    # first, load / uniform share, assignments, last, and of single steps the smallest (4/3) and the largest (4)
    np.testing.assert_allclose(data, [540, 1.6, 360, 549, 4 / 3, 4], rtol=1e-6)


def test_pooling_does_not_redden_balanced_noise():
    rng = np.random.default_rng(0)
    load = rng.multinomial(1024, np.full(16, 1 / 16), size=400)
    red = [
        (np.asarray(heatmaps(load_heatmap([series(load)], title="t", max_columns=n))[0].z) > 0).mean()
        for n in (400, 100)
    ]
    assert abs(red[0] - red[1]) < 0.03


def test_pooled_experts_are_named():
    load = np.ones((2, 896), dtype=int)
    load[:, 500] = 100
    cells = heatmap_cells(series(load, top_k=16))
    assert len(cells.labels) == 128
    assert cells.labels[500 // 7] == "497-503"
    assert cells.z_RC[500 // 7].max() == theme.BEYOND_Z


def test_many_cells_are_pooled_without_being_asked():
    load = np.ones((5000, 64), dtype=int)
    fig = load_heatmap([series(load, run=r, layer=layer) for r in "ab" for layer in (1, 3)], title="t")
    assert sum(np.asarray(t.z).size for t in heatmaps(fig)) <= 45_000


def test_run_without_the_layer_says_so():
    fig = load_heatmap([series([[1, 1]], run="a", layer=1), series([[1, 1]], run="b", layer=3)], title="t")
    texts = [a.text for a in fig.layout.annotations]
    assert "layer 3 of this run has no experts" in texts
    assert "layer 1 of this run has no experts" in texts


def test_a1_clickable_cells_carry_layer_expert_step():
    load = np.arange(1, 41).reshape(5, 8)
    fig = load_heatmap(
        [series(load, layer=layer, steps=[0, 5, 10, 15, 20]) for layer in range(5)], title="t", clickable=True
    )
    points = [t for t in fig.data if t.name == "cells"]
    assert len(points) == 5
    third = np.asarray(points[3].customdata)
    chosen = third[(third[:, 1] == 5) & (third[:, 2] == 10)]
    assert chosen[:, :3].tolist() == [[3, 5, 10]]
    assert points[3].marker.opacity == 0
    # hover of the points shows the same numbers as the cells: load 22 of step 10, expert 5
    assert "customdata[5]:,d} assignments" in points[3].hovertemplate
    assert chosen[0, 5] == 22


@pytest.mark.parametrize(("steps", "experts", "stride"), [(400, 16, 2), (400, 60, 6), (400, 61, None)])
def test_many_cells_can_be_clicked_in_every_few_columns(steps, experts, stride):
    load = np.arange(1, steps * experts + 1).reshape(steps, experts)
    fig = load_heatmap([series(load)], title="t", clickable=True)
    points = [t for t in fig.data if t.name == "cells"]
    assert has_click_points(fig) == (stride is not None) == bool(points)
    if points:
        data = np.asarray(points[0].customdata)
        assert len(data) <= MAX_CLICKABLE_POINTS
        assert (np.diff(np.unique(data[:, 2])) == stride).all()
        # each carries the assignments of its own cell
        assert (data[:, 5] == load[data[:, 2].astype(int), data[:, 1].astype(int)]).all()


def test_run_names_are_text_not_markup():
    fig = load_heatmap([series([[1, 1]], run="<b>%{x}")], title="<i>x</i>")
    assert "&lt;b&gt;%&#123;x}" in heatmaps(fig)[0].hovertemplate
    assert "<i>" not in fig.layout.title.text


@pytest.mark.parametrize("theme_name", ["light", "dark"])
@pytest.mark.parametrize(("steps", "experts"), [(0, 4), (1, 2), (3, 1), (1, 896)])
def test_odd_sizes(theme_name, steps, experts):
    fig = load_heatmap([series(np.ones((steps, experts), dtype=int))], title="t", theme=theme_name)
    fig.to_json()


def test_no_series_at_all():
    load_heatmap([], title="nothing").to_json()


def test_bad_series_are_named():
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        series(np.ones((2, 3)), steps=[1])
    with pytest.raises(ValueError, match="ascend"):
        series(np.ones((2, 3)), steps=[3, 3])
    with pytest.raises(ValueError, match="top_k"):
        series(np.ones((2, 3)), top_k=4)
    with pytest.raises(ValueError, match="same run and layer"):
        load_heatmap([series([[1, 1]]), series([[1, 1]])], title="t")


# ------------------------------------------------------------------------------------------------ bars


def bars(fig, name="load"):
    (trace,) = [t for t in fig.data if t.type == "bar" and t.name == name]
    return trace


def test_bars_by_hand():
    fig = load_bars(np.array([40, 20, 20, 0]), top_k=1, title="t")
    bar = bars(fig)
    assert bar.y[:3].tolist() == [1, 0, 0]
    assert bar.y[3] == fig.layout.yaxis.range[0]  # idle reaches the foot of the axis
    assert list(bar.marker.color) == theme.load_colours([2, 1, 1, 0])
    assert "40 assignments, 50.00%" in bar.hovertext[0]
    assert list(fig.layout.xaxis.categoryarray) == ["0", "1", "2", "3"]
    assert fig.layout.xaxis.type == "category"


def test_a5_axes_do_not_move_with_the_step():
    even, one_sided = np.array([25, 25, 25, 25]), np.array([97, 1, 1, 1])
    figs = [
        load_bars(load, top_k=1, title="t", bias_E=bias, bias_range=(-0.2, 0.1))
        for load, bias in ((even, np.zeros(4)), (one_sided, np.array([-0.2, 0.1, 0.05, 0.05])), (even, None))
    ]
    assert len({tuple(f.layout.yaxis.range) for f in figs}) == 1
    assert len({tuple(f.layout.yaxis2.range) for f in figs}) == 1
    assert len({f.layout.height for f in figs}) == 1
    assert [a.text for a in figs[2].layout.annotations if "no bias" in a.text]
    assert {(f.layout.coloraxis.cmin, f.layout.coloraxis.cmax) for f in figs} == {(-5, 5)}


def test_bound_and_uniform_lines():
    fig = load_bars(np.ones(8), top_k=2, title="t")
    assert {shape.y0 for shape in fig.layout.shapes} == {0.0, 2.0}  # log2(1) and log2(8 / 2)
    assert any("E/k = 4x" in a.text for a in fig.layout.annotations)


def test_ghosts_show_the_previous_step():
    fig = load_bars(
        np.array([10, 30]), previous_load_E=np.array([20, 20]), previous_step=56, top_k=1, title="t",
        gate_mass_E=np.array([3.0, 1.0]), bias_E=np.array([0.1, -0.1]), previous_bias_E=np.array([0.0, 0.0]),
    )  # fmt: skip
    ghosts = [t for t in fig.data if t.name == "load at the previous step"]
    assert ghosts
    assert all(list(t.y) == [0, 0] for t in ghosts)
    assert "step 56: 20 assignments, 50.00% (-25.00 points)" in bars(fig).hovertext[0]
    (mass,) = [t for t in fig.data if t.name == "share of gate weight"]
    np.testing.assert_allclose(mass.y, [np.log2(1.5), -1])
    assert "change +0.1" in bars(fig, "bias").hovertext[0]


def test_no_tokens_no_bars():
    fig = load_bars(np.zeros(4), top_k=1, title="t")
    assert np.isnan(np.asarray(bars(fig).y, dtype=float)).all()
    assert "no data" in bars(fig).hovertext[0]


def test_many_experts_share_bars():
    load = np.ones(896)
    load[13] = 50
    fig = load_bars(load, top_k=16, title="t", bias_E=np.where(np.arange(896) == 15, -3.0, 0.1), gate_mass_E=load)
    bar = bars(fig)
    assert len(bar.y) == 224
    assert bar.customdata[3] == 13
    assert "experts 12-15, of them<br><b>expert 13</b>" in bar.hovertext[3]
    assert bars(fig, "bias").y[3] == -3.0
    assert "4 neighbouring experts" in fig.layout.title.text


def test_bars_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="top_k"):
        load_bars(np.ones(4), top_k=5, title="t")
    with pytest.raises(ValueError, match="previous_load_E"):
        load_bars(np.ones(4), top_k=1, title="t", previous_load_E=np.ones(3))
    with pytest.raises(ValueError, match="bias_range"):
        load_bars(np.ones(4), top_k=1, title="t", bias_range=(0.0, np.inf))
