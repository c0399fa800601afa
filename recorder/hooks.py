"""RoutingRecorder: attach to a model and record the routing of its training, one optimizer step at a time.

Shapes: B batch, S sequence, T = B*S tokens of one micro-batch, E experts, K choices a token.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_core.routing import NO_CHOICE, Routing, in_backward

from .adapters import Observation, RouterSite, find_routers
from .describe import describe_model
from .layer_stats import layer_stats
from .storage import Place
from .writer import RunWriter

LOGGED = ("loss", "ce_loss", "aux_loss", "z_loss", "grad_norm", "learning_rate", "wall_time_s")


@dataclass(kw_only=True)
class _Step:
    """What the open step context has gathered so far."""

    step: int
    phase: str
    decisions: bool
    forwards: dict[int, list[Observation]] = field(default_factory=dict)  # by router
    scalars: dict[str, float | None] = field(default_factory=dict)


class RoutingRecorder:
    """Records every MoELayer of `model` into the run folder `out` (created; FileExistsError if it holds a run).

    Open one `step` context per optimizer step; forwards outside a context are not recorded. All micro-batches
    inside one context belong to one step. Recomputed activations are not recorded again. `close()` (or leaving the
    `with` block) writes what is left and takes the hooks off the model.

        with RoutingRecorder(model, out="runs/mine", name="my run") as recorder:
            for step, (input_ids, labels) in enumerate(batches):
                with recorder.step(step, token_ids=input_ids):
                    loss = model(input_ids, labels).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    recorder.log(loss=loss)

    out: a local folder, or a URI such as s3://bucket/runs/mine. name: shown in the dashboard (default: the folder's
    name). config: the full training configuration, kept in
    the manifest; its "balancer" and "seed" are shown with the run. domains: names that `step(domains=...)` may
    use. decisions_every: record the decisions of every n-th training step; other phases record all of theirs.
    writer_options: passed on to RunWriter (flush_seconds, flush_rows, flush_steps, full_weights).
    """

    def __init__(
        self,
        model: nn.Module,
        out: str | Place,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        domains: Sequence[str] = (),
        decisions_every: int = 1,
        probe_every: int | None = None,
        source: str = "RoutingRecorder",
        **writer_options: Any,
    ) -> None:
        if decisions_every < 1:
            raise ValueError(f"decisions_every={decisions_every} is below 1")
        self.decisions_every = decisions_every
        self._sites = find_routers(model)
        description = describe_model(model, self._sites)
        config = dict(config or {})
        self.writer = RunWriter(
            out,
            manifest={
                "name": name,
                "source": source,
                "seed": config.get("seed"),
                "config": config,
                "domains": list(domains),
                "recorded": {
                    "stats_every": 1,
                    "decisions_every": decisions_every,
                    "probe_every": probe_every,
                    "text": False,
                    "weights": "full" if writer_options.get("full_weights") else "rounded",
                },
                "versions": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "numpy": np.__version__,
                },
                "model": description,
            },
            **writer_options,
        )
        self._domains = tuple(domains)
        self._open: _Step | None = None
        self._coefficients = [site.adapter.coefficients(site.module) for site in self._sites]
        self._handles: list[RemovableHandle] = [
            site.module.register_forward_hook(self._hook_of(site), with_kwargs=True) for site in self._sites
        ]

    def _hook_of(self, site: RouterSite) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # a deep copy of the model (an average of its weights, say) takes the hooks along, but is not recorded
            if self._open is not None and module is site.module and not in_backward():
                observation = site.adapter.read(module, args, kwargs, output)
                self._open.forwards.setdefault(site.router, []).append(observation)

        return note

    @contextmanager
    def step(
        self,
        step: int,
        *,
        phase: str = "train",
        token_ids: Any = None,
        attention_mask: Any = None,
        domains: Any = None,
        text: Any = None,
        decisions: bool | None = None,
    ) -> Iterator[None]:
        """Record the forwards inside as step `step` of `phase` (train, probe, eval or generate).

        token_ids, attention_mask, text: (B, S), those of several micro-batches concatenated along B; mask True or
        1 = a real token (where the layers were given no token_mask of their own). text may be a function that
        returns it, called only where decisions are kept. domains: one name per sequence
        (B) or per token (B, S). decisions: whether to keep single decisions; default by `decisions_every` in the
        train phase, always elsewhere. Nothing is written when the block raises.
        Raises ValueError where shapes do not match what the model saw, RuntimeError for nested contexts.
        """
        self.writer.check_new_step(step, phase)
        if self._open is not None:
            raise RuntimeError(f"step {step} was opened inside step {self._open.step}; one context at a time")
        if decisions is None:
            decisions = phase != "train" or step % self.decisions_every == 0
        self._open = current = _Step(step=step, phase=phase, decisions=decisions)
        try:
            yield
        finally:
            self._open = None
        self._write(current, token_ids, attention_mask, domains, text)

    def log(self, **scalars: Any) -> None:
        """Numbers of the open step: loss, ce_loss, aux_loss, z_loss, grad_norm, learning_rate, wall_time_s.

        Tensors of one element, numbers, or None. Raises RuntimeError outside a step context, ValueError for others.
        """
        if self._open is None:
            raise RuntimeError("log() wants an open step: call it inside `with recorder.step(...)`")
        unknown = sorted(set(scalars) - set(LOGGED))
        if unknown:
            raise ValueError(f"log() does not know {', '.join(unknown)}; it takes {', '.join(LOGGED)}")
        for name, value in scalars.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self._open.scalars[name] = None if value is None else float(value)

    def close(self, status: Literal["finished", "cancelled", "failed"] = "finished", error: str | None = None) -> None:
        """Write what is left, set the run's status and take the hooks off the model. May be called twice."""
        self._detach()
        self.writer.finalize(status, error)

    def __enter__(self) -> RoutingRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        self.writer.__exit__(kind, error, trace)

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _write(self, current: _Step, token_ids: Any, attention_mask: Any, domains: Any, text: Any) -> None:
        step, phase = current.step, current.phase
        tokens = 0
        for number, router in enumerate(sorted(current.forwards)):
            forwards = current.forwards[router]
            layout = _TokenLayout.of([_shape_of(forward) for forward in forwards])
            mask_T = None if attention_mask is None else layout.per_token("attention_mask", attention_mask) > 0
            routings = _masked([forward.routing for forward in forwards], mask_T)
            real_T = np.concatenate([_real_tokens(routing) for routing in routings])
            if number == 0:
                tokens = int(real_T.sum())
                # what the caller gave comes first: where it does not fit, nothing of the step has been written
                given = {"token_ids": token_ids, "domains": domains}
                of_token = {name: layout.per_token(name, v)[real_T] for name, v in given.items() if v is not None}
                self._check_domains(of_token.get("domains"))
                if current.decisions:
                    text = text() if callable(text) else text
                    of_token |= {} if text is None else {"text": layout.per_token("text", text)[real_T]}
                    self._write_tokens(step, phase, layout, real_T, of_token)
            layer = self._sites[router].layer
            stats = layer_stats(routings, [forward.losses for forward in forwards], self._coefficients[router])
            self.writer.log_layer_stats(step, phase=phase, layer=layer, router=router, **stats)
            if current.decisions:
                kept = [routing.kept_TK for routing in routings]
                self.writer.log_decisions(
                    step,
                    phase=phase,
                    layer=layer,
                    router=router,
                    experts_TK=_joined(routing.expert_ids_TK for routing in routings)[real_T],
                    weights_TK=_joined(routing.weights_TK for routing in routings)[real_T],
                    kept_TK=None if kept[0] is None else _joined(k for k in kept if k is not None)[real_T],
                    tokens_T=np.flatnonzero(real_T),
                )
        self.writer.log_step(step, phase=phase, tokens=tokens, **current.scalars)

    def _check_domains(self, domain_T: np.ndarray | None) -> None:
        if domain_T is None:
            return
        unknown = sorted({str(name) for name in domain_T} - set(self._domains)) if self._domains else []
        if unknown:
            raise ValueError(f"domains {', '.join(unknown)} are not among those declared: {', '.join(self._domains)}")

    def _write_tokens(
        self, step: int, phase: str, layout: _TokenLayout, real_T: np.ndarray, of_token: Mapping[str, Any]
    ) -> None:
        self.writer.log_tokens(
            step,
            phase=phase,
            sequence_T=layout.sequence_T[real_T],
            position_T=layout.position_T[real_T],
            token_id_T=of_token.get("token_ids"),
            text_T=of_token.get("text"),
            domain_T=of_token.get("domains"),
            tokens_T=np.flatnonzero(real_T),
        )
        if "text" in of_token and not self.writer.manifest["recorded"]["text"]:
            self.writer.update_manifest(recorded={**self.writer.manifest["recorded"], "text": True})


