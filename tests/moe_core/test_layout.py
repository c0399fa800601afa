"""Layer patterns and parameter counts against hand values."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.layout import (
    CONVENTIONS,
    Count,
    DenseFFN,
    GroupedQueryAttention,
    LatentAttention,
    Layer,
    Layout,
    MoEFFN,
    ffn_parameters,
    moe_layer_indices,
)
from moe_core.whole import whole


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


@given(st.integers(1, 60), st.integers(1, 9))
def test_the_classic_forms(num_layers: int, n: int) -> None:
    odd = [i for i in range(num_layers) if i % 2 != 0]
    last_of_n = [i for i in range(num_layers) if i % n == n - 1]
    first_of_n = [i for i in range(num_layers) if i % n == 0]
    assert list(moe_layer_indices(num_layers, moe_frequency=2)) == odd
    assert list(moe_layer_indices(num_layers, moe_frequency=n)) == last_of_n
    assert list(moe_layer_indices(num_layers, moe_frequency=n, moe_offset=0)) == first_of_n


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

    assert ffn_parameters(4, 6, "gelu", bias=True) == 48 + 6 + 4
    assert ffn_parameters(4, 6, "swiglu", bias=True) == 72 + 12 + 4


def test_a_moe_layer_by_hand() -> None:
    # D = 4, F = 6: one plain expert has 2 * 4 * 6 = 48 weights, and 6 + 4 biases.
    plain = MoEFFN(num_experts=5, top_k=2, expert_d_ff=6, shared_d_ff=18, activation="gelu")
    assert plain.components(4) == {
        "router": Count(20, 20, 20),
        "routed": Count(240, 96, 96),
        "shared": Count(144, 144, 144),
        "latent": Count(),
    }
    full = MoEFFN(
        num_experts=5,
        top_k=2,
        expert_d_ff=6,
        shared_d_ff=6,
        activation="gelu",
        expert_bias=True,
        shared_bias=True,
        router_bias=True,
        shared_gate=True,
        latent_size=3,
    )
    # experts work in 3 dimensions: 2 * 3 * 6 = 36 weights, 6 + 3 biases
    assert full.components(4) == {
        "router": Count(25, 25, 20),
        "routed": Count(225, 90, 72),
        "shared": Count(62, 62, 52),
        "latent": Count(27, 27, 24),
    }


@pytest.mark.parametrize(("shared", "number"), [(0, 0), (6, 1), (18, 3), (3, 1), (20, 1)])
def test_shared_experts_are_told_by_their_width(shared: int, number: int) -> None:
    assert MoEFFN(num_experts=2, top_k=1, expert_d_ff=6, shared_d_ff=shared).num_shared_experts == number


def test_attention_by_hand() -> None:
    # D = 10, two query heads of 3 over one key-value head: 10 * (6 + 3 + 3) + 6 * 10
    plain = GroupedQueryAttention(num_heads=2, num_kv_heads=1, head_dim=3)
    assert plain.count(10) == Count(180, 180, 180)
    assert plain.cache_values == 6
    assert plain.score_flops(7) == 2 * (2 * 2 * 7 * 3)  # scores and weighted values, two heads, 2 FLOPs a product
    rich = GroupedQueryAttention(
        num_heads=2, num_kv_heads=1, head_dim=3, qkv_bias=True, out_bias=True, qk_norm="full", sinks=True, window=4
    )
    assert rich.count(10) == Count(180 + 12 + 10 + 9 + 2, 213, 180)
    assert rich.score_flops(7) == 2 * (2 * 2 * 4 * 3)
    # queries 10 -> 4 -> 2 * (3 + 2); keys and values 10 -> 5 + 2 -> 2 * (3 + 6); out 12 -> 10
    mla = LatentAttention(
        num_heads=2, q_lora_rank=4, kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=6, bias=True
    )
    assert mla.count(10) == Count(80 + 70 + 90 + 120 + 4 + 5 + 4 + 7 + 10, 390, 360)
    assert mla.cache_values == 7


def model(*, tied: bool = False, **moe: int) -> Layout:
    """Two layers of width 10, the second MoE, 100 tokens in the vocabulary."""
    attention = GroupedQueryAttention(num_heads=2, num_kv_heads=1, head_dim=3, window=4)
    ffn = MoEFFN(**{"num_experts": 4, "top_k": 1, "expert_d_ff": 6, "activation": "gelu", **moe})
    layers = (Layer(attention=attention, ffn=DenseFFN(d_ff=20)), Layer(attention=attention, ffn=ffn))
    return Layout(name="two", vocab_size=100, d_model=10, layers=layers, tied_embeddings=tied)


def test_a_model_by_hand() -> None:
    layout = model()
    # embeddings, attention and norms of two layers, dense 3 * 10 * 20, router, experts of 2 * 10 * 6
    assert layout.total_parameters() == 2000 + 2 * (180 + 20) + 600 + 40 + 480 + 10
    assert layout.active_parameters() == 2000 + 400 + 600 + 40 + 120 + 10
    assert [layout.active_parameters(name) for name in CONVENTIONS] == [3170, 2170, 1170]
    assert [layout.total_parameters(name) for name in CONVENTIONS] == [3530, 2530, 1530]
    assert layout.sparsity() == Fraction(3170, 3530)
    assert layout.flops_per_token(3) == 2 * (1000 + 360 + 600 + 40 + 120) + 2 * 72
    assert layout.flops_per_token(9) == 2 * 2120 + 2 * 96, "windows of 4"
    assert layout.cache_bytes_per_token() == 2 * 12
    assert layout.cache_bytes(3, "float32") == 4 * 2 * 6 * 3
    assert layout.cache_bytes(9, "float32") == 4 * 2 * 6 * 4
    assert layout.weight_bytes("float32") == 4 * 3530
    assert layout.weight_bytes("int4") == 1765
    assert layout.weight_bytes("mxfp4") == 1876  # 3530 * 4.25 / 8 = 1875.3
    tied = model(tied=True)
    assert tied.total_parameters() == 2530
    assert [tied.active_parameters(name) for name in CONVENTIONS] == [2170, 1170, 1170]
    assert tied.flops_per_token(3) == layout.flops_per_token(3), "the output is multiplied all the same"


def test_counts_of_layers_and_components_add_up() -> None:
    layout = model(shared_d_ff=6, latent_size=3)
    told = layout.as_dict()
    outside = 2000 + 10  # embeddings and the last norm
    for kind in ("total", "active"):
        whole_model = sum(part[kind] for part in told["components"].values())
        assert sum(layer[kind] for layer in told["layers"]) + outside == whole_model
        for layer in told["layers"]:
            assert sum(part[kind] for part in layer["components"].values()) == layer[kind]
    assert told["total_parameters"] == layout.total_parameters()
    assert [layer["kind"] for layer in told["layers"]] == ["dense", "moe"]
    assert told["layers"][0]["num_experts"] is None
    assert (told["layers"][1]["num_experts"], told["layers"][1]["top_k"]) == (4, 1)


@given(st.integers(1, 8), st.integers(1, 300), st.integers(0, 40), st.sampled_from([None, 3, 50]))
def test_the_dense_equivalent_costs_the_same(top_k: int, width: int, shared: int, latent: int | None) -> None:
    layout = model(num_experts=8, top_k=top_k, expert_d_ff=width, shared_d_ff=shared, latent_size=latent)
    dense = layout.dense_equivalent()
    assert dense.moe_layers == ()
    assert dense.count.total == dense.count.active
    unit = 2 * 10  # one more in width costs so many weights in one layer
    assert abs(dense.count.multiplied - layout.count.multiplied) <= unit / 2 or dense.layers[1].ffn.d_ff == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"top_k": 5}, "top_k=5 must be from 1 to 4"),
        ({"top_k": 0}, "top_k=0 must be from 1 to 4"),
        ({"num_experts": 0}, "num_experts=0 must be from 1"),
        ({"num_experts": 10**12}, "num_experts=1000000000000 must be from 1 to 1000000"),
        ({"expert_d_ff": 0}, "expert_d_ff=0 must be from 1"),
        ({"shared_d_ff": -1}, "shared_d_ff=-1 must be from 0"),
        ({"latent_size": 0}, "latent_size=0 must be from 1"),
        ({"activation": "relu"}, "activation='relu' must be one of 'swiglu', 'gelu'"),
    ],
)
def test_bad_shapes_name_the_value_and_what_is_allowed(change: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        model(**change)


def test_bad_questions_name_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="convention='most' must be one of 'all'"):
        model().active_parameters("most")
    with pytest.raises(ValueError, match="precision='fp3' must be one of 'float32'"):
        model().weight_bytes("fp3")
    with pytest.raises(ValueError, match="num_kv_heads=2 does not divide num_heads=3"):
        GroupedQueryAttention(num_heads=3, num_kv_heads=2, head_dim=4)


@pytest.mark.parametrize(
    "value", [True, 2.0, "2", None, float("nan"), [2], 1 << 9999, -1], ids=lambda v: type(v).__name__
)
def test_only_whole_numbers_in_range_are_whole(value: object) -> None:
    with pytest.raises(ValueError, match="^size=.{1,80} must be ") as error:
        whole("size", value, 0, 10)
    assert "\n" not in str(error.value)
