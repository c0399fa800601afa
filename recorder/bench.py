"""Time the dispatchers of moe_core side by side on this machine: `routescope bench dispatch`, benchmarks/dispatch.py.

Shapes: T tokens, D width, F expert width, E experts, K choices a token, N = T*K assignments.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moe_core.dispatchers import DISPATCHER_NAMES, make_dispatcher, sort_assignments
from moe_core.experts import Activation, ExpertBank
from moe_core.layers import MoELayer
from moe_core.routers import TopKRouter, check_choice
from moe_core.routing import Routing

from .dispatch_shape import DispatchShape

BASES = DENSE, ROUTING, LAYER = "dense", "routing", "layer"
SLOW, SLOW_ROUNDS = 10, 2  # a candidate this many times slower than the fastest is timed so often only


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One candidate: what one forward and backward pass takes.

    milliseconds: the median over rounds; least_milliseconds: the shortest round, far below the median where something
    else keeps the machine busy. relative: the median over rounds of its time divided by the dense product's
    in the same round. peak_mib: memory allocated at most, beyond what stood before. difference: the largest absolute
    difference to naive of outputs and gradients, None for what gives other results by nature. rounds: how many.
    """

    name: str
    milliseconds: float
    least_milliseconds: float
    relative: float
    peak_mib: float
    difference: float | None
    rounds: int


@dataclass(frozen=True, kw_only=True)
class DispatchReport:
    """The timings, one per candidate, and what they were taken on. routing_share: routing / layer."""

    shape: DispatchShape
    threads: int
    load: list[int]
    timings: list[Timing]
    routing_share: float


#: Another implementation of the experts: (x_TD, ids_TK, weights_TK, bank) -> y_TD, and the parameters it uses in place
#: of the bank's.
Peer = tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Sequence[Tensor]]


