"""Which part of a decoder layer a traced module call is: read from what it computed, never from its class's name.

Each function takes calls of a `trace` and returns a piece of the specification in `decoder.py`, or raises
`NotUnderstood` with the name of the part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagefleet.backends.exact import linear_weights
from pagefleet.backends.ops import ACTIVATIONS, Heads, Norm, Rotary
from pagefleet.backends.torch_ops import TorchOps

from .trace import Attended, Call

# Largest difference, as a part of the largest value, that is rounding of one layer's work.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class NotUnderstood(Exception):
    """A part of a model does not fit the specification; the message names it."""


class Kept:
    """Stands for a backend's cache: keeps what is written. Attention is each query's own value."""

    def __init__(self) -> None:
        self.key = self.value = torch.empty(0)

    def write_kv(self, plan: Any, group: int, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See `Backend.write_kv`."""
        self.key, self.value = key, value

    def attention(self, plan: Any, group: int, layer: int, query: torch.Tensor, args: Any) -> torch.Tensor:
        """See `Backend.attention`."""
        return self.value.repeat_interleave(query.shape[1] // self.value.shape[1], 1)


def plain_ops() -> tuple[TorchOps, Kept]:
    """The specification's operations in plain torch, and what they write."""
    kept = Kept()
    return TorchOps(kept), kept  # type: ignore[arg-type]  # no more of a backend is asked for


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same elements in the same order, whatever their shapes."""
    return one.numel() == other.numel() and torch.equal(one.reshape(-1), other.reshape(-1))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference as a part of the largest value of `other`; infinite for other shapes."""
    if one.shape != other.shape:
        return float("inf")
    error = (one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-12)
    return float(error) if bool(error.isfinite()) else float("inf")


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `one` is `other` but for rounding."""
    return distance(one, other) <= TOLERANCE[other.dtype]


class Source:
    """A linear layer still made of the model's own weights; the results of all its parts lie side by side.

    Args:
        parts: (weight [out, in], bias [out] or None) each.
        owners: the parameters that hold them.
        order: int64 [out], which output each one is; None for the parts' own order.
    """

    scheme = "not packed"
    kernel = "torch"

    def __init__(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        owners: Sequence[nn.Parameter],
        order: torch.Tensor | None = None,
    ) -> None:
        self.parts, self.owners, self.order = parts, owners, order
        self.in_features = parts[0][0].shape[1]
        self.out_features = sum(weight.shape[0] for weight, _ in parts)
        self.weight_bytes = sum(weight.numel() * weight.element_size() for weight, _ in parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        out = torch.cat([nn.functional.linear(x, weight, bias) for weight, bias in self.parts], -1)
        return out if self.order is None else out[:, self.order]

    def merged(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [out, in] and bias [out]; a part without a bias has zeros where others have one."""
        weights, biases = zip(*self.parts, strict=True)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in self.parts])
        if self.order is not None:
            weight, bias = weight[self.order], None if bias is None else bias[self.order]
        return weight, bias


def is_linear(call: Call) -> bool:
    """Whether a plain linear layer was called."""
    return linear_weights(call.module) is not None


def linear(*calls: Call, order: torch.Tensor | None = None) -> Source:
    """Plain linear layers as one."""
    parts = []
    for call in calls:
        weights = linear_weights(call.module)
        if weights is None:
            raise NotUnderstood(f"{call.name} ({type(call.module).__name__}) is no plain linear layer")
        parts.append(weights)
    owners = [p for call in calls for p in call.module.parameters(recurse=False)]
    return Source(parts, owners, order)


def is_norm(call: Call) -> bool:
    """Whether a call may be a normalisation: it keeps the shape and has no matrix."""
    out = call.output
    if not isinstance(out, torch.Tensor) or is_activation(call) or out.shape != call.input.shape:
        return False
    return all(p.dim() == 1 for p in call.module.parameters())


def norm(call: Call) -> Norm:
    """The normalisation that a module does over the last dimension of its input."""
    module, x = call.module, call.input
    eps = next((float(e) for n in ("eps", "variance_epsilon") if (e := getattr(module, n, None)) is not None), 1e-5)
    weight, bias = (None if p is None else p.detach().float() for p in map(module._parameters.get, ("weight", "bias")))
    weights = [weight] if weight is None else [weight, 1 + weight]
    candidates = [Norm(kind, w, bias, eps) for kind in ("rms", "layer") for w in weights]
    ops, _ = plain_ops()
    errors = [distance(ops.norm(x, candidate), call.output) for candidate in candidates]
    best = min(range(len(candidates)), key=errors.__getitem__)
    if errors[best] > TOLERANCE[x.dtype]:
        raise NotUnderstood(f"{call.name} ({type(module).__name__}) is neither an RMS nor a layer norm")
    return candidates[best]


def is_activation(call: Call) -> bool:
    """Whether a call is a function of single elements: it has no weights, and keeps zero and shape."""
    module = call.module
    if any(True for _ in module.parameters()) or not isinstance(call.output, torch.Tensor):
        return False
    home = type(module).__module__
    return home.endswith("transformers.activations") or home.startswith("torch.nn.modules.activation")


def activation(module: nn.Module) -> str:
    """The name in `ACTIVATIONS` of an elementwise module."""
    x = torch.linspace(-6, 6, 257)
    ops, _ = plain_ops()
    for name in ACTIVATIONS:
        if distance(ops.activation(x, name), module(x)) < 1e-6:
            return name
    raise NotUnderstood(f"{type(module).__name__} is none of the activations {', '.join(ACTIVATIONS)}")


@dataclass(frozen=True)
class RotaryForm:
    """One way to read a rotary module's cos and sin [T, N]: which columns are the pairs' angles."""

    call: Call
    columns: slice
    interleaved: bool

    def rotary(self) -> Rotary:
        """Angles of the traced tokens."""
        cos, sin = (x[0].float()[:, self.columns].contiguous() for x in self.call.output)
        return Rotary(cos, sin, self.interleaved)


