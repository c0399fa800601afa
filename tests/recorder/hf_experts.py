"""What a model's experts were given, caught at the experts and not at the router: what recordings are held against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Seen:
    """What went into each block's experts, caught there and not at the router: (dense weights (T, E)) by block name."""

    def __init__(self, model: nn.Module) -> None:
        self.weights_TE: dict[str, list[Tensor]] = {}
        self.chosen_TE: dict[str, list[Tensor]] = {}
        self._open = False
        for name, module in model.named_modules():
            kind = type(module).__name__
            if hasattr(module, "router") and kind.startswith("JetMoeMo"):
                self._watch_jetmoe(name, module)
            elif kind == "Llama4TextMoe":
                self._watch_llama4(name, module)
            elif kind == "SwitchTransformersSparseMLP":
                module.experts.register_forward_pre_hook(self._switch(name))
            elif isinstance(getattr(module, "experts", None), nn.Module) and kind != "JetMoeAttention":
                module.experts.register_forward_pre_hook(self._arguments(name), with_kwargs=True)

    @contextmanager
    def open(self) -> Iterator[None]:
        self._open = True
        yield
        self._open = False

    def _keep(self, name: str, ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> None:
        if self._open:
            zeros_TE = torch.zeros(len(ids_TK), num_experts)
            weights_TE = zeros_TE.scatter(1, ids_TK, weights_TK.detach().float())
            self.weights_TE.setdefault(name, []).append(weights_TE)
            self.chosen_TE.setdefault(name, []).append(zeros_TE.scatter(1, ids_TK, 1.0))

    def _arguments(self, name: str) -> Any:
        """experts(hidden, top_k_index, top_k_weights), as most families call them."""

        def note(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            self._keep(name, given[1], given[2], experts_of(experts))

        return note

    def _switch(self, name: str) -> Any:
        """experts(hidden, one-hot of what was kept, weights): what capacity dropped is in neither."""

        def note(experts: nn.Module, args: tuple[Any, ...]) -> None:
            if self._open:
                kept_TE = args[1][:, 0].float()
                self.weights_TE.setdefault(name, []).append(kept_TE * args[2].detach().float())
                self.chosen_TE.setdefault(name, []).append(kept_TE)

        return note

    def _watch_llama4(self, name: str, block: nn.Module) -> None:
        """The experts get every token, scaled by its weight: zeros where it was not chosen."""

        def note(experts: nn.Module, args: tuple[Any, ...]) -> None:
            if self._open:
                scaled_ETD = args[0].detach().view(experts.num_experts, -1, experts.hidden_size)
                chosen_TE = (scaled_ETD != 0).any(-1).T.float()
                hidden_TD = self._hidden_TD
                scale_TE = (scaled_ETD * hidden_TD).sum(-1).T / hidden_TD.square().sum(-1, keepdim=True)
                self.weights_TE.setdefault(name, []).append(scale_TE)
                self.chosen_TE.setdefault(name, []).append(chosen_TE)

        def keep_input(_block: nn.Module, args: tuple[Any, ...]) -> None:
            self._hidden_TD = args[0].detach().reshape(-1, args[0].shape[-1])

        block.register_forward_pre_hook(keep_input)
        block.experts.register_forward_pre_hook(note)

    def _watch_jetmoe(self, name: str, block: nn.Module) -> None:
        """From the logits of the linear layer inside the router; loads are held against what the experts were given."""

        def note(_linear: nn.Module, _args: tuple[Any, ...], logits_TE: Tensor) -> None:
            top_TK, ids_TK = logits_TE.detach().float().topk(2, dim=1)
            self._keep(name, ids_TK, top_TK.softmax(1), logits_TE.shape[1])

        def check(_experts: nn.Module, args: tuple[Any, ...]) -> None:
            if self._open:
                assert self.chosen_TE[name][-1].sum(0).tolist() == list(args[1])

        block.router.layer.register_forward_hook(note)
        block.input_linear.register_forward_pre_hook(check)


def experts_of(experts: nn.Module) -> int:
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if isinstance(getattr(experts, name, None), int):
            return getattr(experts, name)
    return next(p.shape[0] for p in experts.parameters() if p.dim() == 3)
