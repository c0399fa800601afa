"""Runs to compare whose loads are given, and what the page that compares them should say, by definition."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from opened import tables
from streamlit.testing.v1 import AppTest

from recorder.writer import RunWriter


def words(test: AppTest) -> str:
    kinds = (test.title, test.info, test.warning, test.error, test.markdown, test.caption, test.code)
    return "\n".join(element.value for kind in kinds for element in kind)


def table_with(test: AppTest, column: str) -> pd.DataFrame:
    return next(frame for frame in tables(test) if column in frame)


def figures(test: AppTest) -> list[dict[str, Any]]:
    return [json.loads(chart.proto.spec) for chart in test.get("plotly_chart")]


def loads(run: Path, layer: int) -> pd.DataFrame:
    """One row a training step of a layer, straight from the files; `load` as arrays."""
    rows = pd.read_parquet(run / "layer_stats").query("phase == 'train' and layer == @layer").sort_values("step")
    return rows.reset_index(drop=True)


def by_hand(run: Path, layer: int, steps: Iterable[int]) -> dict[str, float | None]:
    """The metrics of the table over these steps, each by its definition."""
    steps = list(steps)
    rows = loads(run, layer)
    rows = rows[rows["step"].isin(steps)]
    load = np.stack(rows["load"].to_list()).astype(float)
    share = load / load.sum(axis=1, keepdims=True)
    summed = load.sum(axis=0)
    experts = load.shape[1]
    log = np.log(share, out=np.zeros_like(share), where=share > 0)
    prob = np.stack(rows["mean_prob"].to_list()).astype(float)
    every = pd.read_parquet(run / "steps")
    losses = every.query("phase == 'train'")
    probes = every.query("phase == 'probe'")
    probes = probes[probes["step"].between(min(steps), max(steps))]["ce_loss"]
    dropped = rows["dropped"].dropna()
    return {
        "cross-entropy (nats per token)": losses[losses["step"].isin(steps)]["ce_loss"].mean(),
        "held-out cross-entropy (nats per token)": None if probes.empty else probes.mean(),
        "max_violation, batch": (load.max(axis=1) / load.mean(axis=1) - 1).mean(),
        "max_violation, window": summed.max() / summed.mean() - 1,
        "idle experts": float((summed < summed.mean() / 10).sum()),
        "dead experts": float((summed == 0).sum()),
        "load entropy": (-(share * log).sum(axis=1) / np.log(experts)).mean(),
        "router entropy": rows["router_entropy"].mean(),
        "aux loss, normalised": (experts * (share * prob).sum(axis=1)).mean(),
        "drop rate": None if dropped.empty else float(np.mean([sum(d) for d in dropped] / load.sum(axis=1))),
    }


def write(
    folder: Path,
    run_id: str,
    steps: Iterable[int],
    loads_SE: Any,
    *,
    layers: tuple[int, ...] = (1,),
    top_k: int = 1,
    name: str | None = None,
    balancer: str = "none",
    dropped: int | None = None,
    losses_S: Any = None,
    config: Mapping[str, Any] | None = None,
    status: Any = "finished",
) -> Path:
    """A run whose every layer has these loads (S, E), or one load (E,) at every step; each step takes 2 s.

    losses_S  its cross-entropies, by default ones that fall alike in every run
    """
    steps = list(steps)
    loads_SE = np.broadcast_to(np.asarray(loads_SE), (len(steps), np.asarray(loads_SE).shape[-1]))
    num_experts = loads_SE.shape[1]
    described = [
        {"index": layer, "kind": "moe", "router": router, "num_experts": num_experts, "top_k": top_k}
        for router, layer in enumerate(layers)
    ]
    text = {"task": "lm", "corpus": [], "vocab_size": 64, "seq_len": 8}
    manifest = {
        "name": name or run_id,
        "config": {"balancer": balancer, **text, **(config or {})},
        "model": {"layers": described},
    }
    writer = RunWriter(folder / run_id, manifest=manifest)
    losses_S = [2.0 + 1 / (step + 1) for step in steps] if losses_S is None else losses_S
    for step, load_E, loss in zip(steps, loads_SE, losses_S, strict=True):
        tokens = int(load_E.sum()) // top_k
        writer.log_step(step, tokens=tokens, loss=3.0, ce_loss=loss, wall_time_s=2.0)
        for router, layer in enumerate(layers):
            writer.log_layer_stats(
                step,
                layer=layer,
                router=router,
                tokens=tokens,
                load=load_E,
                gate_mass=load_E,
                mean_prob=load_E / max(load_E.sum(), 1),
                router_entropy=0.5,
                dropped=None if dropped is None else np.eye(num_experts, dtype=int)[0] * dropped,
            )
    if status == "running":
        writer.flush()
    else:
        writer.finalize(status)
    return writer.path
