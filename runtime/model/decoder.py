"""A lowered model: its decoder layers as flat specifications, run by a backend's fused operations.

A layer costs about nine operations: qkv, query_and_store, attention, output, add_norm, gate_up, gated_activation, down,
add_norm. `lower.py` makes the specification from a transformers model.

Shapes: T tokens of the step, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from pagefleet.backends.base import AttentionArgs, Backend, KVGroup
from pagefleet.backends.ops import Heads, Linear, Norm, Ops, Rotary

from .layout import AttentionLayout
from .quantize import UNQUANTIZED, Quantization


class Mixer(Protocol):
    """What follows attention in a layer: an MLP or experts."""

    def __call__(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H], row by row."""
        ...


@dataclass(frozen=True)
class Mlp:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) where `up` is both, gates first."""

    up: Linear
    down: Linear
    activation: str
    gated: bool

    def __call__(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """See `Mixer`."""
        inner = self.up(x)
        act = ops.gated_activation if self.gated else ops.activation
        return self.down(act(inner, self.activation))


@dataclass(frozen=True)
class Experts:
    """The top_k of many MLPs for each row, weighted by a softmax over all (Shazeer et al., 2017).

    normalised: the weights of the chosen experts are made to sum to one.
    """

    router: Linear
    experts: Sequence[Mlp]
    top_k: int
    normalised: bool

    def __call__(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        """See `Mixer`. Experts run one after another, each over the rows that chose it."""
        weights, chosen = self.route(x)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        pairs = chosen.flatten().argsort(stable=True)  # (row, choice) pairs, one expert's after another's
        rows, weights = pairs // self.top_k, weights.flatten()[pairs, None]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                own = rows[start : start + count]
                out.index_add_(0, own, expert(ops, x[own]).float() * weights[start : start + count])
                start += count
        return out.to(x.dtype)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 and experts int64, [T, top_k] each."""
        weights, chosen = torch.softmax(self.router(x).float(), -1).topk(self.top_k, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.normalised else weights), chosen


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        place: KV group and layer number, as `Backend.attention` takes them.
        rotary: which of the model's rotations turns queries and keys; None for none.
        attention_norm, mixer_norm: before attention and mixer; None for none.
        attention_post, mixer_post: of their outputs, before these are added to the residual.
        parallel: the mixer runs on the layer's input, as attention does, and not on what attention gave.
        residual_scale: factor of what is added to the residual.
    """

    qkv: Linear
    heads: Heads
    rotary: int | None
    place: tuple[int, int]
    args: AttentionArgs
    output: Linear
    mixer: Mixer
    attention_norm: Norm | None
    mixer_norm: Norm | None
    attention_post: Norm | None = None
    mixer_post: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0

    def __call__(
        self, step: Step, x: torch.Tensor, residual: torch.Tensor, next_norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised residual [T, H] and the residual [T, H], both after the layer.

        x: `residual` normalised by `attention_norm`; next_norm: the norm of whatever follows.
        """
        ops, scale = step.ops, self.residual_scale
        attended = self.output(self._attention(step, x))
        if not self.parallel:
            x, residual = ops.add_norm(attended, residual, self.mixer_norm, self.attention_post, scale)
            return ops.add_norm(self.mixer(ops, x), residual, next_norm, self.mixer_post, scale)
        if self.mixer_norm is not self.attention_norm:
            x = residual if self.mixer_norm is None else ops.norm(residual, self.mixer_norm)
        if self.attention_post is not None:
            attended = ops.norm(attended, self.attention_post)
        mixed = self.mixer(ops, x)
        if self.mixer_post is not None:
            mixed = ops.norm(mixed, self.mixer_post)
        return ops.add_norm(attended + mixed, residual, next_norm, None, scale)

    def _attention(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        group, layer = self.place
        rotary = None if self.rotary is None else step.rotations[self.rotary]
        query = step.ops.query_and_store(step.plan, group, layer, self.qkv(x), self.heads, rotary)
        return step.attend(step.plan, group, layer, query, self.args).flatten(1)


@dataclass(frozen=True)
class Step:
    """What all layers of a step share."""

    ops: Ops
    attend: Callable[[Any, int, int, torch.Tensor, AttentionArgs], torch.Tensor]
    plan: Any
    rotations: list[Rotary]


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding worked out for every position: cos and sin float32 [max_len, R / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def at(self, positions: torch.Tensor) -> Rotary:
        """Angles of positions int64 [T]."""
        return Rotary(self.cos.index_select(0, positions), self.sin.index_select(0, positions), self.interleaved)


@dataclass(frozen=True)
class Embedding:
    """Token ids and positions to hidden states: scale * tokens(ids) + positions[at + offset]."""

    tokens: nn.Module
    scale: float = 1.0
    positions: torch.Tensor | None = None
    offset: int = 0

    def __call__(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, H]."""
        out = self.tokens(ids)
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.positions is None else out + F.embedding(at + self.offset, self.positions)


@dataclass(frozen=True)
class Head:
    """softcap * tanh(scale * linear(x) / softcap), in float32 unless that is linear(x) alone."""

    linear: Linear
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[L, H] -> [L, V]."""
        logits = self.linear(hidden)
        if self.scale == 1.0 and self.softcap is None:
            return logits
        logits = logits.float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Decoder:
    """A lowered model; the same interface as `HFModel`."""

    execution = "lowered"

    def __init__(
        self,
        backend: Backend,
        layout: AttentionLayout,
        embedding: Embedding,
        rotations: Sequence[Rotation],
        layers: Sequence[Layer],
        final_norm: Norm | None,
        head: Head,
        *,
        config: Any,
        max_len: int,
        dtype: str,
        eos_token_ids: frozenset[int],
        quantization: Quantization = UNQUANTIZED,
    ) -> None:
        self.backend, self.config, self.max_len, self.dtype = backend, config, max_len, dtype
        self.quantization = quantization
        self.device = backend.capabilities().device
        self.eos_token_ids = eos_token_ids
        self.windows = layout.windows
        self.kv_groups: Callable[[int, str], tuple[KVGroup, ...]] = layout.kv_groups
        self.vocab_size = head.linear.out_features
        self.layers = tuple(layers)
        self._note: Callable[[int, torch.Tensor], None] | None = None
        self._ops, self._embedding, self._rotations, self._head = backend.ops(), embedding, tuple(rotations), head
        self._final_norm = final_norm
        self._next_norms = [*(x.attention_norm for x in self.layers[1:]), final_norm]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """Hidden states [T, H] of flat token ids int64 [T] at positions int64 [T]; `plan` is the backend's."""
        step = Step(self._ops, self.backend.attention, plan, [r.at(positions) for r in self._rotations])
        residual = self._embedding(token_ids, positions)
        first = self.layers[0].attention_norm
        x = residual if first is None else self._ops.norm(residual, first)
        for number, (layer, next_norm) in enumerate(zip(self.layers, self._next_norms, strict=True)):
            x, residual = layer(step, x, residual, next_norm)
            if self._note is not None:
                self._note(number, residual)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [L, V] of hidden states [L, H], in the dtype that the head gives."""
        return self._head(hidden)

    @contextmanager
    def observing(self, note: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
        """Inside, `note(layer, output)` is called with the output [T, H] of each decoder layer in every forward pass.

        An output may be overwritten once `note` returns.
        """
        self._note = note
        try:
            yield
        finally:
            self._note = None
