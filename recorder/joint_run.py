"""One run opened by all ranks of a training: who sees which tokens, which layers each writes, under which numbers.

Three kinds of parallel training differ in what the ranks see. Data-parallel ranks see tokens of their own: each writes
all it sees, and the reader adds up. Tensor-parallel ranks see the same tokens in the same layers: one of them writes.
Pipeline stages see the same tokens in other layers: each writes its layers, and the manifest lists those of all stages.
`data_parallel_rank` tells them apart: ranks with the same one see the same tokens, and of those the lowest rank that
holds a router writes it. (Experts spread over ranks change nothing: routers choose among all experts of the layer, and
the ids they give are those that are recorded.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recorder import checks
from recorder.processes import Meeting, meeting, new_launch
from recorder.storage import Place, Where, locate
from recorder.writer import RunWriter


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank writes: routers, as (number in the rank's own model, number in the run), and whether tokens."""

    routers: list[tuple[int, int]]
    tokens: bool

    @classmethod
    def of_all(cls, model: Mapping[str, Any]) -> Plan:
        """The plan of a rank that writes all it has."""
        return cls(routers=[(layer["router"], layer["router"]) for layer in _moe(model)], tokens=True)

    def run(self, writer: RunWriter) -> JointRun:
        return JointRun(writer=writer, numbers=dict(self.routers), tokens=self.tokens)


@dataclass(frozen=True, kw_only=True)
class JointRun:
    """What `open_run` hands back.

    writer: of this rank. numbers: for each router that this rank writes, by its number in this rank's model, its number
    in the run; routers that are not among them are written by another rank. tokens: whether this rank writes rows of
    the table `tokens`.
    """

    writer: RunWriter
    numbers: Mapping[int, int]
    tokens: bool


def open_run(
    out: Where,
    manifest: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    data_parallel_rank: int | None = None,
    join_seconds: float = 60.0,
    **writer_options: Any,
) -> JointRun:
    """Open a run together with the other ranks of this launch; on rank 0 it is created or resumed, the others join.

    Rank 0 waits for the others only where `data_parallel_rank` is given, so that a script may also record rank 0 alone.

    Args:
        out: the run's own folder, the same on every rank.
        manifest: values for run.json; `model` is this rank's `describe_model`.
        rank, world_size: those of `this_rank`.
        data_parallel_rank: of this rank, on all ranks or on none; needs torch.distributed, initialised before. None =
            every rank sees tokens of its own.
        join_seconds: how long ranks wait for each other.
        writer_options: passed on to RunWriter.

    Raises:
        RunExistsError, RunNotFoundError, RunUnreadableError: as RunWriter does, on all ranks where rank 0 does.
        TimeoutError: rank 0 waits in vain for what other ranks hold.
        ValueError: a data_parallel_rank that cannot be or cannot be used.
    """
    if data_parallel_rank is not None:
        checks.whole("data_parallel_rank", data_parallel_rank)
    join_seconds = checks.number("join_seconds", join_seconds)
    out = locate(out)
    options = {"rank": rank, "share": data_parallel_rank, "join_seconds": join_seconds} | writer_options
    values = {"world_size": world_size, "data_parallel_size": world_size} | dict(manifest)
    own = Plan.of_all(values["model"])
    meet = meeting(str(out), rank, world_size, join_seconds)
    if meet is None:
        if data_parallel_rank is not None and world_size > 1:
            raise ValueError(
                f"data_parallel_rank={data_parallel_rank} needs torch.distributed, initialised before the recorder is "
                "built: there the ranks agree on who writes what"
            )
        return own.run(RunWriter(out, manifest=values, **options))
    if rank == 0:
        return _open_as_first(meet, out, values, own, data_parallel_rank, options)
    if data_parallel_rank is not None:
        meet.gather({"share": data_parallel_rank, "model": values["model"]})
    launch, told = meet.answer()
    if (told is None) != (data_parallel_rank is None):
        raise ValueError(f"data_parallel_rank is given to all ranks or to none; rank {rank} has {data_parallel_rank}")
    plan = own if told is None else Plan(**told)
    return plan.run(RunWriter(out, launch=launch, **options))


def _open_as_first(
    meet: Meeting,
    out: Place,
    values: dict[str, Any],
    own: Plan,
    data_parallel_rank: int | None,
    options: dict[str, Any],
) -> JointRun:
    plans: list[Plan] | None = None
    launch = new_launch()
    try:
        if data_parallel_rank is not None:
            given = meet.gather({"share": data_parallel_rank, "model": values["model"]})
            values["model"], plans = divide([one["share"] for one in given], [one["model"] for one in given])
            values["data_parallel_size"] = len({one["share"] for one in given})
            if not plans[0].tokens:  # other ranks may write texts: rank 0 cannot tell
                values["recorded"] = (values.get("recorded") or {}) | {"text": None}
        writer = RunWriter(out, manifest=values, launch=launch, **options)
    except BaseException as error:
        meet.decline(error)
        raise
    meet.announce(launch, None if plans is None else [asdict(plan) for plan in plans])
    return (own if plans is None else plans[0]).run(writer)


def divide(shares: Sequence[int], models: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[Plan]]:
    """The model that the ranks make up together, and what each rank writes of it.

    Args:
        shares: the data-parallel rank of each rank.
        models: what each rank holds, as `describe_model` tells it. The same layer goes by the same index and module
            name everywhere.

    Returns:
        The `model` entry of the manifest, its layers those of all ranks in order, its routers numbered through
        (parameter counts are null where no rank holds the whole model); and each rank's plan.

    Raises:
        ValueError: two data-parallel ranks whose ranks together hold different routers.
    """
    layers: dict[tuple[int, str], dict[str, Any]] = {}
    for model in models:
        for layer in model["layers"]:
            layers.setdefault(_key(layer), dict(layer))
    whole = dict(models[0])
    if len(layers) > len(models[0]["layers"]):
        layers = dict(sorted(layers.items(), key=lambda item: item[1]["index"]))
        whole["parameters_total"] = whole["parameters_active"] = None
    routers = [key for key, layer in layers.items() if layer["kind"] == "moe"]
    for number, key in enumerate(routers):
        layers[key]["router"] = number
    whole["layers"] = list(layers.values())

    written: dict[int, set[tuple[int, str]]] = {share: set() for share in shares}
    plans = []
    for share, model in zip(shares, models, strict=True):
        mine = [layer for layer in _moe(model) if _key(layer) not in written[share]]
        routed = [(layer["router"], layers[_key(layer)]["router"]) for layer in mine]
        plans.append(Plan(routers=routed, tokens=bool(mine) and not written[share]))
        written[share] |= {_key(layer) for layer in mine}
    for share, keys in written.items():
        if len(keys) < len(routers):
            lacking = next(key for key in routers if key not in keys)
            raise ValueError(
                f"the ranks with data_parallel_rank={share} hold no {lacking[1]} (layer {lacking[0]}), others do; "
                "together they must hold every layer"
            )
    return whole, plans


def _moe(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [layer for layer in model.get("layers") or [] if layer["kind"] == "moe"]


def _key(layer: Mapping[str, Any]) -> tuple[int, str]:
    return layer["index"], layer["module"]
