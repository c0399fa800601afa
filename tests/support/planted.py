"""Runs whose truth is known, written with the real RunWriter: what a diagnosis or a view says can be held against it.

Shapes: T tokens, E experts, K top-k.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recorder.writer import RunWriter

NEVER_FLUSHED = {"flush_seconds": 1e9}


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """From `step` on `experts` take `share` of the choices, until the step `until` (None: the end)."""

    step: int
    experts: Sequence[int]
    share: float = 0.95
    until: int | None = None


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What is true of a run.

    collapse, dead  by layer; dead: (step, experts) that get nothing from that step on
    blocks          experts that fire together, one block a domain: a token of domain d takes its experts from block d
                    with odds of `loyalty` to 1. Empty: any expert for any token
    moves           for each probe after the first, the share of the tokens that go over to other experts, none of
                    which they had; no token moves twice. Empty: no probes
    bias_step       what the greatest bias gains and the smallest loses a step; None: no bias
    """

    num_experts: int = 16
    top_k: int = 2
    tokens: int = 512
    steps: int = 120
    layers: Sequence[int] = (1, 3)
    seed: int = 0
    collapse: Mapping[int, Collapse] = field(default_factory=dict)
    dead: Mapping[int, tuple[int, Sequence[int]]] = field(default_factory=dict)
    blocks: Sequence[Sequence[int]] = ()
    loyalty: float = 30.0
    moves: Sequence[float] = ()
    bias_step: float | None = None
    decisions_every: int = 20
    phase: str = "train"
    balancer: str = "none"

    @property
    def domains(self) -> list[str]:
        return [f"domain {number}" for number in range(len(self.blocks))]

    @property
    def probes(self) -> list[int]:
        """The steps of the probes."""
        every = (self.steps - 1) // max(len(self.moves), 1)
        return [number * every for number in range(len(self.moves) + 1)] if self.moves else []

    def mover_of(self) -> np.ndarray:
        """(T,): the number of the probe at which each token has moved, 0 = never."""
        moved_T = np.zeros(self.tokens, dtype=np.int64)
        start = 0
        for number, share in enumerate(self.moves, 1):
            count = round(share * self.tokens)
            moved_T[start : start + count] = number
            start += count
        assert start <= self.tokens, "no token moves twice"
        return np.random.default_rng(self.seed).permutation(moved_T)


def write_planted(path: Path, planted: Planted, **log_step: Any) -> Path:
    """Write the run; `log_step` replaces scalars of every step, each a value or a function of the step."""
    layers = [
        {
            "index": index,
            "kind": "moe",
            "router": router,
            "num_experts": planted.num_experts,
            "top_k": planted.top_k,
            "score_function": "softmax",
        }
        for router, index in enumerate(planted.layers)
    ]
    manifest = {"config": {"balancer": planted.balancer}, "domains": planted.domains, "model": {"layers": layers}}
    rng = np.random.default_rng(planted.seed)
    with RunWriter(path, manifest=manifest, **NEVER_FLUSHED) as writer:
        for step in range(planted.steps):
            _write_step(writer, planted, step, rng)
            if step in planted.probes:
                _write_probe(writer, planted, planted.probes.index(step), step)
            scalars = {name: value(step) if callable(value) else value for name, value in log_step.items()}
            loss = {"loss": 3.0, "ce_loss": 3.0}
            writer.log_step(step, phase=planted.phase, tokens=planted.tokens, **(loss | scalars))
    return path


def write_rows(path: Path, steps: int, row: Callable[[int], dict[str, Any]]) -> Path:
    """A run of one layer (index 2) of four experts; row(step) replaces parts of its rows."""
    layer = {"index": 2, "kind": "moe", "router": 0, "num_experts": 4, "top_k": 1, "score_function": "sigmoid"}
    with RunWriter(path, manifest={"model": {"layers": [layer]}}, **NEVER_FLUSHED) as writer:
        for step in range(steps):
            load = np.array([100, 100, 100, 100])
            values = {"tokens": 400, "load": load, "gate_mass": None, "mean_prob": None} | row(step)
            writer.log_layer_stats(step, layer=2, router=0, **values)
            writer.log_step(step, tokens=400, loss=1.0)
    return path


