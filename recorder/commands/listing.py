"""`routescope runs` and `routescope summary`: what there is, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import (
    FAILED,
    RUNS_FOLDER,
    AsJson,
    CommandError,
    RunArgument,
    no_folder,
    open_run,
    place_of,
    print_json,
    print_table,
    warn,
    warn_of_problems,
)


def runs(
    folder: Annotated[
        str, typer.Argument(metavar="[DIR]", help="Folder that holds runs, or a URI such as s3://bucket/runs.")
    ] = str(RUNS_FOLDER),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder."""
    from ..reader import Run, list_runs
    from ..summary import run_row

    place = place_of(folder)
    if not place.is_dir():
        samples = "; the samples: routescope runs sample_runs" if Path("sample_runs").is_dir() else ""
        raise CommandError(f"{no_folder(place)}; record a run with: routescope record{samples}")
    rows: list[dict[str, Any]] = []
    for info in list_runs(place):
        if info.status == "unreadable":
            warn(str(info.error))
            continue
        try:
            run = Run(info.path)
            rows.append(run_row(run))
        except Exception as error:  # whatever is wrong with one run, the others are listed
            warn(f"{info.path}: {' '.join(str(error).split()) or type(error).__name__}")
            continue
        warn_of_problems(run)
    if as_json:
        print_json(rows)
    elif not rows:
        print(f"no runs in {folder}; record one with: routescope record --out {folder}")
    else:
        columns = ["run_id", "status", "balancer", "num_experts", "top_k", "last_step", "loss", "ce_loss"]
        columns += ["max_violation", "max_violation_window", "dead_experts", "idle_experts"]
        print_table(columns, [[row[column] for column in columns] for row in rows])


def summary(
    run: RunArgument,
    window: Annotated[
        int, typer.Option(min=1, help="Over how many of the last recorded steps.")
    ] = 50,  # metrics.WINDOW, which would load numpy for every command
    phase: Annotated[
        str | None, typer.Option(help="train | probe | eval | generate; train unless the run has none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Final losses, per-layer metrics and a diagnosis of a run."""
    from ..diagnosis import diagnose
    from ..summary import summarise

    opened = open_run(run)
    try:
        result = summarise(opened, window=window, phase=phase)
        findings = diagnose(opened, phase)
        has = opened.phases if phase is not None and not result["steps"] else [phase]
    except (OSError, ValueError) as error:
        raise CommandError(f"{opened.path}: {error}", FAILED) from None
    warn_of_problems(opened)
    if phase not in has:
        raise CommandError(
            f"{opened.path} has no steps of --phase {phase}; it has {', '.join(opened.phases) or 'none at all'}"
        )
    if as_json:
        print_json(result | {"diagnosis": [finding.as_dict() for finding in findings]})
        return
    print(f"{result['name']} ({result['run_id']}), {result['status']}, last step {result['last_step']}")
    of_phase = "training steps" if result["phase"] == "train" else f"steps of phase {result['phase']}"
    print(f"means over the last {result['steps']} recorded {of_phase}:")
    print_table(list(result["losses"]), [list(result["losses"].values())])
    layers = [layer["layer"] for layer in result["layers"]]
    columns = [
        "layer",
        *(["router"] if len(set(layers)) < len(layers) else []),
        "num_experts",
        "top_k",
        "max_violation",
        "max_violation_window",
        "load_entropy",
    ]
    columns += ["router_entropy", "dead_experts", "idle_experts", "gini", "drop_rate", "aux_loss"]
    print_table(columns, [[layer[column] for column in columns] for layer in result["layers"]])
    for finding in findings:
        print(f"{finding.level}: {finding.text}. [{finding.rule}]")
