"""A decoder's operations on a CPU: linear layers prepacked by oneDNN where it has kernels, the rest in torch."""

from __future__ import annotations

import torch

from ..base import Backend
from ..exact import in_row_tiles, rows_are_independent, safe_tile_rows
from ..ops import Linear
from ..schemes import SCHEMES, Scheme, parse_scheme
from ..torch_ops import QuantizedTorchLinear, TorchLinear, TorchOps
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
        self.kernels["linear"] = ", ".join(sorted(self._linears_to_expect()))
        self._linears: set[str] = set()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: str | None = None) -> Linear:
        """See `Ops.linear`."""
        linear = self._linear(weight, bias, self._scheme(scheme))
        self._linears.add(_in_words(linear))
        self.kernels["linear"] = ", ".join(sorted(self._linears))
        return linear

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: Scheme | None) -> Linear:
        if scheme is not None:
            return QuantizedTorchLinear(scheme.quantized(weight), bias, scheme)
        if can_pack(weight.dtype):
            packed = PackedLinear(weight, bias, self._exact)
            if packed.rows_are_independent:
                return packed
        return TorchLinear(weight, bias, self._exact)

    @property
    def packed_dtypes(self) -> tuple[str, ...]:
        """Compute dtypes whose linear weights get a layout of their own."""
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        small = {name: torch.ones(1, 32, dtype=dtype) for name, dtype in dtypes.items()}
        return tuple(
            name for name, weight in small.items() if not isinstance(self._linear(weight, None, None), TorchLinear)
        )

    def _linears_to_expect(self) -> set[str]:
        """What a model's layers will be, as far as it can be known without one."""
        schemes = [None, *map(parse_scheme, SCHEMES)]
        small = [
            (torch.ones(1, 32, dtype=dtype), scheme) for dtype in (torch.bfloat16, torch.float32) for scheme in schemes
        ]
        return {_in_words(self._linear(weight, None, scheme)) for weight, scheme in small}


def _in_words(linear: Linear) -> str:
    return f"{linear.scheme}: {linear.kernel}"