def _write_step(writer: RunWriter, planted: Planted, step: int, rng: np.random.Generator) -> None:
    T, E, K = planted.tokens, planted.num_experts, planted.top_k
    domain_T = rng.integers(0, max(len(planted.blocks), 1), T)
    with_decisions = step % planted.decisions_every == 0
    for router, layer in enumerate(planted.layers):
        ids_TK = draw(odds(planted, layer, step, domain_T), K, rng)
        load_E = np.bincount(ids_TK.ravel(), minlength=E)
        bias_E = None
        if planted.bias_step is not None:
            bias_E = np.linspace(-1, 1, E) * planted.bias_step * step
        where: dict[str, Any] = {"phase": planted.phase, "layer": layer, "router": router}
        writer.log_layer_stats(
            step,
            **where,
            tokens=T,
            load=load_E,
            gate_mass=load_E / K,
            mean_prob=load_E / load_E.sum(),
            expert_bias=bias_E,
            router_entropy=0.9,
        )
        if with_decisions:
            writer.log_decisions(step, **where, experts_TK=ids_TK, weights_TK=np.full((T, K), 1 / K))
    if with_decisions:
        word_T = domain_T * 4 + rng.integers(0, 4, T)  # four token ids of its own for each domain
        writer.log_tokens(
            step,
            phase=planted.phase,
            sequence_T=np.arange(T) // 32,
            position_T=np.arange(T) % 32,
            token_id_T=word_T,
            text_T=[f"word{word}" for word in word_T],
            domain_T=[planted.domains[domain] for domain in domain_T] if planted.blocks else None,
        )


def _write_probe(writer: RunWriter, planted: Planted, number: int, step: int) -> None:
    """The same tokens at every probe. A token that moves goes K experts on: to K others, as E >= 2 K."""
    T, E, K = planted.tokens, planted.num_experts, planted.top_k
    first_TK = draw(np.ones((T, E)), 1, np.random.default_rng(planted.seed + 1)) + np.arange(K)
    moved_T = planted.mover_of()
    shift_T = np.where((moved_T > 0) & (moved_T <= number), K, 0)
    ids_TK = (first_TK + shift_T[:, None]) % E
    load_E = np.bincount(ids_TK.ravel(), minlength=E)
    for router, layer in enumerate(planted.layers):
        where: dict[str, Any] = {"phase": "probe", "layer": layer, "router": router}
        writer.log_layer_stats(
            step, **where, tokens=T, load=load_E, gate_mass=load_E / K, mean_prob=load_E / load_E.sum()
        )
        writer.log_decisions(step, **where, experts_TK=ids_TK, weights_TK=np.full((T, K), 1 / K))
    writer.log_tokens(
        step,
        phase="probe",
        sequence_T=np.arange(T) // 32,
        position_T=np.arange(T) % 32,
        token_id_T=1000 + np.arange(T),  # of their own
        text_T=[f"probe{token}" for token in range(T)],
    )
    writer.log_step(step, phase="probe", tokens=T, ce_loss=3.0)


def odds(planted: Planted, layer: int, step: int, domain_T: np.ndarray) -> np.ndarray:
    """(T, E): how much each token leans to each expert."""
    odds_TE = np.ones((planted.tokens, planted.num_experts))
    for domain, block in enumerate(planted.blocks):
        odds_TE[np.ix_(domain_T == domain, list(block))] = planted.loyalty
    collapse = planted.collapse.get(layer)
    if collapse is not None and collapse.step <= step and (collapse.until is None or step < collapse.until):
        inside = np.isin(np.arange(planted.num_experts), collapse.experts)
        odds_TE[:, inside] = collapse.share / inside.sum()
        odds_TE[:, ~inside] = (1 - collapse.share) / (~inside).sum()
    since, experts = planted.dead.get(layer, (planted.steps, ()))
    if step >= since:
        odds_TE[:, list(experts)] = 0
    return odds_TE


def draw(odds_TE: np.ndarray, top_k: int, rng: np.random.Generator) -> np.ndarray:
    """(T, K) different experts for each token, drawn one after the other with these odds (the Gumbel trick)."""
    with np.errstate(divide="ignore"):
        keys_TE = np.log(odds_TE) + rng.gumbel(size=odds_TE.shape)
    return np.argsort(-keys_TE, axis=1, kind="stable")[:, :top_k]