def rotary_forms(outside: Iterable[Call], head_dim: int) -> Iterator[RotaryForm]:
    """Every reading of every rotary module that was called."""
    for call in outside:
        out = call.output
        if not (isinstance(out, tuple) and len(out) == 2 and all(isinstance(x, torch.Tensor) for x in out)):
            continue
        if out[0].dim() != 3 or out[0].shape != out[1].shape:
            continue
        width = out[0].shape[-1]
        if width <= head_dim:
            yield RotaryForm(call, slice(0, width // 2), False)
            yield RotaryForm(call, slice(0, width, 2), True)
            yield RotaryForm(call, slice(0, width // 2), True)
        if 2 * width <= head_dim:
            yield RotaryForm(call, slice(0, width), False)
            yield RotaryForm(call, slice(0, width), True)


@dataclass(frozen=True)
class Projection:
    """How queries, keys and values come out of a layer's input, and the factor that queries have had already."""

    qkv: Source
    heads: Heads
    rotary: RotaryForm | None
    query_scale: float
    input: torch.Tensor


def projection(before: Sequence[Call], attended: Attended, outside: Sequence[Call]) -> tuple[Projection, list[Call]]:
    """Recognise what leads to an attention call; returns it with the calls that it explains.

    before: what was called in the layer until then, in order.
    """
    linears = [c for c in before if is_linear(c)]
    if not linears or any(not same(c.input, linears[0].input) for c in linears):
        raise NotUnderstood("queries, keys and values do not come from one input by linear layers")
    between = [c for c in before[before.index(linears[0]) :] if not is_linear(c)]
    norms = [c for c in between if is_norm(c)]
    for call in between:
        if call not in norms:
            raise NotUnderstood(f"{call.name} ({type(call.module).__name__}) between projection and attention")
    x = linears[0].input.reshape(-1, linears[0].input.shape[-1])
    head_dim = attended.query.shape[-1]
    errors = []
    for qkv in _qkv_candidates(linears, attended):
        heads = _heads(qkv, x, norms, attended)
        merged = qkv(x)
        for form in (*rotary_forms(outside, head_dim), None):
            ops, kept = plain_ops()
            query = ops.query_and_store(None, 0, 0, merged, heads, None if form is None else form.rotary())
            for scale in {1.0, head_dim**-0.5}:
                error = max(
                    distance(query * scale, attended.query),
                    distance(kept.key, attended.key),
                    distance(kept.value, attended.value),
                )
                if error <= TOLERANCE[x.dtype]:
                    return Projection(qkv, heads, form, scale, x), [*linears, *norms]
                errors.append(error)
    how = f"; the nearest reading is off by {min(errors):.2g} of the largest value" if errors else ""
    raise NotUnderstood(f"queries and keys do not follow from {', '.join(c.name for c in linears)}{how}")


def _qkv_candidates(linears: list[Call], attended: Attended) -> Iterator[Source]:
    """Merged projections whose last part gives the values that were attended to."""
    heads, kv_heads, size = attended.query.shape[1], attended.key.shape[1], attended.query.shape[2]
    if len(linears) == 1:
        rows = torch.arange(linears[0].output.shape[-1], device=attended.query.device)
        yield linear(linears[0])
        if attended.value.shape[2] == size and len(rows) == (heads + 2 * kv_heads) * size:
            grouped = rows.view(kv_heads, -1, size)  # each KV head's queries, its key, its value
            order = torch.cat([grouped[:, :-2].flatten(), grouped[:, -2].flatten(), grouped[:, -1].flatten()])
            yield linear(linears[0], order=order)
    elif len(linears) == 3:
        for query, key, value in itertools.permutations(linears):
            widths = [c.output.shape[-1] for c in (query, key)]
            if same(value.output, attended.value) and widths == [heads * size, kv_heads * size]:
                yield linear(query, key, value)


def _heads(qkv: Source, x: torch.Tensor, norms: list[Call], attended: Attended) -> Heads:
    heads, size = attended.query.shape[1:]
    kv_heads, value_size = attended.value.shape[1:]
    query, key, value = qkv(x).split([heads * size, kv_heads * size, kv_heads * value_size], -1)
    found: dict[str, Norm] = {}
    modes = set()
    for call in norms:
        given = [call.input.reshape(len(x), -1)]
        if call.input.dim() == 4 and call.input.shape[2] == len(x):  # [1, heads, T, size]
            given.append(call.input[0].transpose(0, 1).flatten(1))
        owner, after = None, False
        for name, projected in (("query", query), ("key", key), ("value", value)):
            if any(g.shape == projected.shape and alike(g, projected) for g in given):
                owner = name
        if owner is None:  # not what was projected: perhaps what was rotated
            made = [call.output.reshape(len(x), -1)]
            if call.output.dim() == 4:
                made.append(call.output[0].transpose(0, 1).flatten(1))
            for name, result in (("query", attended.query), ("key", attended.key)):
                if any(m.numel() == result.numel() and alike(m, result.flatten(1)) for m in made):
                    owner, after = name, True
        if owner is None or owner in found:
            raise NotUnderstood(f"{call.name} ({type(call.module).__name__}) between projection and attention")
        found[owner] = norm(call)
        modes.add((call.input.shape[-1] != (value_size if owner == "value" else size), after))
    if len(modes) > 1:
        raise NotUnderstood("queries and keys are normalised in different ways")
    all_heads, after = modes.pop() if modes else (False, False)
    return Heads(
        heads, kv_heads, size, value_size, found.get("query"), found.get("key"), found.get("value"), all_heads, after
    )
