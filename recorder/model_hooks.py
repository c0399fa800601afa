"""The hooks that a recorder puts on a model: what they tell, and that they vanish from copies of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_core.routing import in_backward

from .adapters import RouterSite
from .model_calls import Entrance, entrances
from .no_hook import no_hook


class Listener(Protocol):
    """Who is told. Neither method raises."""

    def model_called(
        self, entrance: Entrance, outermost: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """One of the modules that enclose all routers of a stream is called; outermost: not from within another."""

    def model_returned(self) -> None:
        """The outermost of these calls is over, with or without an exception."""

    def router_ran(self, site: RouterSite, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """A router's forward is over, and is no recomputation."""


class ModelHooks:
    """Tells a listener of the model's calls and its routers' until `remove`."""

    def __init__(self, model: nn.Module, sites: Sequence[RouterSite], listener: Listener) -> None:
        self._listener = listener
        self._depth = 0
        self._handles: list[RemovableHandle] = []
        for entrance in entrances(model, sites):
            module = entrance.module
            before, after = _Hook(module, self._entering(entrance)), _Hook(module, self._leaving)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        for site in sites:
            hook = _Hook(site.module, self._of_router(site))
            self._handles.append(site.module.register_forward_hook(hook, with_kwargs=True))

    def start_anew(self) -> None:
        """No call is going on: after an interrupt (KeyboardInterrupt), torch tells nobody that one is over."""
        self._depth = 0

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entering(self, entrance: Entrance) -> Callable[..., None]:
        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._depth += 1
            self._listener.model_called(entrance, self._depth == 1, args, kwargs)

        return enter

    def _leaving(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._listener.model_returned()

    def _of_router(self, site: RouterSite) -> Callable[..., None]:
        return lambda args, kwargs, output: self._listener.router_ran(site, args, kwargs, output)


class _Hook:
    """Calls `tell` for forwards of this very module that are no recomputation of activations.

    A copy of the model, deep or pickled, carries hooks along: there this one becomes `no_hook`.
    """

    def __init__(self, module: nn.Module, tell: Callable[..., None]) -> None:
        self._module, self._tell = module, tell

    # torch.compile runs it as it is, between two graphs: traced into one, it would be compiled anew at every step
    @torch.compiler.disable(reason="routescope records routers between graphs: compile without fullgraph=True")
    def __call__(self, module: nn.Module, *what: Any) -> None:
        if module is self._module and not in_backward():
            self._tell(*what)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return no_hook
