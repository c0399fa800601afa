"""The toy training run: a small MoE language model on real text, every routing decision recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe_core import MoETransformer, MoETransformerConfig
from moe_core.balancers import attach_balancers

from ..hooks import RoutingRecorder
from .config import ToyConfig
from .corpus import Corpus, TokenBatch, build_corpus

GRADIENT_CLIP = 1.0
# First probabilities close to uniform: whoever is chosen learns, is chosen more, and the rest starve. With larger
# first weights the router's random choices hold out longer, and 400 steps show less of that lesson.
ROUTER_INIT_STD = 0.005


class RunCancelledError(Exception):
    """The run was asked to stop; what was recorded until then is kept."""


def build_model(config: ToyConfig, vocab_size: int) -> MoETransformer:
    """The model of a toy run, its weights drawn from `config.seed` alone: the same for every balancer."""
    torch.manual_seed(config.seed)
    return MoETransformer(
        MoETransformerConfig(
            vocab_size=vocab_size,
            d_model=config.d_model,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            d_ff=config.d_ff,
            expert_d_ff=config.expert_d_ff,
            num_experts=config.num_experts,
            top_k=config.top_k,
            num_shared_experts=config.num_shared_experts,
            moe_frequency=config.moe_frequency,
            score_function="softmax" if config.router == "softmax" else "sigmoid",
            noise_std=config.noise_std,
            router_init_std=ROUTER_INIT_STD,
            balancer=config.full_balancer,
            aux_coef=config.aux_coef,
            z_coef=config.z_coef,
            bias_rate=config.bias_rate,
            dispatcher=config.dispatcher,
            capacity_factor=config.capacity_factor,
        )
    )


def train(
    config: ToyConfig,
    out: Path,
    *,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train and record into the run folder `out` (created; FileExistsError if it is taken).

    Calls on_step(steps done, loss) after each step and should_stop() before it. Raises RunCancelledError after closing
    the run as cancelled, ValueError for a corpus that cannot be used, before anything is written.
    """
    corpus = build_corpus(config.corpus, vocab_size=config.vocab_size, seed=config.seed, seq_len=config.seq_len)
    if should_stop():
        raise RunCancelledError  # before the run's folder is there
    model = build_model(config, corpus.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    attach_balancers(model, optimizer)
    probe = corpus.probe_batch(config.batch_size, config.seq_len, config.seed)
    torch.manual_seed(config.seed)  # the router's noise
    with RoutingRecorder(
        model,
        out,
        name=config.name or out.name,
        config={**config.as_manifest(), "vocab_size": corpus.vocab_size},
        domains=corpus.domains,
        decisions_every=config.decisions_every,
        probe_every=config.probe_every,
        source="routescope record",
    ) as recorder:
        for step in range(config.steps):
            if step and should_stop():
                recorder.close("cancelled")
                raise RunCancelledError
            batch = corpus.batch(step, config.batch_size, config.seq_len, config.seed)
            loss = _train_step(recorder, model, optimizer, corpus, batch, step)
            # the last probe sees the finished model: it is what saturation is measured against
            if step % config.probe_every == 0 or step == config.steps - 1:
                _probe(recorder, model, corpus, probe, step)
            on_step(step + 1, loss)


def _train_step(
    recorder: RoutingRecorder,
    model: MoETransformer,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    batch: TokenBatch,
    step: int,
) -> float:
    started = time.perf_counter()
    model.train()
    input_ids = torch.from_numpy(batch.token_ids)
    with recorder.step(
        step,
        token_ids=batch.token_ids,
        domains=_domain_names(corpus, batch),
        text=lambda: corpus.token_texts(batch.token_ids),
    ):
        out = model(input_ids, labels=input_ids)
        assert out.loss is not None
        optimizer.zero_grad()
        out.loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        optimizer.step()
        loss = out.loss.item()
        recorder.log(
            loss=loss,
            **out.losses,
            grad_norm=grad_norm,
            learning_rate=optimizer.param_groups[0]["lr"],
            wall_time_s=time.perf_counter() - started,
        )
    return loss


@torch.no_grad()
def _probe(recorder: RoutingRecorder, model: MoETransformer, corpus: Corpus, batch: TokenBatch, step: int) -> None:
    """One fixed held-out batch in eval mode: the same tokens each time, after the update of that step."""
    model.eval()
    input_ids = torch.from_numpy(batch.token_ids)
    with recorder.step(
        step,
        phase="probe",
        token_ids=batch.token_ids,
        domains=_domain_names(corpus, batch),
        text=lambda: corpus.token_texts(batch.token_ids),
    ):
        out = model(input_ids, labels=input_ids)
        recorder.log(loss=out.loss, **out.losses)


def _domain_names(corpus: Corpus, batch: TokenBatch) -> list[str]:
    return [corpus.domains[i] for i in batch.domain_ids]
