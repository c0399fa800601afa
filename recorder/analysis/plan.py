"""Which tasks make the analysis of a run, and by what name each one's result is known.

The name is a digest of all that the result depends on: the parts by name and size (parts never change), the segments
that replaced rows of theirs, and what the manifest tells of the routers. A stored result of that name is still valid.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recorder.analysis.count_decisions import DecisionTask, RouterMap
from recorder.analysis.count_stats import StatsTask
from recorder.analysis.settling import PHASE, ProbeTask
from recorder.analysis.tables import TABLES
from recorder.parts import Footer, PartFile, part_rank
from recorder.reader import Run

#: Raised whenever a count changes its meaning, so that stored ones are made anew.
VERSION = 1
_PROBE_TASKS = 8
#: Which tables come of which kind of task; the rest, `stats`, of the statistics.
PROBE_TABLES = frozenset({"settling", "fluctuation"})
DECISION_TABLES = frozenset(TABLES) - PROBE_TABLES - {"stats"}

Task = DecisionTask | StatsTask | ProbeTask
Live = Sequence[tuple[PartFile, Footer]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Tasks whose results are stored together, under `name`."""

    name: str
    tasks: tuple[Task, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All jobs, in the order in which their results are added up; `digest` names the whole."""

    jobs: tuple[Job, ...]
    digest: str


@dataclass(frozen=True)
class _Range:
    """First and last (segment, step) of the rows of some parts."""

    low: tuple[int, int]
    high: tuple[int, int]
    first_step: int
    last_step: int


def plan_analysis(run: Run, tables: Sequence[str] = TABLES) -> Plan:
    """What is to be done for these tables of a run as it is now."""
    routers = _router_map(run)
    starts = run.segment_starts
    decisions, tokens = run.table("decisions").live(), run.table("tokens").live()
    token_ranges = [(part, _range(footer)) for part, footer in tokens if footer.num_rows]
    jobs = []
    for parts, span in _closed(decisions) if DECISION_TABLES.intersection(tables) else []:
        overlapping = tuple(
            part for part, of in token_ranges if of.first_step <= span.last_step and span.first_step <= of.last_step
        )
        task = DecisionTask(
            run=run.path,
            parts=parts,
            token_parts=overlapping,
            segment_starts=_relevant(starts, span),
            routers=routers,
            tables=tuple(sorted(DECISION_TABLES.intersection(tables))),
        )
        depends_on = [_named(parts), _named(overlapping), task.segment_starts, routers, task.tables]
        jobs.append(_job("decisions", [task], depends_on))
    for part, footer in run.table("layer_stats").live() if "stats" in tables else []:
        if footer.num_rows:
            relevant = _relevant(starts, _range(footer))
            stats = StatsTask(run=run.path, parts=(part,), segment_starts=relevant, router_of_layer=routers.of_layer)
            jobs.append(_job("layer_stats", [stats], [_named([part]), relevant, routers.of_layer]))
    probes = _probe_tasks(run, routers) if PROBE_TABLES.intersection(tables) else []
    if probes:
        those = [part for part, footer in decisions if footer.num_rows and _may_hold_probes(footer)]
        jobs.append(_job("settling", probes, [_named(those), starts, routers.of_layer]))
    digest = hashlib.sha256("\n".join(job.name for job in jobs).encode()).hexdigest()
    return Plan(jobs=tuple(jobs), digest=digest)


def _router_map(run: Run) -> RouterMap:
    named = [layer for layer in run.moe_layers if layer.get("router") is not None]
    return RouterMap(
        order=[layer["router"] for layer in named],
        num_experts={layer["router"]: int(layer.get("num_experts") or 0) for layer in named},
        of_layer={layer["index"]: layer["router"] for layer in reversed(named) if layer.get("index") is not None},
    )


def _closed(live: Live) -> list[tuple[tuple[PartFile, ...], _Range]]:
    """Parts in groups such that all decisions of one process and step are in one group.

    Mostly each part is one: only where a flush came within a step do its rows lie in two.
    """
    groups: list[tuple[list[PartFile], _Range]] = []
    rank = None
    for part, footer in live:
        if not footer.num_rows:
            continue
        span = _range(footer)
        if groups and part_rank(part.name) == rank and span.low <= groups[-1][1].high:
            parts, before = groups[-1]
            groups[-1] = (
                [*parts, part],
                _Range(
                    min(before.low, span.low),
                    max(before.high, span.high),
                    min(before.first_step, span.first_step),
                    max(before.last_step, span.last_step),
                ),
            )
        else:
            groups.append(([part], span))
        rank = part_rank(part.name)
    return [(tuple(parts), span) for parts, span in groups]


def _range(footer: Footer) -> _Range:
    low, high = footer.groups.low, footer.groups.high
    first = np.lexsort([low["step"], low["segment"]])[0]
    last = np.lexsort([high["step"], high["segment"]])[-1]
    return _Range(
        (int(low["segment"][first]), int(low["step"][first])),
        (int(high["segment"][last]), int(high["step"][last])),
        int(low["step"].min()),
        int(high["step"].max()),
    )


def _relevant(starts: Mapping[int, int], span: _Range) -> dict[int, int]:
    """Those segments that replaced rows of these parts: a resume elsewhere leaves a result as it is."""
    return {segment: step for segment, step in starts.items() if segment > span.low[0] and step <= span.last_step}


def _probe_tasks(run: Run, routers: RouterMap) -> list[Task]:
    steps = run.decision_steps(PHASE).tolist()
    size = max(1, -(-len(steps) // _PROBE_TASKS))
    return [
        ProbeTask(
            run=run.path,
            before=steps[start - 1] if start else None,
            steps=tuple(steps[start : start + size]),
            final=steps[-1],
            segment_starts=run.segment_starts,
            router_of_layer=routers.of_layer,
        )
        for start in range(0, len(steps), size)
    ]


def _may_hold_probes(footer: Footer) -> bool:
    return any(phase in (PHASE, None) for phase in footer.groups.phase)


def _named(parts: Sequence[PartFile]) -> list[tuple[str, int]]:
    return [(part.name, part.size) for part in parts]


def _job(kind: str, tasks: list[Any], depends_on: list[Any]) -> Job:
    text = json.dumps([VERSION, kind, depends_on], default=vars)
    return Job(name=f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}", tasks=tuple(tasks))