@dataclass(frozen=True)
class _TokenLayout:
    """Where the tokens of a step's micro-batches stand: sequences numbered on from one micro-batch to the next."""

    sequence_T: np.ndarray
    position_T: np.ndarray

    @staticmethod
    def of(shapes: Sequence[tuple[int, int]]) -> _TokenLayout:
        sequences, positions, first = [], [], 0
        for batch, length in shapes:
            sequences.append(np.repeat(np.arange(first, first + batch), length))
            positions.append(np.tile(np.arange(length), batch))
            first += batch
        return _TokenLayout(np.concatenate(sequences), np.concatenate(positions))

    def per_token(self, name: str, values: Any) -> np.ndarray:
        """`values`, given per token (domains also per sequence), as one entry per token."""
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        num_tokens, num_sequences = (
            len(self.sequence_T),
            int(self.sequence_T[-1]) + 1 if len(self.sequence_T) else 0,
        )
        if array.size == num_tokens:
            return array.reshape(num_tokens)
        if name == "domains" and array.shape == (num_sequences,):
            return array[self.sequence_T]
        raise ValueError(
            f"{name} has shape {array.shape}, but the model saw {num_tokens} tokens in {num_sequences} sequences"
        )


def _shape_of(observation: Observation) -> tuple[int, int]:
    """(sequences, positions); input that came flattened counts as one sequence."""
    return observation.batch_shape or (1, observation.routing.expert_ids_TK.shape[0])


