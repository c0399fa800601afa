"""Layer patterns and parameter counts against hand values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.layout import LayerParameters, ffn_parameters, moe_layer_indices, moe_parameters


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param({}, (0, 1, 2, 3, 4, 5), id="all-moe"),
        pytest.param({"moe_frequency": 2}, (1, 3, 5), id="dense-moe-dense-moe"),
        pytest.param({"moe_frequency": 2, "moe_offset": 0}, (0, 2, 4), id="moe-dense"),
        pytest.param({"moe_frequency": 3}, (2, 5), id="every-third"),
        pytest.param({"moe_frequency": 3, "moe_offset": 1}, (1, 4), id="every-third-from-1"),
        pytest.param({"moe_frequency": 3, "moe_offset": 0}, (0, 3), id="every-third-from-0"),
        pytest.param({"first_k_dense": 1}, (1, 2, 3, 4, 5), id="first-dense"),
        pytest.param({"first_k_dense": 2, "moe_frequency": 2}, (3, 5), id="first-dense-then-every-second"),
        pytest.param({"first_k_dense": 6}, (), id="all-dense"),
        pytest.param({"moe_frequency": 7}, (), id="pattern-longer-than-model"),
        pytest.param({"explicit": [4, 0]}, (0, 4), id="explicit"),
        pytest.param({"explicit": []}, (), id="explicit-none"),
    ],
)
def test_patterns_of_six_layers(arguments: dict, expected: tuple[int, ...]) -> None:
    assert moe_layer_indices(6, **arguments) == expected


@given(st.integers(1, 100), st.integers(1, 12), st.data())
def test_pattern_starts_at_its_offset_and_repeats(num_layers: int, frequency: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, frequency - 1))
    dense = data.draw(st.integers(0, num_layers))
    expected = [i for i in range(offset, num_layers, frequency) if i >= dense]
    indices = moe_layer_indices(num_layers, moe_frequency=frequency, moe_offset=offset, first_k_dense=dense)
    assert list(indices) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"num_layers": 2.0}, r"num_layers=2.0 must be a whole number"),
        ({"num_layers": 4, "moe_frequency": 0}, "moe_frequency=0 must be at least 1"),
        ({"num_layers": 4, "moe_frequency": 2, "moe_offset": 2}, "moe_offset=2 must be from 0 to 1"),
        ({"num_layers": 4, "moe_offset": -1}, "moe_offset=-1 must be from 0 to 0"),
        ({"num_layers": 4, "first_k_dense": 5}, "first_k_dense=5 must be from 0 to 4"),
        ({"num_layers": 4, "first_k_dense": -1}, "first_k_dense=-1 must be from 0 to 4"),
        ({"num_layers": 4, "explicit": [1, 4]}, "explicit layer=4 must be from 0 to 3"),
        ({"num_layers": 4, "explicit": [-1]}, "explicit layer=-1 must be from 0 to 3"),
        ({"num_layers": 4, "explicit": [1, 2, 1]}, r"explicit=\[1, 2, 1\] names a layer twice"),
        ({"num_layers": 4, "explicit": [1], "moe_frequency": 2}, "leave out moe_frequency=2"),
    ],
)
def test_bad_layouts_name_the_value_and_what_is_allowed(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        moe_layer_indices(**arguments)


def test_ffn_parameters() -> None:
    assert ffn_parameters(64, 128, "swiglu") == 24_576
    assert ffn_parameters(64, 128, "gelu") == 16_384


def test_mixtral_8x7b_layer() -> None:
    layer = moe_parameters(4096, 14336, 8, 2, 0, "swiglu")
    assert layer == LayerParameters(
        total=1_409_318_912, active=352_354_304, router=32_768, experts=1_409_286_144, shared=0
    )
    # 32 such layers, each with attention (q and o of 4096 x 4096, k and v of 4096 x 1024) and two norms,
    # a final norm, and two embeddings of 32,000: the published model's checked total.
    attention_and_norms = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096
    assert 32 * (layer.total + attention_and_norms) + 4096 + 2 * 32_000 * 4096 == 46_702_792_704


def test_olmoe_model_total() -> None:
    # 16 layers of width 2048, 64 experts of 1024, four 2048 x 2048 attention matrices, two norms of the
    # hidden state and two full-width norms of queries and keys, embeddings of 50,304.
    layer = moe_parameters(2048, 1024, 64, 8, 0, "swiglu")
    assert layer.experts == 402_653_184
    assert 16 * (layer.total + 4 * 2048 * 2048 + 4 * 2048) + 2048 + 2 * 50_304 * 2048 == 6_919_161_856


def test_shared_experts_are_always_active() -> None:
    # D=4, F=6: one plain expert has 2 * 4 * 6 = 48.
    assert moe_parameters(4, 6, 5, 2, 3, "gelu") == LayerParameters(
        total=20 + 240 + 144, active=20 + 96 + 144, router=20, experts=240, shared=144
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((64, 128, 4, 5, 0, "swiglu"), "top_k=5 must be from 1 to 4"),
        ((64, 128, 4, 0, 0, "swiglu"), "top_k=0 must be from 1 to 4"),
        ((64, 128, 0, 1, 0, "swiglu"), "num_experts=0 must be at least 1"),
        ((64, 0, 4, 1, 0, "swiglu"), "expert_d_ff=0 must be at least 1"),
        ((0, 128, 4, 1, 0, "swiglu"), "d_model=0 must be at least 1"),
        ((64, 128, 4, 1, -1, "swiglu"), "num_shared_experts=-1 must be at least 0"),
        ((64, 128, 4, 1, 0, "relu"), "activation='relu' must be one of 'swiglu', 'gelu'"),
    ],
)
def test_bad_shapes_name_the_value_and_what_is_allowed(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        moe_parameters(*arguments)
