"""Layouts of published models, side by side: stacks, parameters in one bar each, and what a token costs."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import charts, layout_tables, state
from app.figures.model_map import MAX_ROWS, model_map
from app.figures.parameter_split import Split, parameter_split
from app.text import plain
from app.words import count, percent
from moe_core.layout import CONVENTIONS, Layout, MoEFFN
from moe_core.models import PUBLISHED, model_layout, model_names

DEFAULT = ("Mixtral-8x7B", "DeepSeek-V3")
MOST = 4


def render(head: DeltaGenerator, controls: DeltaGenerator) -> None:
    """Draw the page. head: where its title goes. controls: where the choice of models goes."""
    with controls:
        names = state.pick_options("models", "Models", model_names(), default=DEFAULT, max_selections=MOST)
    layouts = [model_layout(name) for name in names]
    head.title(title_of(layouts), help="Counted from the models' shapes; all parameters, embeddings included.")
    if not layouts:
        st.info("Pick a model or several, up to four, to see them side by side.")
        return
    bars(layouts)
    stacks(layouts)
    tables(layouts)


def title_of(layouts: Sequence[Layout]) -> str:
    """The page's answer: what share of its parameters a token uses, of each model."""
    if not layouts:
        return "No model picked"
    shares = [f"{percent(float(layout.sparsity()), 1)} of {plain(layout.name)}" for layout in layouts]
    return "One token uses " + ", ".join(shares)


def bars(layouts: Sequence[Layout], title: str = "Parameters: all, and those that one token uses") -> None:
    """One bar a model, and what to look for."""
    st.caption(
        "One bar a model, all on one scale. Look at the part in colour: what one token pays for. Embeddings are "
        "counted; the table below has the two other ways to count as well."
    )
    splits = [
        Split(name=layout.name, active=layout.active_parameters(), total=layout.total_parameters())
        for layout in layouts
    ]
    charts.show(
        parameter_split(splits, title=title, theme=charts.theme()),
        key="layout_split",
        alt="; ".join(f"{split.name}: {split.active:,} of {split.total:,} parameters active" for split in splits),
    )


def stacks(layouts: Sequence[Layout]) -> None:
    """The layers of each model, two models a row."""
    wide = len(layouts) == 1
    words = "Layers from left to right: a dense one is a plain block, a MoE layer a column of experts."
    if not wide:  # one alone has a note of its own
        parts = {layer.ffn for layout in layouts for layer in layout.layers}
        moe = [part for part in parts if isinstance(part, MoEFFN)]
        if any(part.num_experts > MAX_ROWS for part in moe):
            words += f" Above {MAX_ROWS} experts a cell stands for several neighbours."
        if any(part.shared_d_ff for part in moe):
            words += " Framed below: shared experts."
        if any(part.latent_size for part in moe):
            words += " Narrow columns: experts work in a latent width."
    st.caption(f"{words} Point at a layer for its numbers.")
    for first in range(0, len(layouts), 2):
        row = layouts[first : first + 2]
        for column, layout in zip([st.container()] if wide else st.columns(2), row, strict=False):
            with column:
                figure = model_map(
                    layout_tables.map_layers(layout),
                    title=layout.name,
                    theme=charts.theme(),
                    d_model=layout.d_model,
                    height=300,
                    wrap_at=88 if wide else 40,
                    panel=not wide,
                )
                alt = f"Diagram of {layout.name}: {len(layout.moe_layers)} of {count(len(layout.layers), 'layer')} MoE."
                charts.show(figure, key=f"layout_stack_{first + row.index(layout)}", alt=alt)


def tables(layouts: Sequence[Layout]) -> None:
    """The numbers: a row a model, a row a component, a row a layer; and all of it as JSON."""
    st.subheader("In numbers", anchor=False)
    st.caption(
        f"FLOPs: one token forward, attending to {layout_tables.CONTEXT:,} tokens. Weights and key-value cache in "
        "bfloat16. Dense equivalent: the dense model whose token costs the same. Published: the figures of the "
        "authors, under the way of counting that they name or that fits best."
    )
    frame = layout_tables.model_table(layouts)
    charts.table(frame, key="layout_models", columns=formats(frame))
    for note in dict.fromkeys(PUBLISHED[layout.name].note for layout in layouts if layout.name in PUBLISHED):
        if note:
            st.caption(note)
    st.download_button(
        "Save as JSON",
        data=lambda: layout_tables.as_json(layouts),
        file_name="layouts.json",
        mime="application/json",
        key="layout_json",
        icon=":material/download:",
        on_click="ignore",
    )
    with st.expander("Component by component", icon=":material/table:"):
        frame = layout_tables.component_table(layouts)
        charts.table(frame, key="layout_components", columns=formats(frame))
    with st.expander("Layer by layer", icon=":material/table:"):
        frame = layout_tables.layer_table(layouts)
        charts.table(frame, key="layout_model_layers", columns=formats(frame))


def formats(frame: pd.DataFrame) -> dict[str, Any]:
    """Whole numbers with their thousands apart, shares with one decimal."""
    columns: dict[str, Any] = {}
    for name in map(str, frame.columns):
        if pd.api.types.is_integer_dtype(frame[name]):
            columns[name] = st.column_config.NumberColumn(format="localized")
        elif pd.api.types.is_float_dtype(frame[name]):
            columns[name] = st.column_config.NumberColumn(format="%.1f")
    for key, words in CONVENTIONS.items():
        if f"active, {words}" in columns and key == "all":
            columns[f"active, {words}"] = st.column_config.NumberColumn(
                format="localized", help="All routed experts replaced by the top-k that a token uses."
            )
    return columns
