"""Linear layers with weights prepacked by oneDNN, where that is what the processor has kernels for."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..exact import Product, ProductLinear, linear_weights, plain_product, replace_modules, rows_are_independent
from ..exact import safe_tile_rows as _safe_tile_rows

logger = logging.getLogger(__name__)
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


class LinearPacker:
    """Replaces plain linear layers by packed ones.

    The original weight is released as soon as no other module holds it (a tied embedding keeps it).
    """

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.packed, self.plain = 0, 0

    def replace(self, module: nn.Module) -> nn.Module | None:
        """The packed form of a plain linear layer; None where it should stay as it is."""
        weights = linear_weights(module)
        if weights is None:
            return None
        weight, bias = weights
        if can_pack(weight.dtype):
            return self._packed(weight, bias)
        if not self.exact:
            return None
        self.plain += 1
        product = plain_product(weight, bias)
        return ProductLinear(product, weight, bias, self._tile_rows(product, weight))

    def _packed(self, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        self.packed += 1
        product = packed_product(pack_weight(weight), bias)
        shape_only = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)
        if not self.exact:
            return ProductLinear(product, shape_only, bias, None)
        if rows_are_independent(product, weight.shape[1], weight.dtype, weight.device):
            return ProductLinear(product, shape_only, bias, self._tile_rows(product, weight))
        product = plain_product(weight, bias)
        return ProductLinear(product, weight, bias, self._tile_rows(product, weight))

    def _tile_rows(self, product: Product, weight: torch.Tensor) -> int:
        return _safe_tile_rows(product, weight.shape[1], weight.dtype, weight.device)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of weight [out, in] in oneDNN's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)


def packed_product(packed: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """A product with a weight from `pack_weight`."""
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pack_linears(model: nn.Module) -> int:
    """Pack every plain linear layer of `model` in place; returns how many."""
    packer = LinearPacker(exact=False)
    replace_modules(model, packer.replace)
    logger.info("packed %d linear layers for oneDNN", packer.packed)
    return packer.packed
