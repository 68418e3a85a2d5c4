"""A decoder's operations by the Triton kernels; linear layers are the vendor's library, through torch."""

from __future__ import annotations

from typing import Any

import torch

from pagefleet.kernels.triton import heads as head_kernels
from pagefleet.kernels.triton import rows

from ..base import Backend
from ..ops import Heads, Norm, Rotary
from ..torch_ops import TorchOps
from .choice import Choice
from .plan import GpuPlan, quantized_views
from .selection import GpuSelection


def _parameters(norm: Norm | None) -> rows.Parameters | None:
    return None if norm is None else (norm.kind, norm.weight, norm.bias, norm.eps)


class GpuOps(TorchOps):
    """`Ops` of a GPU backend."""

    def __init__(self, backend: Backend, arch: str, exact: bool) -> None:
        super().__init__(backend, exact)

        def choice(operation: str, kernel: Any, plain: Any) -> Choice:
            return Choice(operation, arch, [("Triton", kernel), ("torch", plain)])

        self._norm = choice("norm", self._norm_kernel, super().norm)
        self._add_norm = choice("add_norm", self._add_norm_kernel, super().add_norm)
        self._heads = choice("query_and_store", self._heads_kernel, super().query_and_store)
        self._activation = choice("activation", rows.activation, super().activation)
        self._gated = choice("gated_activation", self._gated_kernel, super().gated_activation)
        self._selection = GpuSelection()

    @property
    def kernels(self) -> dict[str, str]:
        """Operation -> what does it."""
        return {"norm": self._norm.name, "query_and_store": self._heads.name, "activation": self._gated.name}

    def selection(self) -> GpuSelection:
        """See `Ops.selection`."""
        return self._selection

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `Ops.norm`."""
        return self._norm(x, norm)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, post: Norm | None = None, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops.add_norm`."""
        return self._add_norm(x, residual, norm, post, scale)

    def query_and_store(
        self, plan: GpuPlan, group: int, layer: int, qkv: torch.Tensor, heads: Heads, rotary: Rotary | None
    ) -> torch.Tensor:
        """See `Ops.query_and_store`."""
        return self._heads(plan, group, layer, qkv, heads, rotary)

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """See `Ops.activation`."""
        return self._activation(x, name)

    def gated_activation(self, gate_up: torch.Tensor, name: str) -> torch.Tensor:
        """See `Ops.gated_activation`."""
        return self._gated(gate_up, name)

    def _norm_kernel(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rows.add_norm(x, None, _parameters(norm))[0]

    def _add_norm_kernel(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, post: Norm | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.add_norm(x, residual, _parameters(norm), _parameters(post), scale)

    def _gated_kernel(self, gate_up: torch.Tensor, name: str) -> torch.Tensor:
        return rows.activation(gate_up, name, gated=True)

    def _heads_kernel(
        self, plan: GpuPlan, group: int, layer: int, qkv: torch.Tensor, heads: Heads, rotary: Rotary | None
    ) -> torch.Tensor:
        pool = plan.pools[group]
        norms = head_kernels.HeadNorms(
            _parameters(heads.query_norm),
            _parameters(heads.key_norm),
            _parameters(heads.value_norm),
            heads.norm_all_heads,
            heads.norm_after_rotary,
        )
        return head_kernels.query_and_store(
            qkv,
            heads.num_heads,
            pool.keys[layer],
            pool.values[layer],
            plan.batch.groups[group].slots,
            cos=None if rotary is None else rotary.cos,
            sin=None if rotary is None else rotary.sin,
            interleaved=rotary is not None and rotary.interleaved,
            norms=norms,
            quantized=quantized_views(pool, layer),
        )
