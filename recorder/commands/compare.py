"""`routescope compare`: runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from .common import FAILED, AsJson, CommandError, open_run, print_json, print_table, warn_of_problems

_METRICS = ["max_violation", "max_violation_window", "load_entropy", "router_entropy", "dead_experts", "idle_experts"]
_METRICS += ["drop_rate", "aux_loss"]


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN...", help="Paths, URIs or ids, two or more; others minus the first."),
    ],
    window: Annotated[
        int, typer.Option(min=1, help="Over how many of the last recorded steps.")
    ] = 50,  # metrics.WINDOW, which would load numpy for every command
    as_json: AsJson = False,
) -> None:
    """Final losses and per-layer metrics of runs side by side, and their differences at the last shared step."""
    from ..comparison import compare as compare_runs

    if len(runs) < 2:
        raise CommandError(f"compare takes two runs or more, got {len(runs)}: {' '.join(runs)}")
    opened = [open_run(run) for run in runs]
    try:
        result = compare_runs(opened, window)
    except (OSError, ValueError) as error:
        raise CommandError(str(error), FAILED) from None
    for run in opened:
        warn_of_problems(run)
    if as_json:
        print_json(result)
        return
    names = _names(result["runs"])
    for name, one in zip(names, result["runs"], strict=True):
        judged = "" if one["phase"] == "train" else f", judged by its {one['phase']} steps"
        print(f"{name}: {one['name']}, {one['status']}, last step {one['last_step']}{judged}")
    print(f"\nmeans over the last {window} recorded steps of each:")
    _print_losses(names, result["runs"])
    _print_layers(names, result["runs"], ["num_experts", "top_k", *_METRICS])
    _print_differences(names, result)


def _names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The runs' ids, or their paths where two share one."""
    ids = [run["run_id"] for run in runs]
    return ids if len(set(ids)) == len(ids) else [run["path"] for run in runs]


def _print_differences(names: Sequence[str], result: Mapping[str, Any]) -> None:
    at = result["last_shared_step"]
    if at is None:
        print("\nthe runs have no recorded step in common: no differences")
        return
    shared = result["shared_steps"]
    steps = "1 step" if shared["count"] == 1 else f"{shared['count']} steps"
    print(f"\n{steps} shared, {shared['first']} to {shared['last']}; step {at['step']} minus {names[0]}:")
    _print_losses(names[1:], at["differences"])
    _print_layers(names[1:], at["differences"], _METRICS)
    if any(layer["max_violation"] is None for one in at["differences"] for layer in one["layers"]):
        print("no difference where the first run has no such layer, or one of other experts or top-k")


def _print_losses(names: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> None:
    columns = list(runs[0]["losses"])
    print_table(["run", *columns], [[name, *run["losses"].values()] for name, run in zip(names, runs, strict=True)])


def _print_layers(names: Sequence[str], runs: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A line for each layer and run, the runs of a layer below each other."""
    rows = [(layer, name) for name, run in zip(names, runs, strict=True) for layer in run["layers"]]
    rows.sort(key=lambda row: row[0]["layer"])  # stable: in the order of the runs, and of the routers of a layer
    several = any(len({layer["layer"] for layer in run["layers"]}) < len(run["layers"]) for run in runs)
    router = ["router"] if several else []
    print_table(
        ["layer", *router, "run", *columns],
        [
            [layer["layer"], *(layer[name] for name in router), name, *(layer[column] for column in columns)]
            for layer, name in rows
        ],
    )
