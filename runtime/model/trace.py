"""What the modules of a model compute, recorded from one short run, so that its layers can be recognised.

Every query attends to its own token only, so that the run needs no cache and a layer can be computed again by itself.
A module's semantics are then read from its inputs and outputs, not from its class: transformers has some hundred ways
to write the same few layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .attention import PAGED, attending, set_attention

TOKENS = 8


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module that no other recorded module made.

    input is the first tensor it was given, output what it returned.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def input(self) -> torch.Tensor:
        """The first tensor among its arguments."""
        return next(x for x in (*self.args, *self.kwargs.values()) if isinstance(x, torch.Tensor))


@dataclass(frozen=True)
class Attended:
    """An attention call: query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, Dv], output [T, Hq * Dv], sinks [Hq]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    sinks: torch.Tensor | None


@dataclass
class LayerTrace:
    """One decoder layer: input and output [T, H], its attention call, and the module calls before and after it."""

    name: str
    module: nn.Module
    input: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    attended: list[Attended] = field(default_factory=list)
    before: list[Call] = field(default_factory=list)
    after: list[Call] = field(default_factory=list)


@dataclass
class Trace:
    """A run of T tokens: ids and positions int64 [T]; `outside` are the calls made by no layer; logits [T, V]."""

    ids: torch.Tensor
    positions: torch.Tensor
    layers: list[LayerTrace]
    outside: list[Call]
    logits: torch.Tensor


def trace_model(module: Any, layers: list[tuple[str, nn.Module]], device: str) -> Trace:
    """Run `TOKENS` tokens through a causal transformers model and record what its modules did."""
    vocabulary = int(module.config.get_text_config(decoder=True).vocab_size)
    ids = torch.randint(vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.arange(TOKENS, device=device)
    recorder = _Recorder(module, layers)
    set_attention(module, PAGED)
    try:
        with attending(recorder), torch.no_grad():
            logits = module(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    finally:
        recorder.remove()
    return Trace(ids, positions, recorder.layers, recorder.outside, logits)


class _Recorder:
    def __init__(self, module: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
        self.layers = [LayerTrace(name, layer) for name, layer in layers]
        self.outside: list[Call] = []
        self._depth, self._current = 0, -1  # depth inside recorded modules; number of the running layer
        self._handles: list[Any] = []
        for number, (_, layer) in enumerate(layers):
            self._hook(layer, self._entering(number), self._leaving(number))
        for name, child in module.named_modules():
            if _is_unit(child):
                self._hook(child, self._down, self._up(name))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        own = value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        seen = Attended(query, key, value, own[0].flatten(1), settings.get("s_aux"))
        self.layers[self._current].attended.append(seen)
        return own

    def _hook(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._current = number
            given = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
            self.layers[number].input = given.detach().clone()[0]

        return hook

    def _leaving(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self.layers[number].output = (output[0] if isinstance(output, tuple) else output).detach().clone()[0]
            self._current = -1

        return hook

    def _down(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._depth += 1

    def _up(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self._depth -= 1
            if self._depth:
                return
            if self._current < 0:
                self.outside.append(Call(name, module, args, kwargs, output))
                return
            layer = self.layers[self._current]
            own = Call(name.removeprefix(f"{layer.name}."), module, args, kwargs, output)
            (layer.after if layer.attended else layer.before).append(own)

        return hook


def _is_unit(module: nn.Module) -> bool:
    """Whether a module's calls are recorded: it computes something by itself."""
    if isinstance(module, (nn.Dropout, nn.Identity, nn.ModuleList)):
        return False
    if not any(True for _ in module.children()):
        return True
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))
