"""What an open step gathers, micro-batch by micro-batch: sums for the statistics, decisions on their way to the host.

Everything here runs in the training thread, so it launches few operations and waits for none of them.

Shapes: B batch, S sequence, T = B*S tokens of one micro-batch, R routers alike, E experts, K choices a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .adapters import Observation, RouterSite
from .host_copies import HostCopy, to_device
from .layer_stats import Alike, Stacked, sum_up
from .model_calls import Told, real_tokens
from .sampling import Sampling
from .schema import id_type

_LARGEST_STACK = 1 << 22  # scores stacked at once: beyond that, memory costs more than launches
_SECOND = "decoder"  # the stream whose tokens are numbered after the other's


@dataclass(kw_only=True)
class MicroBatch:
    """Tokens that the routers of one stream saw in one forward.

    first_token, first_sequence: within the stream. first_position: above 0 where a cache holds what came before.
    chosen_B: sequences whose decisions are kept, None = all. numbered: False for the odd router that saw other
    tokens than the rest: it has statistics only. ids: on the host, where token ids are recorded from the model's call.
    """

    shape: tuple[int, int]
    first_token: int
    first_sequence: int
    first_position: int
    decisions: bool
    chosen_B: np.ndarray | None
    mask_T: Tensor | None  # the recorder's own, on top of what the routers were told
    numbered: bool = True
    ids: HostCopy | None = None
    seen: set[int] = field(default_factory=set)
    waiting: list[tuple[RouterSite, Observation]] = field(default_factory=list)
    real: HostCopy | None = None  # bool (T,): not padding; None = all real
    kept: list[KeptDecisions] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(kw_only=True)
class KeptDecisions:
    """Expert ids, weights and, where has_kept, what capacity kept, (R, T chosen, K), of these routers."""

    routers: tuple[int, ...]
    num_experts: int
    has_kept: bool
    copy: HostCopy


@dataclass(kw_only=True)
class RouterSums:
    """Sums of `sum_up` over micro-batches, of these routers; bias_RE of the latest."""

    routers: tuple[int, ...]
    alike: Alike
    counts: Tensor
    sums: Tensor
    bias_RE: Tensor | None


@dataclass(kw_only=True)
class SumsOnHost:
    routers: tuple[int, ...]
    alike: Alike
    copy: HostCopy  # counts, sums and, where alike.has_bias, the bias


class StepCapture:
    """One step of one phase while its context is open.

    stats, decisions: whether this step's are kept; `decisions` may be set to False half-way. token_ids: keep those
    of the model's own call. mask_T: (T,) over all tokens of the step's first stream, instead of the model's own mask.
    """

    def __init__(
        self,
        step: int,
        phase: str,
        *,
        stats: bool,
        decisions: bool,
        sampling: Sampling,
        token_ids: bool = False,
        mask_T: Tensor | None = None,
    ) -> None:
        self.step, self.phase = step, phase
        self.stats, self.decisions = stats, decisions
        self.scalars: dict[str, float | HostCopy | None] = {}
        self.streams: dict[str, list[MicroBatch]] = {}
        self.misfits: list[str] = []  # what did not fit together, in words
        self.calls = 0  # of the model
        self.misread = False  # a router's output could not be read
        self._sampling, self._token_ids, self._mask_T = sampling, token_ids, mask_T
        self._told: dict[str, Told] = {}
        self._since: dict[str, int] | None = None  # in a call of the model: where its micro-batches begin
        self._sums: dict[tuple[Any, ...], RouterSums] = {}

    def call_begins(self) -> None:
        """The model is called: what routers see from now on is a new micro-batch."""
        self.calls += 1
        self._told = {}
        self._since = {stream: len(batches) for stream, batches in self.streams.items()}

    def told(self, told: Mapping[str, Told]) -> None:
        """What a module on the way in was told of the tokens."""
        for stream, inner in told.items():
            outer = self._told.get(stream)
            self._told[stream] = inner if outer is None else outer.or_else(inner)

    def call_ends(self) -> None:
        self._reduce()
        self._told, self._since = {}, None

    def wants(self, site: RouterSite) -> bool:
        """Whether this router need be read: in a step without statistics and decisions, one of them counts tokens."""
        if self.stats or self.decisions or self._since is None:
            return True
        return len(self.streams.get(site.stream, ())) == self._since.get(site.stream, 0)

    def router_ran(self, site: RouterSite, observation: Observation) -> None:
        batch = self._batch_of(site, observation)
        batch.seen.add(site.router)
        batch.waiting.append((site, observation))

    def end(self) -> list[SumsOnHost]:
        """The sums of all routers, on their way to the host. Call once, when the step is over."""
        self._reduce()
        return [
            SumsOnHost(
                routers=sums.routers,
                alike=sums.alike,
                copy=HostCopy([t for t in (sums.counts, sums.sums, sums.bias_RE) if t is not None], fresh=True),
            )
            for sums in self._sums.values()
        ]

    @property
    def first_stream(self) -> list[MicroBatch]:
        """The numbered micro-batches that `token_ids`, `attention_mask`, `domains` and `text` of the step are about."""
        return next((batches for stream, batches in self.in_order() if stream != _SECOND), [])

    def in_order(self) -> list[tuple[str, list[MicroBatch]]]:
        """The numbered micro-batches of each stream, in the order in which tokens are numbered."""
        ordered = sorted(self.streams.items(), key=lambda entry: entry[0] == _SECOND)
        return [(stream, [batch for batch in batches if batch.numbered]) for stream, batches in ordered]

    def _batch_of(self, site: RouterSite, observation: Observation) -> MicroBatch:
        """The micro-batch that this observation belongs to: the first of this call that its router has not seen."""
        T = observation.routing.expert_ids_TK.shape[0]
        batches = self.streams.setdefault(site.stream, [])
        since = 0 if self._since is None else self._since.get(site.stream, 0)
        unseen = [batch for batch in batches[since:] if site.router not in batch.seen]
        same = next((batch for batch in unseen if batch.num_tokens == T), None)
        if same is not None:
            return same
        if self._since is None:
            self._reduce()  # routers called on their own: no end of a call of the model does it
        told = self._told.get(site.stream, Told())
        numbered = not any(batch.numbered for batch in unseen)
        if not numbered:
            self.misfits.append(
                f"router {site.name} saw {T} tokens where others saw {unseen[0].num_tokens}: "
                "its statistics are recorded, its decisions are not"
            )
        before = [batch for batch in batches if batch.numbered]
        shape = next((s for s in (observation.batch_shape, told.shape) if s is not None and s[0] * s[1] == T), (1, T))
        # a cached forward goes on with the sequences of the one before
        goes_on = bool(before) and 0 < told.past == before[-1].first_position + before[-1].shape[1]
        goes_on = goes_on and before[-1].shape[0] == shape[0]
        first_sequence = 0
        if before:
            first_sequence = before[-1].first_sequence + (0 if goes_on else before[-1].shape[0])
        batch = MicroBatch(
            shape=shape,
            first_token=before[-1].first_token + before[-1].num_tokens if before else 0,
            first_sequence=first_sequence,
            first_position=told.past,
            decisions=self.decisions and numbered,
            chosen_B=self._sampling.chosen(self.step, self.phase, first_sequence, shape[0]),
            mask_T=None,
            numbered=numbered,
        )
        batch.mask_T = self._mask(site, batch, told, observation.routing.expert_ids_TK.device)
        if self._token_ids and batch.decisions and told.ids is not None and tuple(told.ids.shape) == shape:
            batch.ids = HostCopy([told.ids.reshape(-1).to(torch.int32)], fresh=told.ids.dtype != torch.int32)
        batches.append(batch)
        return batch

    def _mask(self, site: RouterSite, batch: MicroBatch, told: Told, device: torch.device) -> Tensor | None:
        if not batch.numbered:
            return None
        if self._mask_T is not None and site.stream != _SECOND:
            given_T = self._mask_T[batch.first_token : batch.first_token + batch.num_tokens]
            # one that does not fit is the caller's mistake, told at the end of the step
            return to_device(given_T, device) if len(given_T) == batch.num_tokens else None
        if told.mask is None:
            return None
        B, S = batch.shape
        if told.mask.shape[0] != B or told.mask.shape[1] < S:
            self.misfits.append(
                f"attention_mask has shape {tuple(told.mask.shape)}, but router {site.name} saw {B} sequences of {S} "
                "tokens: it is not applied"
            )
            return None
        return to_device(real_tokens(told.mask)[:, -S:].reshape(-1), device)

    def _reduce(self) -> None:
        """Sum up what has been observed since the last call of this, and send decisions on their way."""
        for batches in self.streams.values():
            for batch in batches:
                if batch.waiting:
                    _add_real_tokens(batch)
                    waiting, batch.waiting = batch.waiting, []
                    for alike in _groups(waiting):
                        self._reduce_safely(batch, alike)

    def _reduce_safely(self, batch: MicroBatch, group: Sequence[tuple[RouterSite, Observation]]) -> None:
        """Reduce a group; where that fails, one by one, so that an odd router does not take the others along."""
        try:
            self._reduce_alike(batch, group)
        except Exception as error:
            if len(group) > 1:
                for one in group:
                    self._reduce_safely(batch, [one])
            else:
                self.misfits.append(f"router {group[0][0].name} gave what cannot be summed up: {error}")

    def _reduce_alike(self, batch: MicroBatch, group: Sequence[tuple[RouterSite, Observation]]) -> None:
        if not (self.stats or batch.decisions):
            return
        routings = [observation.routing for _, observation in group]
        routers = tuple(site.router for site, _ in group)
        losses = [observation.losses for _, observation in group]
        stacked = Stacked.of(routings, batch.mask_T)
        kept = _keep(batch, routers, routings[0].num_experts, stacked) if batch.decisions else None
        if self.stats:
            counts, sums = sum_up(routings, stacked, batch.mask_T, losses)
            bias = [routing.expert_bias_E for routing in routings if routing.expert_bias_E is not None]
            bias_RE = torch.stack(bias) if bias else None
            alike = Alike.of(routings[0], losses[0])
            so_far = self._sums.get((routers, alike))
            if so_far is None:
                self._sums[routers, alike] = RouterSums(
                    routers=routers, alike=alike, counts=counts, sums=sums, bias_RE=bias_RE
                )
            else:
                so_far.counts += counts
                so_far.sums += sums
                so_far.bias_RE = bias_RE
        if kept is not None:
            batch.kept.append(kept)


def _groups(waiting: Sequence[tuple[RouterSite, Observation]]) -> list[list[tuple[RouterSite, Observation]]]:
    """Routers that can be stacked, in chunks that are not too large."""
    groups: dict[tuple[Any, ...], list[list[tuple[RouterSite, Observation]]]] = {}
    for site, observation in waiting:
        routing = observation.routing
        T, E = routing.scores_TE.shape
        key = (Alike.of(routing, observation.losses), routing.top_k, T)
        chunks = groups.setdefault(key, [[]])
        if len(chunks[-1]) >= max(1, _LARGEST_STACK // max(1, T * E)):
            chunks.append([])
        chunks[-1].append((site, observation))
    return [chunk for chunks in groups.values() for chunk in chunks]


def _add_real_tokens(batch: MicroBatch) -> None:
    if batch.real is not None:
        return
    told_T = batch.waiting[0][1].routing.token_mask_T
    masks = [mask_T for mask_T in (batch.mask_T, told_T) if mask_T is not None]
    if masks:
        batch.real = HostCopy([masks[0] & masks[1] if len(masks) == 2 else masks[0]], fresh=batch.mask_T is not None)


def _keep(batch: MicroBatch, routers: tuple[int, ...], num_experts: int, stacked: Stacked) -> KeptDecisions:
    """The chosen sequences' decisions, ids in the narrowest type: less to copy, less to hold."""
    narrow: torch.dtype = getattr(torch, str(id_type(num_experts)))
    parts = [stacked.expert_ids_RTK.to(narrow), stacked.weights_RTK]
    if stacked.kept_RTK is not None:
        parts.append(stacked.kept_RTK)
    if batch.chosen_B is not None:
        chosen_T = np.repeat(batch.chosen_B, batch.shape[1])
        index = to_device(torch.from_numpy(np.flatnonzero(chosen_T)), parts[0].device)
        parts = [part.index_select(1, index) for part in parts]
    return KeptDecisions(
        routers=routers,
        num_experts=num_experts,
        has_kept=stacked.kept_RTK is not None,
        copy=HostCopy(parts, fresh=True),
    )
