"""A decoder's operations on a CPU: linear layers prepacked by oneDNN where it has kernels, the rest in torch."""

from __future__ import annotations

import torch

from ..base import Backend
from ..exact import in_row_tiles, rows_are_independent, safe_tile_rows
from ..ops import Linear
from ..torch_ops import TorchLinear, TorchOps
from .linear import can_pack, pack_weight, packed_product


class PackedLinear:
    """A linear layer whose weight oneDNN laid out; the original is given up."""

    kernel = "oneDNN prepacked"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, exact: bool) -> None:
        self.out_features, self.in_features = weight.shape
        self.scheme = str(weight.dtype).removeprefix("torch.")
        self.weight_bytes = weight.numel() * weight.element_size()
        self._product = packed_product(pack_weight(weight), bias)
        width, dtype, device = weight.shape[1], weight.dtype, weight.device
        self._tile = safe_tile_rows(self._product, width, dtype, device) if exact else None
        self.rows_are_independent = not exact or rows_are_independent(self._product, width, dtype, device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        return self._product(x) if self._tile is None else in_row_tiles(self._product, x, self._tile)


class CpuOps(TorchOps):
    """`Ops` of the CPU backend.

    Attributes:
        kernels: operation -> what computes it, for the doctor and the log.
    """

    def __init__(self, backend: Backend, exact: bool = False) -> None:
        super().__init__(backend, exact)
        self.kernels = dict.fromkeys(("norm", "activation", "query_and_store", "sampling"), "torch")

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: str | None = None) -> Linear:
        """See `Ops.linear`."""
        if scheme is not None or not can_pack(weight.dtype):
            return super().linear(weight, bias, scheme)
        packed = PackedLinear(weight, bias, self._exact)
        return packed if packed.rows_are_independent else TorchLinear(weight, bias, self._exact)
