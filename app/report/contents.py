"""What a report says, in its order: the answer, how sure it is, numbers, pictures, and each run's diagnosis."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np

from app import comparison, comparison_tables, comparison_words, data, layer_keys
from app.comparison import WINDOW, Compared
from app.comparison_metrics import METRICS, Measured, mean_loss, measure
from app.export_page import PageFigure, page
from app.figures.inputs import LoadSeries
from app.report import markup, pictures
from app.views import overview
from app.words import count, listed, value
from recorder.reader import Run

MAX_RUNS = 12
MAX_LAYERS = 16  # drawn by step; of more, those that are least balanced
MAX_PANELS = 96  # one a run and layer: of many runs fewer layers are drawn

Parts = list[str | PageFigure]
Layers = Sequence[Mapping[str, Any]]  # what each layer of a run comes to, as in a summary


def report_html(runs: Sequence[Run], say: Callable[[str], None] = lambda text: None) -> str:
    """The report of 1 to MAX_RUNS runs as one page of HTML below 10 MB.

    say: called with a line for each part that is begun. Raises ValueError for more runs, and for none.
    """
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"a report is of 1 to {MAX_RUNS} runs, got {len(runs)}")
    told = [Compared(label=label, reference=label, colour=i, run=run) for i, (label, run) in enumerate(_named(runs))]
    title, parts = _one(told[0], say) if len(told) == 1 else _several(told, say)
    say("putting it together")
    return page(title, [*parts, _foot()])


def _named(runs: Sequence[Run]) -> Iterable[tuple[str, Run]]:
    """Each run with its name, or what tells it apart from others of that name."""
    for name in (lambda run: run.name, lambda run: f"{run.name} ({run.run_id})", lambda run: str(run.path)):
        labels = [name(run) for run in runs]
        if len(set(labels)) == len(labels):
            break
    else:
        labels = [f"{number}. {run.path}" for number, run in enumerate(runs, 1)]
    return zip(labels, runs, strict=True)


def _foot() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return markup.paragraph(
        f"routescope {version('routescope')}, {now:%Y-%m-%d %H:%M} UTC. Idle: less than a tenth of the uniform share, "
        "the load of one expert if all had the same. Dead: no assignment at all.",
        muted=True,
    )


# ------------------------------------------------------------------------------------------------------- one run


def _one(one: Compared, say: Callable[[str], None]) -> tuple[str, Parts]:
    run = one.run
    problem = _no_loads(run)
    parts: Parts = [*_head(one, level=1, problem=problem)]
    if problem is not None:
        return one.label, [*parts, *_losses([one], say)]
    summary = data.summary(run)
    parts += _numbers(run, summary)
    say(f"{one.label}: model map and load")
    parts += _present(pictures.layers(run, over=_covered(run).words))
    chosen = _least_balanced([summary["layers"]])
    series = [data.load_series(run, key) for key in chosen]
    series = [replace(each, run=one.label) for each in series]
    parts += [*_which(chosen, layer_keys.keys(run)), _load(series, [one], [summary["layers"]], _covered(run).words)]
    parts += _losses([one], say)
    say(f"{one.label}: balance by step")
    parts += pictures.balance(series, colours={one.label: one.colour}, words=f"{one.label}, {_layers(series)}")
    return one.label, parts


def _head(one: Compared, *, level: int, problem: str | None) -> list[str]:
    """Its answer, what the run is, and its diagnosis."""
    run = one.run
    if problem is None:
        wrong, damaged = data.trouble(run, WINDOW), bool(data.problems(run))
        answer = overview.headline(data.summary(run)["layers"], wrong, damaged=damaged)
        over = f" Over {_covered(run).words}{_covered(run).range}."
    else:
        answer, over = f"Nothing can be said of its balance: {problem}", ""
    title = f"{one.label}: {answer[0].lower()}{answer[1:]}" if level > 1 else answer
    lines = [markup.heading(title, level), markup.paragraph(f"{_described(one)}{over}", muted=True)]
    damaged_files = [line.partition(": ")[0] for line in data.problems(run)]
    if damaged_files:
        names = listed(damaged_files) if len(damaged_files) <= 3 else count(len(damaged_files), "part file")
        lines.append(markup.paragraph(f"{names} cannot be read; the rest is shown."))
    return [*lines, markup.heading("Diagnosis", level + 1), markup.findings(data.diagnosis(run))]


def _described(one: Compared) -> str:
    run = one.run
    shapes = dict.fromkeys((layer.get("top_k"), layer.get("num_experts")) for layer in layer_keys.routers(run).values())
    facts = [one.label]
    if run.run_id != one.label:
        facts.append(f"id {run.run_id}")
    facts += [f"top-{k} of {count(e, 'expert')}" for k, e in shapes if k and e]
    facts += [count(len(layer_keys.keys(run)), "MoE layer")] if run.moe_layers else []
    balancer = run.config.get("balancer")
    if balancer:
        facts.append("no balancer" if balancer == "none" else f"balancer {balancer}")
    steps = "no step recorded" if run.last_step is None else f"last step {run.last_step:,}"
    status = "still recorded when this was written" if run.status == "running" else run.status
    facts += [status, steps]
    created = run.manifest.get("created_at")
    return ", ".join(facts) + (f", begun {str(created)[:16].replace('T', ' ')} UTC." if created else ".")


def _no_loads(run: Run) -> str | None:
    """Why there is no load to show; None where there is."""
    if data.lists_no_layers(run):
        return "its run.json does not list the layers"
    if not run.moe_layers:
        return "it has no MoE layer"
    problem = data.loads_problem(run)
    if problem is None and not any(data.layer_stats(run, key).steps_S.size for key in layer_keys.keys(run)):
        problem = "no load was recorded"
    return problem


def _covered(run: Run) -> overview.Covered:
    steps = max((data.layer_stats(run, key).steps_S for key in layer_keys.keys(run)), key=len)
    return overview.Covered(steps, WINDOW, data.main_phase(run))


def _numbers(run: Run, summary: Mapping[str, Any]) -> list[str]:
    losses = {name: number for name, number in summary["losses"].items() if number is not None}
    said = ", ".join(f"{name} {value(number, 4)}" for name, number in losses.items())
    return [
        markup.heading("Final metrics"),
        markup.paragraph(f"Over {_covered(run).words}: {said or 'no loss was recorded'}."),
        markup.table(overview.layer_frame(run, dict(summary))),
        _meanings(),
    ]


def _meanings() -> str:
    return markup.definitions([(metric.name, metric.meaning) for metric in METRICS if metric.key != "ce_loss"])


# -------------------------------------------------------------------------------------------------- several runs


def _several(told: Sequence[Compared], say: Callable[[str], None]) -> tuple[str, Parts]:
    problems = {one.label: _no_loads(one.run) for one in told}
    usable: list[Compared] = []
    for one in told:
        if problems[one.label] is None and all(other.agrees(one) for other in usable):
            usable.append(one)
    title = f"{listed([one.label for one in told])}: routing compared"
    parts: Parts = []
    if len(usable) > 1:
        parts += _compared(usable, say)
    else:
        parts.append(markup.heading("These runs cannot be compared", 1))
    left_out = [f"{one.label} ({problems[one.label] or 'other routers'})" for one in told if one not in usable]
    if left_out:
        parts.insert(1, markup.paragraph(f"Not compared: {listed(left_out)}."))
    for one in told:
        say(f"{one.label}: diagnosis and model map")
        parts += _head(one, level=2, problem=problems[one.label])
        if problems[one.label] is None:
            parts += _present(pictures.layers(one.run, over=_covered(one.run).words, maps=len(told)))
    return title, parts


def _compared(runs: Sequence[Compared], say: Callable[[str], None]) -> Parts:
    say("comparing the runs at the steps they share")
    common = [key for key in runs[0].layers if all(key in one.layers for one in runs)]
    steps_S = comparison.shared_steps(runs, (common or runs[0].layers)[0])
    window = comparison.window_of(steps_S)
    found = [measure(one, window) for one in runs]
    layers = [one.layers for one in found]
    parts: Parts = [markup.heading(comparison_words.answer(runs, found, window), 1)]
    shared = f"They share {count(steps_S.size, 'recorded step')}" if steps_S.size else "They share no recorded step"
    names = listed([f"{one.label} ({one.run.status}, last step {value(one.run.last_step)})" for one in runs])
    parts.append(markup.paragraph(f"{names}. {shared}; the numbers are of {window.words}.", muted=True))
    chosen = _least_balanced(layers)
    every = list(dict.fromkeys(key for one in runs for key in one.layers))
    parts += _metrics(runs, found, window, [key for key in chosen if key in common])
    say("load of every expert by step")
    series = [
        replace(data.load_series(one.run, key), run=one.label) for one in runs for key in one.layers if key in chosen
    ]
    parts += [markup.heading("Side by side"), *_which(chosen, every), _load(series, runs, layers, window.words)]
    steps = window.steps if window.shared else None
    ends = [{column: mean_loss(one.run, steps, column) for column in ("loss", "ce_loss")} for one in runs]
    parts += _losses(runs, say, ends, f"the {window.short}")
    say("balance by step")
    colours = {one.label: one.colour for one in runs}
    parts += pictures.balance(series, colours=colours, words=f"{listed(list(colours))}, {_layers(series)}")
    return parts


def _metrics(
    runs: Sequence[Compared],
    found: Sequence[Measured],
    window: comparison.Window,
    layers: Sequence[int],
) -> list[str]:
    parts = [markup.heading("Final metrics")]
    if layers:
        layer = max(layers, key=lambda key: _violation([one.layers for one in found], key))
        label = layer_keys.label(runs[0].run, layer)
        frame = comparison_tables.table(runs, found, layer, window)
        frame = frame.drop(
            columns=[name for name in ("difference", "better") if name in frame and frame[name].isna().all()]
        )
        better = (
            "Better is marked only where runs can be compared: at shared steps, the loss for the same text and active "
            "parameters and beyond its noise, balance for the same experts and top-k."
            if "better" in frame
            else "None is marked as better: experts, top-k or text differ, or no step is shared."
        )
        parts += [
            markup.paragraph(f"Layer {label}, the least balanced of those that all have. {better}"),
            markup.table(frame),
        ]
    frame = comparison_tables.every_layer(runs, found)
    return [*parts, markup.paragraph("Every layer of every run:"), markup.table(frame), _meanings()]


# ---------------------------------------------------------------------------------------------------- for both


def _load(series: Sequence[LoadSeries], runs: Sequence[Compared], layers: Sequence[Layers], over: str) -> PageFigure:
    parts = []
    for one, its in zip(runs, layers, strict=True):
        known = [entry for entry in its if entry["idle_experts"] is not None and entry["num_experts"]]
        idle, experts = (sum(entry[key] for entry in known) for key in ("idle_experts", "num_experts"))
        said = f"{idle:.0f} of {experts:,.0f} experts idle" if experts else "no token routed"
        parts.append(f"{one.label}: {said}" if len(runs) > 1 else f"{said[0].upper()}{said[1:]}")
    title = f"{'; '.join(parts)}, over {over}"
    alt = f"Load over the uniform share of each expert by step, {_layers(series)}. {title}."
    return pictures.load(series, title=title, alt=alt)


def _losses(
    runs: Sequence[Compared],
    say: Callable[[str], None],
    ends: Sequence[Mapping[str, float | None]] | None = None,
    over: str | None = None,
) -> Parts:
    """The losses by step; without their ends and the steps these are about, each run's own last steps."""
    say("losses")
    ends = ends or [data.summary(one.run)["losses"] for one in runs]
    if over is None:
        steps_S = data.steps(runs[0].run)["step"].to_numpy(np.int64)
        over = overview.Covered(steps_S, WINDOW, data.main_phase(runs[0].run)).words
    figure = pictures.losses(runs, over=over, ends=ends)
    return [markup.paragraph("No loss was recorded.")] if figure is None else [figure]


def _least_balanced(layers: Sequence[Layers]) -> list[int]:
    """The keys of the layers that are drawn by step, in the order of the model."""
    keys = list(dict.fromkeys(layer["key"] for its in layers for layer in its))
    worst = sorted(keys, key=lambda key: _violation(layers, key), reverse=True)
    return sorted(worst[: min(MAX_LAYERS, MAX_PANELS // len(layers))])


def _violation(layers: Sequence[Layers], key: int) -> float:
    values = [entry["max_violation_window"] for its in layers for entry in its if entry["key"] == key]
    return max((number for number in values if number is not None), default=-1.0)


def _which(chosen: Sequence[int], every: Sequence[int]) -> list[str]:
    if len(chosen) == len(every):
        return []
    return [
        markup.paragraph(
            f"By step are drawn {len(chosen)} of {len(every)} MoE layers: those least balanced at the end."
        )
    ]


def _layers(series: Sequence[LoadSeries]) -> str:
    names = list(dict.fromkeys(str(one.label) for one in series))
    return f"layer {names[0]}" if len(names) == 1 else f"layers {listed(names)}"


def _present(figure: PageFigure | None) -> list[PageFigure]:
    return [] if figure is None else [figure]
