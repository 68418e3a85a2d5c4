"""The decoder layers of a transformers model: where they are, and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .probe import AttentionCall


def decoder_layers(module: nn.Module, calls: Sequence[AttentionCall]) -> list[tuple[str, nn.Module]]:
    """The decoder layers by name: the elements of one list of modules with one attention call each, or nothing."""
    names = {id(m): name for name, m in module.named_modules()}
    lists = {name: m for name, m in module.named_modules() if isinstance(m, nn.ModuleList)}
    name = names[id(calls[0].module)]
    for list_name, layers in sorted(lists.items()):  # the outermost list comes first
        if not name.startswith(f"{list_name}.") or len(layers) != len(calls):
            continue
        inside = [f"{list_name}.{i}" for i in range(len(layers))]
        if all(f"{names[id(c.module)]}.".startswith(f"{x}.") for c, x in zip(calls, inside, strict=True)):
            return list(zip(inside, layers, strict=True))
    return []


class KeptOutputs:
    """Takes note of a copy of every layer's output, in order."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def __call__(self, number: int, hidden: torch.Tensor) -> None:
        """Keep one."""
        self.outputs.append(hidden.clone())


@contextmanager
def observing(layers: Sequence[tuple[str, nn.Module]], note: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Call note(number, output [T, H]) after every layer that runs inside, on T tokens."""

    def watch(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            note(number, (output[0] if isinstance(output, tuple) else output).flatten(0, -2))

        return hook

    handles = [layer.register_forward_hook(watch(number)) for number, (_, layer) in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
