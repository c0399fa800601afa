import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recorder.schema import (
    SCHEMAS,
    TABLES,
    conform,
    id_type,
    lists_to_matrix,
    part_problem,
    round_weights,
    unify_schema,
    unify_types,
)


@pytest.mark.parametrize(
    ("num_experts", "expected"),
    [
        (1, pa.int8()),
        (127, pa.int8()),
        (128, pa.int16()),
        pytest.param(200, pa.int16(), id="R16-200"),
        pytest.param(256, pa.int16(), id="R16-256"),
        pytest.param(300, pa.int16(), id="R16-300"),
        (32767, pa.int16()),
        (32768, pa.int32()),
        (None, pa.int32()),
    ],
)
def test_id_type_holds_e_and_the_sentinel(num_experts, expected):
    assert id_type(num_experts) == expected
    if num_experts is not None:
        assert pa.array([num_experts, -1], id_type(num_experts)).to_pylist() == [num_experts, -1]


@pytest.mark.parametrize("num_experts", [0, -3, 2**31])
def test_id_type_refuses_what_no_type_holds(num_experts):
    with pytest.raises(ValueError, match=str(num_experts)):
        id_type(num_experts)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1.0 + 2**-10, 1.0 + 2**-10),
        (1.0 + 2**-11, 1.0 + 2**-10),  # exactly half: up
        (1.0 + 2**-11 - 2**-23, 1.0),  # just below half: down
        (-(1.0 + 2**-11), -(1.0 + 2**-10)),  # half up on the bit pattern is away from zero
        (2.0 - 2**-12, 2.0),  # the carry goes into the exponent
        (0.1, 0.0999755859375),  # 1638 / 16384: 0.1 = 1.6 * 2^-4, and 1.6 * 1024 = 1638.4
        (0.0, 0.0),
        (np.inf, np.inf),
        (-np.inf, -np.inf),
    ],
)
def test_round_weights_by_hand(value, expected):
    assert round_weights(np.float32([value])).tolist() == [expected]


def test_round_weights_keeps_specials_and_shape():
    largest = np.finfo(np.float32).max
    rounded = round_weights(np.float32([[np.nan, -0.0], [largest, -largest]]))
    assert rounded.shape == (2, 2)
    assert np.isnan(rounded[0, 0])
    assert np.signbit(rounded[0, 1])
    assert rounded[0, 1] == 0
    assert np.isfinite(rounded[1]).all(), "a finite weight must not become infinite"
    assert round_weights(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert round_weights(np.asfortranarray(np.float32([[1, 2], [3, 4]]))).tolist() == [[1, 2], [3, 4]]


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(max_dims=2, max_side=20),
        elements=st.floats(2.0**-100, 2.0**100, width=32) | st.floats(-(2.0**100), -(2.0**-100), width=32),
    )
)
def test_round_weights_error_and_bits(weights):
    rounded = round_weights(weights)
    error = np.abs(rounded.astype(np.float64) - weights) / np.abs(weights.astype(np.float64))
    assert error.max(initial=0) <= 2**-11
    mantissa, _ = np.frexp(rounded.astype(np.float64))
    steps = mantissa * 2**11  # a mantissa in [.5, 1) with 10 stored bits is a multiple of 2^-11
    assert (steps == np.round(steps)).all()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.null(), pa.float32(), pa.float32()),
        (pa.int8(), pa.int32(), pa.int32()),
        (pa.int64(), pa.float32(), pa.float64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.uint8(), pa.int8(), pa.int16()),
        (pa.uint8(), pa.uint16(), pa.uint16()),
        (pa.uint64(), pa.int8(), pa.int64()),
        (pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.list_(pa.int64()), pa.list_(pa.float64()), pa.list_(pa.float64())),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int16(), 2), pa.list_(pa.int16(), 2)),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3), pa.list_(pa.int8())),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8()), pa.list_(pa.int8())),
    ],
)
def test_unify_types_both_ways(first, second, expected):
    assert unify_types(first, second) == expected
    assert unify_types(second, first) == expected


@pytest.mark.parametrize("other", [pa.string(), pa.list_(pa.int64()), pa.bool_(), pa.timestamp("s")])
def test_unify_types_refuses(other):
    with pytest.raises(TypeError, match="do not go together"):
        unify_types(pa.int64(), other)


def test_unify_schema_keeps_fixed_lists_only_where_all_parts_agree():
    two = pa.schema([("step", pa.int64()), ("experts", pa.list_(pa.int8(), 2))])
    three = pa.schema([("step", pa.int64()), ("experts", pa.list_(pa.int8(), 3)), ("extra", pa.string())])
    assert unify_schema("decisions", [two]).field("experts").type == pa.list_(pa.int8(), 2)
    both = unify_schema("decisions", [two, three])
    assert both.field("experts").type == pa.list_(pa.int8())
    assert both.field("weights").type == pa.list_(pa.float32())
    assert both.names == [*SCHEMAS["decisions"].names, "extra"]
    assert unify_schema("steps", []) == SCHEMAS["steps"]


def test_conform_adds_casts_and_orders():
    table = pa.table({"b": pa.array([1, 2], pa.int32()), "c": ["x", "y"]})
    result = conform(table, pa.schema([("a", pa.float64()), ("b", pa.float64())]))
    assert result.to_pydict() == {"a": [None, None], "b": [1.0, 2.0]}
    assert result.schema.types == [pa.float64(), pa.float64()]


def test_part_problem_names_the_column():
    good = pa.schema([("step", pa.int64()), ("layer", pa.int32()), ("load", pa.list_(pa.int64()))])
    assert part_problem("layer_stats", good) is None
    assert "load missing" in part_problem("layer_stats", pa.schema([("step", pa.int64()), ("layer", pa.int32())]))
    assert "column step is string" in part_problem("steps", pa.schema([("step", pa.string())]))


def test_every_table_ends_with_rank_and_segment():
    assert set(SCHEMAS) == set(TABLES)
    for schema in SCHEMAS.values():
        assert schema.names[-2:] == ["rank", "segment"]


def test_lists_to_matrix():
    lists = [[1, 2, 3], [4, 5, 6]]
    for kind in (pa.list_(pa.int16()), pa.list_(pa.int16(), 3)):
        assert lists_to_matrix(pa.array(lists, kind)).tolist() == lists
        sliced = pa.chunked_array([pa.array([[0, 0, 0], *lists], kind).slice(1)])
        assert lists_to_matrix(sliced).tolist() == lists
    assert lists_to_matrix(pa.array([], pa.list_(pa.int16(), 3))).shape == (0, 3)
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        lists_to_matrix(pa.array([[1], [1, 2]]))
    with pytest.raises(ValueError, match="1 of 2 lists are null"):
        lists_to_matrix(pa.array([[1], None]))