def _changed(routing: Routing, changes: Mapping[str, Tensor]) -> Routing:
    """A copy of the routing with its tensors cut off from autograd, some of them changed."""
    present = {f.name: v for f in fields(routing) if (v := getattr(routing, f.name)) is not None}
    return replace(routing, **{name: value.detach() for name, value in {**present, **changes}.items()})


def _masked(routings: list[Routing], mask_T: np.ndarray | None) -> list[Routing]:
    """The routings with the recorder's own attention mask on top of what the layers were told."""
    if mask_T is None:
        return routings
    masked, start = [], 0
    for routing in routings:
        T = routing.expert_ids_TK.shape[0]
        here_T = torch.from_numpy(mask_T[start : start + T]).to(routing.expert_ids_TK.device)
        start += T
        told_T = routing.token_mask_T
        changes = {
            "token_mask_T": here_T if told_T is None else here_T & told_T,
            "expert_ids_TK": routing.expert_ids_TK.masked_fill(~here_T[:, None], NO_CHOICE),
            "weights_TK": routing.weights_TK.masked_fill(~here_T[:, None], 0),
        }
        masked.append(_changed(routing, changes))
    return masked


def _real_tokens(routing: Routing) -> np.ndarray:
    """bool (T,): not padding; rows that could not be routed are real tokens too."""
    if routing.token_mask_T is None:
        return np.ones(routing.expert_ids_TK.shape[0], dtype=bool)
    return routing.token_mask_T.cpu().numpy()


def _joined(tensors: Any) -> np.ndarray:
    return np.concatenate([tensor.cpu().numpy() for tensor in tensors])
