"""The operations of `backends/ops.py` in plain torch: what every backend starts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from pagefleet.kernels import reference
from pagefleet.kernels.reference import QuantizedWeight

from .base import Backend, BackendError
from .exact import in_row_tiles, in_vector_pieces, plain_product, safe_tile_rows
from .ops import Heads, Linear, Norm, Rotary
from .schemes import Scheme, parse_scheme
from .selection import Selection
from .torch_selection import TorchSelection

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
}


class TorchLinear:
    """`torch.nn.functional.linear`, in row tiles where rows must not see each other."""

    kernel = "torch"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, exact: bool) -> None:
        self.out_features, self.in_features = weight.shape
        self.scheme = str(weight.dtype).removeprefix("torch.")
        self.weight_bytes = weight.numel() * weight.element_size()
        self._product = plain_product(weight, bias)
        self._tile = safe_tile_rows(self._product, weight.shape[1], weight.dtype, weight.device) if exact else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        return self._product(x) if self._tile is None else in_row_tiles(self._product, x, self._tile)


class QuantizedTorchLinear:
    """The specification of a quantised linear layer, in float64: slow, and the same for every row wherever it runs."""

    kernel = "torch, float64"

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, scheme: Scheme) -> None:
        self.out_features, self.in_features = weight.values.shape
        self.scheme = str(scheme)
        self._weight, self._bias, self._of_rows = weight, bias, scheme.activation_bits == 8
        kept = (weight.values, weight.scales, weight.offsets)
        self.weight_bytes = sum(x.numel() * x.element_size() for x in kept if x is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        return reference.quantized_linear(rows, self._weight, self._bias, self._of_rows).view(*x.shape[:-1], -1)


class TorchOps:
    """`Ops` on any device that torch knows. `exact` keeps every row's bits whatever is computed beside it."""

    def __init__(self, backend: Backend, exact: bool = False) -> None:
        self._backend, self._exact = backend, exact

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: str | None = None) -> Linear:
        """See `Ops.linear`."""
        known = self._scheme(scheme)
        if known is None:
            return TorchLinear(weight, bias, self._exact)
        return QuantizedTorchLinear(known.quantized(weight), bias, known)

    def _scheme(self, text: str | None) -> Scheme | None:
        """Raises BackendError for a scheme that the backend does not have."""
        if text is None:
            return None
        scheme, capabilities = parse_scheme(text), self._backend.capabilities()
        if scheme.name not in capabilities.schemes:
            have = ", ".join((*capabilities.compute_dtypes, *capabilities.schemes))
            raise BackendError(
                f"backend '{capabilities.name}' has no {text} linear layers; choose a precision of {have}"
            )
        return scheme

    def selection(self) -> Selection:
        """See `Ops.selection`."""
        return TorchSelection()

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `Ops.norm`."""
        return reference.norm(x, norm.kind, norm.weight, norm.bias, norm.eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, post: Norm | None = None, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.add_norm`."""
        if post is not None:
            x = self.norm(x, post)
        total = residual + (x if scale == 1.0 else x * scale)
        return (total if norm is None else self.norm(total, norm)), total

    def query_and_store(
        self, plan: Any, group: int, layer: int, qkv: torch.Tensor, heads: Heads, rotary: Rotary | None
    ) -> torch.Tensor:
        """See `Ops.query_and_store`."""
        tokens, query_width, key_width = (
            qkv.shape[0],
            heads.num_heads * heads.head_dim,
            heads.num_kv_heads * heads.head_dim,
        )
        query, key, value = qkv.split([query_width, key_width, heads.num_kv_heads * heads.value_head_dim], -1)
        if heads.value_norm is not None:
            value = self.norm(value.reshape(-1, heads.value_head_dim), heads.value_norm)
        query = self._prepared(query, heads.query_norm, heads, rotary)
        key = self._prepared(key, heads.key_norm, heads, rotary)
        value = value.reshape(tokens, heads.num_kv_heads, heads.value_head_dim)
        self._backend.write_kv(plan, group, layer, key, value)
        return query

    def _prepared(self, x: torch.Tensor, norm: Norm | None, heads: Heads, rotary: Rotary | None) -> torch.Tensor:
        def normed(x: torch.Tensor) -> torch.Tensor:
            if norm is None:
                return x
            width = x.shape[1] * heads.head_dim if heads.norm_all_heads else heads.head_dim
            return self.norm(x.reshape(-1, width), norm).view(x.shape)

        x = x.reshape(x.shape[0], -1, heads.head_dim)
        if not heads.norm_after_rotary:
            x = normed(x)
        if rotary is not None:
            x = reference.rotate(x, rotary.cos, rotary.sin, rotary.interleaved)
        return normed(x) if heads.norm_after_rotary else x

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """See `Ops.activation`."""
        function = _ACTIVATIONS[name]
        return in_vector_pieces(function, x) if self._exact else function(x)

    def gated_activation(self, gate_up: torch.Tensor, name: str) -> torch.Tensor:
        """See `Ops.gated_activation`."""
        gate, up = gate_up.chunk(2, -1)
        return self.activation(gate, name) * up
