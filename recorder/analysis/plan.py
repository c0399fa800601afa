"""Which tasks make the analysis of a run, and by what name each one's result is known.

The name is a digest of all that the result depends on: the parts by name and size, the segments that replaced rows of
theirs, and what the manifest tells of the routers. A stored result of that name is still valid, unless one of its parts
is younger: our writers never change a part, but somebody may put another one in its place.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np

from recorder.analysis.count_decisions import MOMENT_TABLES, DecisionTask, RouterMap
from recorder.analysis.count_stats import StatsTask
from recorder.analysis.scan import Stretch
from recorder.analysis.settling import PHASE, ProbeTask
from recorder.analysis.tables import TABLES
from recorder.parts import Footer, PartFile, part_rank
from recorder.reader import Run

#: Raised whenever a count changes its meaning, so that stored ones are made anew.
VERSION = 2
_PROBE_TASKS = 8
#: Which tables come of which kind of task; the rest, `stats`, of the statistics.
PROBE_TABLES = frozenset({"settling", "fluctuation"})
DECISION_TABLES = frozenset(TABLES) - PROBE_TABLES - {"stats"}

Task = DecisionTask | StatsTask | ProbeTask
Live = Sequence[tuple[PartFile, Footer]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Tasks whose results are stored together, under `name`; `newest`: when the last of their parts was written, ns."""

    name: str
    tasks: tuple[Task, ...]
    newest: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All jobs, in the order in which their results are added up; `digest` names the whole."""

    jobs: tuple[Job, ...]
    digest: str

    @property
    def newest(self) -> int:
        """When the last of all parts was written, in nanoseconds."""
        return max((job.newest for job in self.jobs), default=0)


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
    by_moment = bool(MOMENT_TABLES.intersection(tables))
    for parts, span in _closed(decisions) if DECISION_TABLES.intersection(tables) else []:
        overlapping = tuple(
            part for part, of in token_ranges if of.first_step <= span.last_step and span.first_step <= of.last_step
        )
        tasks = [
            DecisionTask(
                run=run.path,
                stretch=stretch,
                token_parts=overlapping,
                segment_starts=_relevant(starts, span),
                routers=routers,
                tables=tuple(sorted(DECISION_TABLES.intersection(tables))),
            )
            for stretch in _stretches(parts, by_moment=by_moment)
        ]
        of_decisions = [part for part, _ in parts]
        depends_on = [_named(of_decisions), _named(overlapping), tasks[0].segment_starts, routers, tasks[0].tables]
        jobs.append(_job("decisions", tasks, [*of_decisions, *overlapping], depends_on))
    for part, footer in run.table("layer_stats").live() if "stats" in tables else []:
        if footer.num_rows:
            relevant = _relevant(starts, _range(footer))
            stats = StatsTask(run=run.path, parts=(part,), segment_starts=relevant, router_of_layer=routers.of_layer)
            jobs.append(_job("layer_stats", [stats], [part], [_named([part]), relevant, routers.of_layer]))
    probes = _probe_tasks(run, routers) if PROBE_TABLES.intersection(tables) else []
    if probes:
        those = [part for part, footer in decisions if footer.num_rows and _may_hold_probes(footer)]
        jobs.append(_job("settling", probes, those, [_named(those), starts, routers.of_layer]))
    digest = hashlib.sha256("\n".join(job.name for job in jobs).encode()).hexdigest()
    return Plan(jobs=tuple(jobs), digest=digest)


def _router_map(run: Run) -> RouterMap:
    named = [layer for layer in run.moe_layers if layer.get("router") is not None]
    return RouterMap(
        order=[layer["router"] for layer in named],
        num_experts={layer["router"]: int(layer.get("num_experts") or 0) for layer in named},
        of_layer={layer["index"]: layer["router"] for layer in reversed(named) if layer.get("index") is not None},
    )


def _closed(live: Live) -> list[tuple[Live, _Range]]:
    """Parts in groups such that all decisions of one process and step are in one group.

    While a run is recorded mostly each part is one: only where a flush came within a step do its rows lie in two.
    """
    groups: list[tuple[list[tuple[PartFile, Footer]], _Range]] = []
    rank = None
    for part, footer in live:
        if not footer.num_rows:
            continue
        span = _range(footer)
        if groups and part_rank(part.name) == rank and span.low <= groups[-1][1].high:
            parts, before = groups[-1]
            groups[-1] = (
                [*parts, (part, footer)],
                _Range(
                    min(before.low, span.low),
                    max(before.high, span.high),
                    min(before.first_step, span.first_step),
                    max(before.last_step, span.last_step),
                ),
            )
        else:
            groups.append(([(part, footer)], span))
        rank = part_rank(part.name)
    return list(groups)


def _stretches(parts: Live, *, by_moment: bool) -> list[Stretch]:
    """About one for each of these parts, so that workers share the work and no result is large.

    by_moment: cut only between two steps.
    """
    if not by_moment:
        return [Stretch(((part, 0, footer.groups.count),)) for part, footer in parts]
    groups = [(part, number, *ends) for part, footer in parts for number, ends in enumerate(_moments(footer))]
    part_of, numbers, low, high = zip(*groups, strict=True)
    until_here = list(accumulate(high, max))
    from_here = list(accumulate(reversed(low), min))[::-1]
    cuts: dict[PartFile, int] = {}
    for place in range(1, len(groups)):
        last_step = place + 1 == len(groups) or high[place] <= from_here[place + 1]
        if part_of[place] != part_of[0] and until_here[place - 1] < high[place] and last_step:
            cuts.setdefault(part_of[place], place)
    stretches = []
    for first, following in pairwise([0, *cuts.values(), len(groups)]):
        end, until = following, None
        if following < len(groups):
            until = high[following]
            end += low[following] < until  # a step before ends in that row group
        pieces = []
        for part, places in groupby(range(first, end), key=part_of.__getitem__):
            within = [numbers[place] for place in places]
            pieces.append((part, within[0], within[-1] + 1))
        stretches.append(Stretch(tuple(pieces), since=high[first] if first else None, until=until))
    return stretches


def _moments(footer: Footer) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """First and last (segment, step) of each row group."""
    groups = footer.groups
    ends = (zip(at["segment"].tolist(), at["step"].tolist(), strict=True) for at in (groups.low, groups.high))
    return zip(*ends, strict=True)


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


def _job(kind: str, tasks: list[Any], parts: Sequence[PartFile], depends_on: list[Any]) -> Job:
    text = json.dumps([VERSION, kind, depends_on], default=vars)
    name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    return Job(name=name, tasks=tuple(tasks), newest=max((part.mtime_ns for part in parts), default=0))
