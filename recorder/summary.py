"""What a run came to: losses and per-layer metrics over its last recorded steps. Loads no torch.

The metrics are `moe_core.metrics`; here they are only put together. None stands for "no value", never NaN.
"""

from typing import Any

import numpy as np
import pandas as pd

from moe_core import metrics
from recorder.reader import Run
from recorder.schema import lists_to_matrix

_LOSSES = ("loss", "ce_loss", "aux_loss", "z_loss")


def summarise(
    run: Run, window: int = metrics.WINDOW, phase: str | None = None, *, step: int | None = None
) -> dict[str, Any]:
    """Losses and per-layer metrics over the last `window` recorded steps of a phase.

    Means of per-step values, steps where a metric is undefined left out; but max_violation_window, dead_experts and
    idle_experts (dead ones included) are of the loads summed over the window. A loss that is not finite somewhere in
    the window has no mean: None.

    Args:
        run: finished or running, with or without steps.
        window: recorded steps, at least 1.
        phase: train, probe, eval or generate; None = `run.main_phase`.
        step: the last step that counts, as if nothing had been recorded after it; None = all do.

    Returns:
        {run_id, name, status, last_step, window, phase, steps, losses: {loss, ce_loss, aux_loss, z_loss}, layers:
        [{layer, router, num_experts, top_k, tokens, max_violation, max_violation_window, load_cv, load_entropy,
        router_entropy, dead_experts, idle_experts, gini, drop_rate, aux_loss, dead_ids, idle_ids}]}; steps says how
        many the window holds, tokens is a mean per step.

    Raises:
        ValueError: window below 1, or an unknown phase.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    phase = phase or run.main_phase
    steps = _until(run.steps(phase=phase), step).tail(window)
    return {
        "run_id": run.run_id,
        "name": run.name,
        "status": run.status,
        "last_step": run.last_step,
        "window": window,
        "phase": phase,
        "steps": len(steps),
        "losses": {name: _loss(steps[name]) for name in _LOSSES},
        "layers": [_layer(run, layer, router, window, phase, step) for layer, router in routers_of(run, phase)],
    }


def run_row(run: Run, window: int = metrics.WINDOW) -> dict[str, Any]:
    """One run in a list of runs: {run_id, name, path, status, balancer, num_experts, top_k, last_step, loss,
    max_violation, dead_experts, idle_experts, tags}.

    `loss` is the window's mean train loss; max_violation (of the summed loads), dead_experts and idle_experts are
    the worst layer's, num_experts and top_k the greatest; None where nothing is recorded.
    """
    summary = summarise(run, window)
    layers = summary["layers"]

    def worst(name: str) -> Any:
        return max((layer[name] for layer in layers if layer[name] is not None), default=None)

    return {
        "run_id": run.run_id,
        "name": run.name,
        "path": str(run.path),
        "status": summary["status"],
        "balancer": _balancer(run),
        "num_experts": worst("num_experts"),
        "top_k": worst("top_k"),
        "last_step": summary["last_step"],
        "loss": summary["losses"]["loss"],
        "ce_loss": summary["losses"]["ce_loss"],
        "max_violation": worst("max_violation"),
        "max_violation_window": worst("max_violation_window"),
        "dead_experts": worst("dead_experts"),
        "idle_experts": worst("idle_experts"),
        "tags": list(run.about.tags),
    }


def routers_of(run: Run, phase: str) -> list[tuple[int, int | None]]:
    """(layer, router) of every router, from the manifest or, where that names none, from the rows."""
    named = [(layer["index"], layer.get("router")) for layer in run.moe_layers if layer.get("index") is not None]
    if named:
        return named
    pairs = run.layer_stats(phase=phase)[["layer", "router"]].drop_duplicates().sort_values(["layer", "router"])
    return [(int(layer), int(router)) for layer, router in pairs.itertuples(index=False)]


def _until(rows: pd.DataFrame, step: int | None) -> pd.DataFrame:
    return rows if step is None else rows[(rows["step"] <= step).to_numpy(dtype=bool)]


def _layer(
    run: Run, layer: int, router: int | None, window: int, phase: str, step: int | None = None
) -> dict[str, Any]:
    rows = _until(run.layer_stats(layer, phase=phase, router=router), step).tail(window)
    known = [item for item in run.moe_layers if item.get("index") == layer and router in (None, item.get("router"))]
    num_experts = known[0].get("num_experts") if known else None
    top_k = known[0].get("top_k") if known else None
    if rows.empty:
        loads = np.zeros((0, num_experts or 1), dtype=np.int64)
    else:
        loads = lists_to_matrix(rows["load"])
    if not known and len(loads):
        num_experts = loads.shape[1]
        tokens = int(rows["tokens"].sum())
        top_k = round(loads.sum() / tokens) if tokens else None
    summed = metrics.window_load(loads, window)
    return {
        "layer": layer,
        "router": router,
        "num_experts": num_experts,
        "top_k": top_k,
        "tokens": _mean(_numbers(rows["tokens"])),
        "max_violation": _mean(metrics.max_violation(loads)),
        "max_violation_window": _number(metrics.max_violation(summed)),
        "load_cv": _mean(metrics.load_cv(loads)),
        "load_entropy": _mean(metrics.load_entropy(loads)),
        "router_entropy": _mean(_numbers(rows["router_entropy"])),
        "dead_experts": _count(metrics.dead_experts(summed)),
        "idle_experts": _count(metrics.idle_experts(summed)),
        "gini": _mean(metrics.gini(loads)),
        "drop_rate": _drop_rate(rows, loads),
        "aux_loss": _mean(_numbers(rows["aux_loss"])),
        "dead_ids": np.flatnonzero(metrics.dead_mask(summed)).tolist(),
        "idle_ids": np.flatnonzero(metrics.idle_mask(summed)).tolist(),
    }


def _balancer(run: Run) -> str | None:
    balancer = run.config.get("balancer")
    if balancer is None:
        named = {layer["balancer"] for layer in run.moe_layers if layer.get("balancer")}
        balancer = ", ".join(sorted(named)) or None
    return balancer


def _drop_rate(rows: pd.DataFrame, loads: np.ndarray) -> float | None:
    recorded = rows["dropped"].notna().to_numpy(dtype=bool)
    if not recorded.any():
        return None
    dropped = lists_to_matrix(rows["dropped"][recorded])
    return _mean(metrics.drop_rate(dropped.sum(axis=-1), loads[recorded].sum(axis=-1)))


def _numbers(column: pd.Series) -> np.ndarray:
    """As float64, null as NaN."""
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _loss(column: pd.Series) -> float | None:
    values = column.dropna().to_numpy(dtype=np.float64)
    return _number(values.mean()) if len(values) else None


def _mean(values: np.ndarray) -> float | None:
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    return float(finite.mean()) if len(finite) else None


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _count(value: Any) -> int | None:
    return int(value) if np.isfinite(value) else None
