"""Shapes of attention: their parameters, the work of one token, and what a token leaves in the cache. No torch.

D model width, H query heads, G key-value heads, S keys that a token attends to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .counts import MAX_WIDTH, Count
from .whole import whole

QKNorm = Literal["head", "full"]


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """H query heads that share G key-value heads; H = G is multi-head attention, G = 1 multi-query.

    Attributes:
        num_heads: H. num_kv_heads: G, which divides H. head_dim: width of one head.
        qkv_bias: biases on the query, key and value projections. out_bias: on the output projection.
        qk_norm: a learned norm of queries and keys, over each "head" or over all heads at once ("full").
        sinks: a learned logit for each head that takes attention from no key (gpt-oss).
        output_gate: a projection as wide as the queries that gates the output (AFMoE).
        window: keys that a token sees, itself counted; None = all before it.

    Raises ValueError for numbers out of range.

    Source: Ainslie et al., arXiv 2305.13245.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    sinks: bool = False
    output_gate: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        whole("num_heads", self.num_heads, 1, MAX_WIDTH)
        whole("num_kv_heads", self.num_kv_heads, 1, self.num_heads)
        whole("head_dim", self.head_dim, 1, MAX_WIDTH)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.window is not None:
            whole("window", self.window, 1)

    def count(self, d_model: int) -> Count:
        """Parameters at width D, norms of queries and keys included; a token uses all of them."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        products = d_model * (2 * queries + 2 * keys + (queries if self.output_gate else 0))
        rest = (queries + 2 * keys if self.qkv_bias else 0) + (d_model if self.out_bias else 0)
        rest += {None: 0, "head": 2 * self.head_dim, "full": queries + keys}[self.qk_norm]
        rest += self.num_heads if self.sinks else 0
        return Count.of_all(products + rest, products)

    def score_flops(self, context: int) -> int:
        """FLOPs of one token's scores and weighted values over `context` keys: 2 H S (d + d)."""
        return 2 * self.num_heads * self.seen(context) * 2 * self.head_dim

    def seen(self, context: int) -> int:
        """Keys that a token sees of `context`."""
        return context if self.window is None else min(context, self.window)

    @property
    def cache_values(self) -> int:
        """Numbers that one token leaves in the key-value cache: 2 G d."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values are expanded from one compressed vector a token.

    Attributes:
        num_heads: H. q_lora_rank: width that queries are compressed to; None = they are not.
        kv_lora_rank: width of the compressed keys and values, each with a learned norm as the queries' has.
        qk_nope_head_dim, qk_rope_head_dim: the parts of a query or key head without and with rotary positions; the
            rotary part of the key is shared by all heads.
        v_head_dim: width of a value head.
        bias: biases on the compressing projections and on the output.

    Raises ValueError for numbers out of range.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False

    window = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            whole(name, getattr(self, name), 1, MAX_WIDTH)
        if self.q_lora_rank is not None:
            whole("q_lora_rank", self.q_lora_rank, 1, MAX_WIDTH)

    def count(self, d_model: int) -> Count:
        """Parameters at width D, norms of the compressed vectors included; a token uses all of them."""
        queries = self.num_heads * self._qk_head_dim
        rank = self.q_lora_rank
        products = d_model * queries if rank is None else rank * (d_model + queries)
        compressed = self.kv_lora_rank + self.qk_rope_head_dim
        products += d_model * compressed
        products += self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        products += self.num_heads * self.v_head_dim * d_model
        norms = (rank or 0) + self.kv_lora_rank
        biases = (rank or 0) + compressed + d_model if self.bias else 0
        return Count.of_all(products + norms + biases, products)

    def score_flops(self, context: int) -> int:
        """FLOPs of one token's scores and weighted values over `context` keys, keys and values expanded."""
        return 2 * self.num_heads * context * (self._qk_head_dim + self.v_head_dim)

    def seen(self, context: int) -> int:
        """Keys that a token sees of `context`: all."""
        return context

    @property
    def cache_values(self) -> int:
        """Numbers that one token leaves in the cache: the compressed vector and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def _qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


Attention = GroupedQueryAttention | LatentAttention
