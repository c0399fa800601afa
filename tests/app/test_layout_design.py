"""Designs: what the editor holds and changes, and how the URL keeps it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.layout_design import LIMITS, Design
from moe_core.layout import Layout
from moe_core.models import model_layout, model_names


@pytest.mark.parametrize("name", model_names())
def test_an_unchanged_design_is_the_model_itself(name: str) -> None:
    base = model_layout(name)
    design = Design.of(base)
    assert design.layout(base, name) == base
    assert design.changes(base) == []


def test_changes_by_hand() -> None:
    base = model_layout("Mixtral-8x7B")
    design = Design.of(base).changed(["num_experts:16", "latent_size:1024", "moe_frequency:2", "num_shared_experts:1"])
    layout = design.layout(base, "mine")
    assert layout.moe_layers == tuple(range(1, 32, 2))
    parts = layout.layers[1].ffn.components(4096)
    assert parts["routed"].total == 16 * 3 * 1024 * 14336
    assert parts["shared"].total == 3 * 4096 * 14336
    assert parts["latent"].total == 2 * 4096 * 1024 + 1024
    # dense layers cost a token what Mixtral's own MoE layers do: two experts
    assert layout.layers[0].ffn.d_ff == 2 * 14336
    assert (layout.name, layout.layers[0].attention) == ("mine", base.layers[0].attention)


def test_windows_keep_their_turns_in_a_longer_stack() -> None:
    base = model_layout("gpt-oss-20b")
    layout = Design.of(base).changed(["num_layers:30"]).layout(base, "longer")
    assert [layer.attention.window for layer in layout.layers] == [128, None] * 15


@given(st.sampled_from(model_names()), st.lists(st.tuples(st.sampled_from(sorted(LIMITS)), st.integers(0, 10**9 - 1))))
def test_changes_survive_the_url(name: str, numbers: list[tuple[str, int]]) -> None:
    base = model_layout(name)
    own = Design.of(base)
    design = own.changed([f"{field}:{value}" for field, value in numbers])
    assert own.changed(design.changes(base)) == design


@given(st.text())
def test_nonsense_in_the_url_changes_nothing(text: str) -> None:
    own = Design.of(model_layout("tiny"))
    assert own.changed([text, f"num_experts:{text}x", f"{text}:8", ":", "num_experts:", "num_experts:-1"]) == own


def test_numbers_beyond_the_editor_are_fitted_and_ones_that_do_not_fit_together_are_named() -> None:
    base = model_layout("tiny")
    assert Design.of(base).changed(["num_layers:99999", "num_experts:0"]).num_layers == LIMITS["num_layers"][1]
    with pytest.raises(ValueError, match="top_k=9 must be from 1 to 8"):
        Design.of(base).changed(["num_experts:8", "top_k:9"]).layout(base, "bad")


def test_a_model_without_moe_layers_is_no_beginning() -> None:
    dense: Layout = model_layout("tiny").dense_equivalent()
    with pytest.raises(ValueError, match="no MoE layer to start from"):
        Design.of(dense)
