"""The task "lm": a small MoE transformer that learns to predict real text."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_core import MoETransformer, MoETransformerConfig

from .config import ToyConfig
from .corpus import Corpus, TokenBatch, build_corpus
from .task import Batch

# First probabilities close to uniform: whoever is chosen learns, is chosen more, and the rest starve. With larger
# first weights the router's random choices hold out longer, and 400 steps show less of that lesson.
ROUTER_INIT_STD = 0.005

# The built-in text never changes: a process that records several runs waits for it once. A user's files may.
_builtin_corpus = lru_cache(maxsize=4)(build_corpus)


class LanguageModelTask:
    """Next-token prediction on the built-in text and the user's own, one domain a sequence."""

    def __init__(self, config: ToyConfig) -> None:
        c = config
        self._config = config
        build: Callable[..., Corpus] = build_corpus if c.corpus else _builtin_corpus
        self._corpus = build(c.corpus, vocab_size=c.vocab_size, seed=c.seed, seq_len=c.seq_len)
        self.model = build_model(config, self._corpus.vocab_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=c.lr)
        self.probe = self._batch(self._corpus.probe_batch(c.batch_size, c.seq_len, c.seed))
        self.domains = self._corpus.domains
        self.settings: dict[str, Any] = {"vocab_size": self._corpus.vocab_size}
        self.data_digest = self._corpus.digest()
        self.tallies: dict[str, Tensor] = {}

    def batch(self, step: int) -> Batch:
        c = self._config
        return self._batch(self._corpus.batch(step, c.batch_size, c.seq_len, c.seed))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        out = self.model(batch.inputs, labels=batch.inputs)
        return {"loss": out.loss, **out.losses}

    def report(self, steps_done: int) -> str | None:
        return None

    def _batch(self, batch: TokenBatch) -> Batch:
        return Batch(
            inputs=torch.from_numpy(batch.token_ids),
            tokens={
                "token_ids": batch.token_ids,
                "domains": [self._corpus.domains[i] for i in batch.domain_ids],
                "text": lambda: self._corpus.token_texts(batch.token_ids),
            },
        )


def build_model(config: ToyConfig, vocab_size: int) -> MoETransformer:
    """The model of a toy run, its weights drawn from `config.seed` alone: the same for every balancer."""
    torch.manual_seed(config.seed)
    return MoETransformer(
        MoETransformerConfig(**config.model_options(), vocab_size=vocab_size, router_init_std=ROUTER_INIT_STD)
    )
