"""The model's map and parameter bars against hand values."""

import numpy as np
import pytest

from app.figures import theme
from app.figures.model_map import MAX_CLICKABLE_CELLS, layer_summary, model_map
from app.figures.parameter_bars import parameter_bars


def dense(index):
    return {"index": index, "kind": "dense", "num_experts": None, "parameters_total": 1000, "parameters_active": 1000}


def moe(index, experts=8, top_k=2, shared=0):
    return {
        "index": index,
        "kind": "moe",
        "num_experts": experts,
        "top_k": top_k,
        "num_shared_experts": shared,
        "parameters_total": 4000,
        "parameters_active": 1500,
    }


def heatmaps(fig):
    return [t for t in fig.data if t.type == "heatmap"]


def test_layout_diagram_has_a_block_per_layer_and_a_cell_per_expert():
    fig = model_map([dense(0), moe(1, shared=1), dense(2), moe(3, shared=1)], title="t")
    assert [np.asarray(t.z).shape for t in heatmaps(fig)] == [(8, 1), (8, 1)]
    assert [np.mean(t.x) for t in heatmaps(fig)] == [1, 3]
    foot = [s for s in fig.layout.shapes if s.y1 < 0]
    assert [(s.x0 + s.x1) / 2 for s in foot] == [1, 3]
    assert [t.split("<br>")[0] for t in fig.layout.xaxis.ticktext] == ["0", "1", "2", "3"]
    heads = next(t for t in fig.data if t.name == "layers")
    assert list(heads.text) == ["dense", "top 2 of 8", "dense", "top 2 of 8"]
    assert fig.layout.coloraxis.cmin is None


def test_cells_have_load_colours():
    fig = model_map([dense(0), moe(1, experts=4, top_k=1)], title="t", load_by_layer={1: np.array([40, 20, 20, 0])})
    (trace,) = heatmaps(fig)
    assert np.asarray(trace.z).ravel().tolist() == [1, 0, 0, theme.IDLE_Z]
    assert trace.coloraxis == "coloraxis"
    assert (fig.layout.coloraxis.cmin, fig.layout.coloraxis.cmax) == (-5, 5)
    assert "2.000 x the uniform share, 40 assignments" in trace.text[0][0]


def test_layers_without_load_say_no_data():
    fig = model_map([moe(1), moe(3)], title="t", load_by_layer={1: np.ones(8)})
    assert "no data" in heatmaps(fig)[1].text[0][0]
    assert heatmaps(fig)[1].coloraxis is None
    assert list(next(t for t in fig.data if t.name == "layers").text) == ["top 2 of 8", "no data"]


def test_a3_missing_layers_leave_no_gap():
    fig = model_map([dense(0), moe(3), moe(10)], title="t")
    assert list(fig.layout.xaxis.tickvals) == [0, 1, 2]
    assert [t.split("<br>")[0] for t in fig.layout.xaxis.ticktext] == ["0", "3", "10"]


def test_93_layers_of_896_experts_stay_small():
    layers = [dense(i) if i < 3 else moe(i, experts=896, top_k=16, shared=1) for i in range(93)]
    load = {i: np.full(896, 10) for i in range(3, 93)}
    load[50][700] = 10_000
    load[60][:14] = 0
    fig = model_map(layers, title="t", load_by_layer=load)
    cells = sum(np.asarray(t.z).size for t in heatmaps(fig))
    assert cells == 90 * 64
    assert len(fig.layout.shapes) < 300
    assert len(fig.to_json()) < 2_000_000
    assert "busiest of up to 14" in fig.layout.title.text
    # expert 700 lies in cell 50 of its layer (14 experts each) and shows although 13 neighbours are cold
    assert np.asarray(heatmaps(fig)[50 - 3].z)[50, 0] == theme.BEYOND_Z
    assert np.asarray(heatmaps(fig)[60 - 3].z)[0, 0] == theme.IDLE_Z
    assert "busiest: expert 700" in heatmaps(fig)[50 - 3].text[50][0]
    assert "never used: 14 of 14" in heatmaps(fig)[60 - 3].text[0][0]


