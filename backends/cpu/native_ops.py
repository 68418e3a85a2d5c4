"""A decoder's operations by the compiled kernels.

A call costs more than its arithmetic when a step has few rows, so arguments are numbers that are at hand: addresses,
sizes, and what a norm carries ready-made. A dtype or a layout that the kernels do not have goes to plain torch.
"""

from __future__ import annotations

from typing import Any

import torch

from pagefleet.kernels.cpu import FLOAT_TYPES, NativeKernels

from ..base import Backend
from ..ops import ACTIVATIONS, NO_NORM, Heads, Linear, Norm, Rotary
from ..schemes import Scheme
from . import host
from .native_linear import NativeLinear, can_multiply
from .native_selection import NativeSelection
from .ops import CpuOps

_NO_ROTARY = (0, 0, 0, 0, False)
_ACTIVATIONS = {name: number for number, name in enumerate(ACTIVATIONS)}


class NativeOps(CpuOps):
    """`Ops` with compiled kernels.

    Exact as they are: a row is computed in a fixed order, by one thread, and sees no other row.
    """

    def __init__(self, backend: Backend, native: NativeKernels, exact: bool = False) -> None:
        self._native = native
        super().__init__(backend, exact)
        self._selection = NativeSelection(native)
        name = "C++ avx2" if host.isa() == "avx2" else "C++ avx512"  # higher levels add nothing to these
        self.kernels |= dict.fromkeys(("norm", "activation", "query_and_store", "sampling"), name)
        self._native_store = native.query_and_store
        self._native_norm, self._native_add_norm = native.norm, native.add_norm
        self._native_activation, self._native_gated = native.activation, native.gated_activation

    def selection(self) -> NativeSelection:
        """See `Ops.selection`."""
        return self._selection

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: Scheme | None) -> Linear:
        if not can_multiply(weight, scheme):
            return super()._linear(weight, bias, scheme)
        values = weight if scheme is None else scheme.quantized(weight)
        return NativeLinear(self._native, values, bias, weight.dtype, scheme)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `Ops.norm`."""
        number, (stride, step) = FLOAT_TYPES.get(x.dtype), x.stride()
        if number is None or step != 1:
            return super().norm(x, norm)
        out, (rows, n) = torch.empty_like(x), x.shape
        self._native_norm(number, rows, n, x.data_ptr(), stride, out.data_ptr(), out.stride(0), *norm.arguments)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, post: Norm | None = None, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.add_norm`. The sum is `residual` itself."""
        number, (stride, step), (residual_stride, residual_step) = (
            FLOAT_TYPES.get(x.dtype),
            x.stride(),
            residual.stride(),
        )
        if number is None or step != 1 or residual_step != 1 or residual.dtype != x.dtype:
            return super().add_norm(x, residual, norm, post, scale)
        rows, n = x.shape
        out = residual if norm is None else torch.empty_like(x)
        self._native_add_norm(
            number, rows, n, x.data_ptr(), stride, residual.data_ptr(), residual_stride, out.data_ptr(), out.stride(0),
            *(NO_NORM if norm is None else norm.arguments), *(NO_NORM if post is None else post.arguments), scale,
        )  # fmt: skip
        return out, residual

    def query_and_store(
        self, plan: Any, group: int, layer: int, qkv: torch.Tensor, heads: Heads, rotary: Rotary | None
    ) -> torch.Tensor:
        """See `Ops.query_and_store`."""
        number, (stride, step), (tokens, width) = FLOAT_TYPES.get(qkv.dtype), qkv.stride(), qkv.shape
        if number is None or step != 1:
            return super().query_and_store(plan, group, layer, qkv, heads, rotary)
        query, slots = qkv.new_empty(tokens, heads.num_heads, heads.head_dim), plan.slots[group]
        self._native_store(
            plan.pools[group].addresses[layer], number, qkv.data_ptr(), stride, tokens, width,
            slots.data_ptr(), slots.shape[0], query.data_ptr(),
            *(_NO_ROTARY if rotary is None else rotary.arguments), *heads.arguments,
        )  # fmt: skip
        return query

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """See `Ops.activation`."""
        number, (stride, step) = FLOAT_TYPES.get(x.dtype), x.stride()
        if number is None or step != 1:
            return super().activation(x, name)
        out, (rows, n) = torch.empty_like(x), x.shape
        self._native_activation(
            number, rows, n, x.data_ptr(), stride, out.data_ptr(), out.stride(0), _ACTIVATIONS[name]
        )
        return out

    def gated_activation(self, gate_up: torch.Tensor, name: str) -> torch.Tensor:
        """See `Ops.gated_activation`."""
        number, (stride, step), (rows, both) = FLOAT_TYPES.get(gate_up.dtype), gate_up.stride(), gate_up.shape
        if number is None or step != 1:
            return super().gated_activation(gate_up, name)
        n = both // 2
        out = gate_up.new_empty(rows, n)
        self._native_gated(number, rows, n, gate_up.data_ptr(), stride, out.data_ptr(), n, _ACTIVATIONS[name])
        return out
