"""Linear layers by the compiled kernels: bf16, 8-bit and 4-bit weights, packed for the instruction set that runs.

A row is multiplied in a fixed order of k by one thread, whatever rows are beside it: exact mode needs nothing more.
"""

from __future__ import annotations

import torch

from pagefleet.kernels.cpu import NativeKernels
from pagefleet.kernels.cpu.native import TYPES
from pagefleet.kernels.reference import QuantizedWeight

from ..schemes import Scheme

_SCHEMES = {"w16": 0, "w8a8": 1, "w8a16": 2, "w4a16": 3}  # as csrc/linear.h numbers them
_LONGEST_INT8_ROW = 2**31 // (255 * 127)  # sums of products are int32
_WHOLE_CACHE_LINES = 64


def can_multiply(weight: torch.Tensor, scheme: Scheme | None) -> bool:
    """Whether the kernels have this layer; torch and oneDNN have the others."""
    if weight.dtype not in (torch.bfloat16, torch.float32, torch.float16) or 0 in weight.shape:
        return False
    if scheme is None:
        return weight.dtype == torch.bfloat16
    return scheme.activation_bits != 8 or weight.shape[1] <= _LONGEST_INT8_ROW


class NativeLinear:
    """A linear layer in the kernels' own layout.

    Args:
        weight: bf16 [out, in], or its quantised form.
        bias: [out] or None.
        dtype: that of activations, which decides what 16-bit schemes multiply in.
        scheme: how the weight is kept; None for bf16.
    """

    def __init__(
        self,
        native: NativeKernels,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        scheme: Scheme | None,
    ) -> None:
        values, scales, offsets, group = weight, None, None, None
        if isinstance(weight, QuantizedWeight):
            values, scales, offsets, group = weight.values, weight.scales, weight.offsets, weight.group
        assert isinstance(values, torch.Tensor)
        kept = [None if x is None else x.contiguous() for x in (values, scales, offsets, bias)]
        if bias is not None:
            kept[3] = bias.float().contiguous()
        self.out_features, self.in_features = values.shape
        self.scheme = "bfloat16" if scheme is None else str(scheme)
        number = _SCHEMES["w16" if scheme is None else scheme.name]
        shape = (number, dtype == torch.bfloat16, self.out_features, self.in_features, group or 0)
        self.weight_bytes = native.linear_bytes(*shape, bias is not None)
        self._room = torch.empty(self.weight_bytes + _WHOLE_CACHE_LINES, dtype=torch.uint8)
        self._layer = -(-self._room.data_ptr() // _WHOLE_CACHE_LINES) * _WHOLE_CACHE_LINES
        native.linear_pack(*shape, *(0 if x is None else x.data_ptr() for x in kept), self._layer)
        self.kernel = native.linear_kernel(self._layer)
        self._product = native.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]. Raises ValueError for another width, KeyError for a dtype without kernels."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"linear layer: rows have {x.shape[-1]} elements, expected {self.in_features}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        self._product(self._layer, TYPES[x.dtype], x.data_ptr(), x.numel() // self.in_features, out.data_ptr())
        return out