def measure_dispatch(
    shape: DispatchShape,
    *,
    names: Sequence[str] = DISPATCHER_NAMES,
    peers: Mapping[str, Callable[[ExpertBank], Peer]] | None = None,
    rounds: int = 10,
    seed: int = 0,
    on_round: Callable[[int], None] | None = None,
) -> DispatchReport:
    """Forward and backward of each dispatcher, peer, of the routing, and of a dense product of the experts' FLOPs.

    All take turns within a round, each round starting with another, so that neither what else the machine does nor
    what ran just before favours one. names: dispatchers; peers: name -> a function that makes the peer from our bank,
    with its weights. The dense product is (N, D) @ (D, 3F), or 2F without a gate: what the experts would cost if all
    were one. The routing goes from logits to sorted assignments and weights; the layer is a whole MoELayer with the
    default dispatcher. In float32, with torch's current number of threads. on_round: told how many rounds are done, 0
    after the warm-up.

    Raises ValueError for unknown names or rounds below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} is below 1")
    for name in names:
        check_choice("dispatcher", name, DISPATCHER_NAMES)
    case = _Case(shape, seed)
    candidates = {DENSE: case.dense, ROUTING: case.route, LAYER: case.layer}
    candidates |= {name: case.with_dispatcher(name) for name in names}
    made = {name: make(case.bank) for name, make in (peers or {}).items()}
    candidates |= {name: case.with_peer(peer) for name, peer in made.items()}
    results = {name: run() for name, run in candidates.items()}  # warm-up
    expected = results["naive"] if "naive" in results else case.with_dispatcher("naive")()
    differences = {name: _difference(results[name], expected) for name in names}
    differences |= {name: _difference(results[name][:3], expected[:3]) for name in made}

    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    turns = list(candidates)
    tell = on_round or (lambda done: None)
    tell(0)
    for done in range(1, rounds + 1):
        first = done % len(turns)
        for name in turns[first:] + turns[:first]:
            start = time.perf_counter()
            candidates[name]()
            seconds[name].append(time.perf_counter() - start)
        if done >= SLOW_ROUNDS:
            fastest = min(min(taken) for name, taken in seconds.items() if name not in BASES)
            turns = [name for name in turns if name in BASES or min(seconds[name]) < SLOW * fastest]
        tell(done)
    timings = [
        Timing(
            name=name,
            milliseconds=1e3 * statistics.median(taken),
            least_milliseconds=1e3 * min(taken),
            relative=statistics.median(own / dense for own, dense in zip(taken, seconds[DENSE], strict=False)),
            peak_mib=_peak_bytes(candidates[name]) / 2**20,
            difference=differences.get(name),
            rounds=len(taken),
        )
        for name, taken in seconds.items()
    ]
    shares = [routing / layer for routing, layer in zip(seconds[ROUTING], seconds[LAYER], strict=True)]
    return DispatchReport(
        shape=shape,
        threads=torch.get_num_threads(),
        load=case.routing.load().tolist(),
        timings=timings,
        routing_share=statistics.median(shares),
    )


def report_rows(report: DispatchReport) -> tuple[list[str], list[list[object]]]:
    """Column names and rows of a printed table: largest difference "-" where results differ by nature."""
    columns = ["name", "ms", "x dense", "peak MiB", "largest difference"]
    rows: list[list[object]] = [
        [t.name, round(t.milliseconds, 2), round(t.relative, 2), round(t.peak_mib, 1), t.difference]
        for t in report.timings
    ]
    return columns, rows


def set_threads(threads: int | None) -> None:
    """How many CPU threads torch uses from now on; None leaves its own choice."""
    if threads is not None:
        torch.set_num_threads(threads)


class _Case:
    """One batch, its routing, the experts, and the candidates as functions that run forward and backward once."""

    def __init__(self, shape: DispatchShape, seed: int) -> None:
        torch.manual_seed(seed)
        T, D, F, E = shape.num_tokens, shape.d_model, shape.d_ff, shape.num_experts
        self.bank = ExpertBank(E, D, F, cast(Activation, shape.activation))
        self.router = TopKRouter(D, E, shape.top_k)
        self.logits_TE = (torch.randn(T, E) + shape.skew * torch.randn(E)).requires_grad_()
        with torch.no_grad():
            self.routing: Routing = self.router.route_logits(self.logits_TE)
        self.moe_layer = MoELayer(D, F, E, shape.top_k, router=self.router, experts=self.bank)
        self.x_TD = torch.randn(T, D, requires_grad=True)
        self.weights_TK = self.routing.weights_TK.requires_grad_()
        self.d_y_TD = torch.randn(T, D)
        self.d_weights_TK = torch.randn_like(self.weights_TK)
        columns = sum(p.numel() for p in self.bank[0].parameters()) // D
        self.dense_x = torch.randn(T * shape.top_k, D, requires_grad=True)
        self.dense_w = torch.randn(D, columns, requires_grad=True)
        self.d_dense = torch.randn(T * shape.top_k, columns)

    def _backward(self, y: Tensor, d_y: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        y.backward(d_y)
        grads = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        return [y.detach(), *grads]

    def dense(self) -> list[Tensor | None]:
        return self._backward(self.dense_x @ self.dense_w, self.d_dense, [self.dense_x, self.dense_w])

    def route(self) -> list[Tensor | None]:
        routing = self.router.route_logits(self.logits_TE)
        sort_assignments(routing.expert_ids_TK, routing.num_experts)
        return self._backward(routing.weights_TK, self.d_weights_TK, [self.logits_TE])

    def layer(self) -> list[Tensor | None]:
        inputs = [self.x_TD, *self.moe_layer.parameters()]
        return self._backward(self.moe_layer(self.x_TD).hidden, self.d_y_TD, inputs)

    def with_dispatcher(self, name: str) -> Callable[[], list[Tensor | None]]:
        dispatch = make_dispatcher(name)
        inputs = [self.x_TD, self.weights_TK, *self.bank.parameters()]
        return lambda: self._backward(dispatch(self.x_TD, self.routing, self.bank), self.d_y_TD, inputs)

    def with_peer(self, peer: Peer) -> Callable[[], list[Tensor | None]]:
        run, parameters = peer
        inputs = [self.x_TD, self.weights_TK, *parameters]
        ids_TK = self.routing.expert_ids_TK
        return lambda: self._backward(run(self.x_TD, ids_TK, self.weights_TK), self.d_y_TD, inputs)


def _difference(results: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The largest absolute difference; no gradient counts as zeros."""
    largest = 0.0
    for ours, theirs in zip(results, expected, strict=True):
        if ours is not None or theirs is not None:
            gap = (0 if ours is None else ours) - (0 if theirs is None else theirs)
            largest = max(largest, float(torch.as_tensor(gap).abs().max()))
    return largest


def _peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch's allocator held at once during one run, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    held = peak = 0
    for event in memory:
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
