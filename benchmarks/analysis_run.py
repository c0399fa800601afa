"""A large run to analyse: as a training of 16 MoE layers would leave it, written by RunWriter, without the training."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.analysis_queries import EXPERTS, LAYERS, TOP_K
from recorder.manifest import RunNotFoundError
from recorder.reader import Run
from recorder.writer import RunWriter

TOKENS, LENGTH, PROBE_TOKENS = 4096, 512, 1024
DECISIONS_EVERY, PROBE_EVERY = 10, 100
VOCABULARY, DOMAINS = 8192, ("code", "prose", "web", "arithmetic")


def write_large_run(path: Path, assignments: int, seed: int = 0) -> int:
    """Write a run of at least so many assignments, statistics of every step, decisions of every tenth; how many it has.

    Experts lean to domains, each layer in its own way; later steps more than earlier ones.
    """
    rng = np.random.default_rng(seed)
    layers = [_layer(number) for number in range(LAYERS)]
    manifest = {
        "name": f"{assignments / 1e6:.0f} million assignments",
        "config": {"num_experts": EXPERTS, "top_k": TOP_K, "num_layers": LAYERS, "seed": seed},
        "model": {"layers": layers},
        "domains": list(DOMAINS),
    }
    leaning_LDE = rng.normal(0, 1, (LAYERS, len(DOMAINS), EXPERTS)).astype(np.float32)
    texts = np.array([f" w{number}" for number in range(VOCABULARY)], dtype=object)
    probe = _batch(rng, PROBE_TOKENS)
    written, step = 0, 0
    with RunWriter(path, manifest=manifest) as writer:
        while written < assignments:
            strength = min(1.0, step / 1000)
            if step % PROBE_EVERY == 0:
                written += _log(writer, step, "probe", probe, strength * leaning_LDE, np.random.default_rng(1), texts)
            if step % DECISIONS_EVERY == 0:
                written += _log(writer, step, "train", _batch(rng, TOKENS), strength * leaning_LDE, rng, texts)
            else:
                for router in range(LAYERS):
                    load_E = rng.multinomial(TOKENS * TOP_K, np.full(EXPERTS, 1 / EXPERTS))
                    _log_stats(writer, step, "train", router, TOKENS, load_E)
            writer.log_step(
                step, tokens=TOKENS, wall_time_s=0.1, loss=9 / (1 + step / 300), ce_loss=8 / (1 + step / 300)
            )
            step += 1
    return written


def _layer(number: int) -> dict[str, Any]:
    return {
        "index": number,
        "router": number,
        "name": f"layers.{number}.mlp",
        "kind": "moe",
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "score_function": "softmax",
        "balancer": "none",
    }


def _batch(rng: np.random.Generator, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, frequent ones far more often than rare ones, and the domain of each token's sequence."""
    token_id_T = np.minimum(rng.zipf(1.2, tokens), VOCABULARY) - 1
    return token_id_T, np.repeat(rng.integers(0, len(DOMAINS), tokens // LENGTH), LENGTH)


def _log(
    writer: RunWriter,
    step: int,
    phase: str,
    batch: tuple[np.ndarray, np.ndarray],
    leaning_LDE: np.ndarray,
    rng: np.random.Generator,
    texts: np.ndarray,
) -> int:
    token_id_T, domain_T = batch
    tokens = len(token_id_T)
    for router in range(LAYERS):
        logits_TE = rng.standard_normal((tokens, EXPERTS), dtype=np.float32) + leaning_LDE[router, domain_T]
        chosen_TK = np.argpartition(logits_TE, -TOP_K, axis=1)[:, -TOP_K:]
        score_TK = np.take_along_axis(logits_TE, chosen_TK, axis=1)
        order_TK = np.argsort(-score_TK, axis=1)
        ids_TK = np.take_along_axis(chosen_TK, order_TK, axis=1)
        weights_TK = np.exp(np.take_along_axis(score_TK, order_TK, axis=1))
        weights_TK /= weights_TK.sum(axis=1, keepdims=True)
        writer.log_decisions(step, phase=phase, layer=router, router=router, experts_TK=ids_TK, weights_TK=weights_TK)
        _log_stats(writer, step, phase, router, tokens, np.bincount(ids_TK.ravel(), minlength=EXPERTS))
    at_T = np.arange(tokens)
    writer.log_tokens(
        step,
        phase=phase,
        sequence_T=at_T // LENGTH,
        position_T=at_T % LENGTH,
        token_id_T=token_id_T,
        text_T=texts[token_id_T],
        domain_T=[DOMAINS[domain] for domain in domain_T],
    )
    if phase == "probe":
        writer.log_step(step, phase=phase, tokens=tokens, ce_loss=8 / (1 + step / 300))
    return LAYERS * tokens * TOP_K


def _log_stats(writer: RunWriter, step: int, phase: str, router: int, tokens: int, load_E: np.ndarray) -> None:
    share_E = (load_E / load_E.sum()).astype(np.float32)
    writer.log_layer_stats(
        step, phase=phase, layer=router, router=router, tokens=tokens, load=load_E,
        gate_mass=load_E / TOP_K, mean_prob=share_E, router_entropy=0.9,
    )  # fmt: skip


def large_run(folder: Path, assignments: int) -> Path:
    """The run of so many assignments in a folder, written where it is not there or not whole."""
    path = folder / f"large-{assignments / 1e6:g}-million"
    try:
        if Run(path).status == "finished":
            return path
        shutil.rmtree(path)
    except RunNotFoundError:
        pass
    print(f"writing a run of {assignments / 1e6:g} million assignments", file=sys.stderr)
    write_large_run(path, assignments)
    return path
