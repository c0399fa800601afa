"""Layouts: a design, a known model with numbers changed, its parameters and costs at once, beside where it began."""

from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import layout_tables, state
from app.figures.labels import si
from app.layout_design import LIMITS, Design
from app.text import plain
from app.views import layouts_models
from app.words import percent
from moe_core.layout import CONVENTIONS, DenseFFN, Layout
from moe_core.models import model_layout, model_names

_DEFAULT = "Mixtral-8x7B"
_LABELS = {
    "num_experts": ("Experts", "Routed experts in each MoE layer."),
    "top_k": ("Top k", "Experts that one token uses."),
    "expert_d_ff": ("Expert width", "Width of one expert, routed or shared."),
    "num_shared_experts": ("Shared experts", "Experts that every token passes."),
    "latent_size": ("Latent width", "Width that routed experts work in; 0 = the model's."),
    "num_layers": ("Layers", "Dense and MoE together."),
    "moe_frequency": ("MoE frequency", "Every n-th layer is MoE, the last of each n."),
    "first_k_dense": ("First dense layers", "So many at the start are dense whatever the frequency says."),
    "d_ff": ("Dense width", "Width of the feed-forward part of dense layers."),
    "d_model": ("Model width", "Width of the model; heads stay as they are."),
}
_NAME = "design"


def render(head: DeltaGenerator, controls: DeltaGenerator) -> None:
    """Draw the page. head: where its title goes. controls: where the choice of a model to begin with goes."""
    chosen = state.wanted_list("design")
    wanted = chosen[0] if chosen and chosen[0] in model_names() else _DEFAULT
    with controls:
        # not a choice of `state`: its value and the numbers below are one choice, and stand in the URL together
        st.session_state["design_base"] = wanted
        st.selectbox(
            "Begin with", model_names(), key="design_base", on_change=_begin, help="Other numbers stay its own."
        )
    base = model_layout(wanted)
    own = Design.of(base)
    design = own.changed(chosen[1:])
    _editor(design)
    changed = design != own
    try:
        layout = design.layout(base, _NAME if changed else base.name)
    except ValueError as error:
        head.title("A design")
        st.error(f"These numbers do not go together: {plain(str(error))}", icon=":material/error:")
        return
    head.title(title_of(layout))
    if not layout.moe_layers:
        st.warning("No layer is MoE here: lower the frequency or the number of dense layers.")
    _large_numbers(layout, base if changed else None)
    dense = layout.dense_equivalent()
    shown = [layout, *([base] if changed else []), dense]
    layouts_models.bars(shown, "Parameters: the design, where it began, and the dense model of the same cost")
    _dense(layout, dense)
    layouts_models.stacks([layout, base] if changed else [layout])
    layouts_models.tables(shown)


def title_of(layout: Layout) -> str:
    """The page's answer: how large, and what share a token uses."""
    return (
        f"{si(layout.total_parameters())} parameters, of which one token uses {si(layout.active_parameters())}, "
        f"{percent(float(layout.sparsity()), 1)}"
    )


def _editor(design: Design) -> None:
    names = list(_LABELS)
    for first in (0, 5):
        for column, name in zip(st.columns(5), names[first : first + 5], strict=True):
            label, help_ = _LABELS[name]
            low, high = LIMITS[name]
            st.session_state[f"design_{name}"] = getattr(design, name)
            column.number_input(
                label, low, high, step=1, key=f"design_{name}", help=help_, on_change=_change, args=(name,)
            )


def _begin() -> None:
    """Widget callback: another model to begin with; its own numbers come with it."""
    state.choose(design=[st.session_state["design_base"]])


def _change(name: str) -> None:
    """Widget callback: a number was changed."""
    base_name, *changes = state.wanted_list("design") or [_DEFAULT]
    base = model_layout(base_name if base_name in model_names() else _DEFAULT)
    design = Design.of(base).changed([*changes, f"{name}:{st.session_state[f'design_{name}']}"])
    state.choose(design=[base.name, *design.changes(base)])


def _large_numbers(layout: Layout, base: Layout | None) -> None:
    columns = st.columns(5)
    for column, (label, amount, before, help_) in zip(columns, _numbers(layout, base), strict=True):
        change = None if before is None or before == amount else f"{100 * (amount / before - 1):+.1f}%"
        column.metric(label, si(amount), change, delta_color="off", help=help_)


def _numbers(layout: Layout, base: Layout | None) -> list[tuple[str, float, float | None, str]]:
    context = layout_tables.CONTEXT
    told: list[tuple[str, Any, str]] = [
        ("Parameters", Layout.total_parameters, "All of them, embeddings included."),
        (
            "Active for a token",
            Layout.active_parameters,
            "; ".join(f"{words}: {layout.active_parameters(key):,}" for key, words in CONVENTIONS.items()),
        ),
        ("FLOPs a token", lambda of: of.flops_per_token(context), f"Forward, attending to {context:,} tokens."),
        ("Weights, bytes", lambda of: of.weight_bytes("bfloat16"), "In bfloat16; half of it in float8."),
        (
            "Cache, bytes",
            lambda of: of.cache_bytes_per_token("bfloat16"),
            "Keys and values of all layers that one token adds, in bfloat16.",
        ),
    ]
    return [(label, of(layout), None if base is None else of(base), help_) for label, of, help_ in told]


def _dense(layout: Layout, dense: Layout) -> None:
    widths = {
        after.ffn.d_ff
        for before, after in zip(layout.layers, dense.layers, strict=True)
        if before.is_moe and isinstance(after.ffn, DenseFFN)
    }
    for width in widths:
        st.caption(
            f"At the same cost for a token, a dense layer in place of each MoE layer would be {width:,} wide, and the "
            f"whole model would have {dense.total_parameters():,} parameters, "
            f"{percent(dense.total_parameters() / layout.total_parameters(), 1)} of the design's."
        )
