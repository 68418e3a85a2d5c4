"""Linear layers with weights prepacked by oneDNN, where that is what the processor has kernels for."""

from __future__ import annotations

import torch

from ..exact import Product

_PACK_FOR_ROWS = 64  # the packed layout serves every number of rows; packed for one row it would be slow at many


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for prepacked weights of this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of weight [out, in] in oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)


def packed_product(packed: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """A product with a weight from `pack_weight`."""
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