def test_a1_points_carry_layer_and_expert():
    fig = model_map([dense(0), moe(1), dense(2), moe(3)], title="t", clickable=True)
    (points,) = [t for t in fig.data if t.name == "cells"]
    chosen = [
        (x, round(y, 4))
        for x, y, data in zip(points.x, points.y, points.customdata, strict=True)
        if list(data) == [3, 5]
    ]
    assert chosen == [(3, round(5.5 / 8, 4))]
    assert [0, -1] in [list(d) for d in points.customdata]
    assert points.marker.opacity == 0


def test_too_many_cells_have_no_points():
    layers = [moe(i, experts=64) for i in range(MAX_CLICKABLE_CELLS // 64 + 1)]
    assert not [t for t in model_map(layers, title="t", clickable=True).data if t.name == "cells"]


def test_selected_expert_is_framed():
    fig = model_map([dense(0), moe(1)], title="t", selected=(1, 3))
    frame = fig.layout.shapes[-1]
    assert (frame.y0, frame.y1) == (3 / 8, 4 / 8)
    assert frame.line.width == 3


def test_summary_tells_what_a_layer_is():
    text = layer_summary(moe(3, shared=1) | {"latent_size": 32, "balancer": "<b>"})
    for part in (
        "layer 3",
        "mixture of 8 experts, top 2",
        "1 shared expert",
        "latent width 32",
        "4,000 parameters",
        "1,500 active",
    ):
        assert part in text
    assert "balancer: &lt;b&gt;" in text
    assert "dense" in layer_summary(dense(0))


def test_load_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="8 experts"):
        model_map([moe(1)], title="t", load_by_layer={1: np.ones(7)})


def test_empty_model():
    model_map([], title="t").to_json()


def test_parameter_bars_by_hand():
    fig = parameter_bars([dense(0), moe(1)], [1000, 1000], title="t")
    bars = {t.name: t for t in fig.data}
    assert list(bars["total"].y) == [1000, 4000]
    assert list(bars["active for a token"].y) == [1000, 1500]
    assert list(bars["total"].text) == ["", "4.00x"]
    assert list(bars["active for a token"].text) == ["", "1.50x"]
    assert list(bars["total"].customdata) == [1, 4]
    assert list(fig.layout.xaxis.categoryarray) == ["0", "1"]
    by_index = parameter_bars([dense(0), moe(1)], {0: 1000, 1: 2000}, title="t")
    assert next(list(t.customdata) for t in by_index.data if t.name == "total") == [1, 2]
    with pytest.raises(ValueError, match="1 dense sizes for 2 layers"):
        parameter_bars([dense(0), moe(1)], [1000], title="t")


def test_experts_of_a_latent_width_stand_in_a_narrower_column():
    full, latent = moe(0), {**moe(1), "latent_size": 32}
    fig = model_map([full, latent], title="t", d_model=64)
    wide, narrow = (t.x[1] - t.x[0] for t in heatmaps(fig))
    assert narrow == pytest.approx(wide / 2)
    assert "experts work in a latent width, 32 of 64" in fig.layout.title.text
    assert "latent" not in model_map([full], title="t", d_model=64).layout.title.text
    untold = model_map([full, latent], title="t")
    assert heatmaps(untold)[1].x[1] - heatmaps(untold)[1].x[0] == pytest.approx(wide)


def test_a_panel_has_no_note_and_no_expert_numbers():
    alone, panel = (model_map([moe(i) for i in range(32)], title="t", panel=small) for small in (False, True))
    assert "<br>" in alone.layout.title.text
    assert "<br>" not in panel.layout.title.text
    assert [any(t.name == "expert numbers" for t in fig.data) for fig in (alone, panel)] == [True, False]
    assert len(panel.layout.xaxis.tickvals) == len(alone.layout.xaxis.tickvals) / 2
