"""Exact mode for the modules of a model: a row's bits do not depend on the rows beside it.

Two things in torch make them depend on it. A matrix product picks its kernel by the number of rows, so every product
is done in tiles of a fixed number of rows. And an elementwise function runs vectorised except for the last few
elements of a range, where another formula rounds differently (`silu` and `gelu` differ by one unit in the last place),
so activations are applied to pieces without such a tail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

TILE_ROWS = 32
VECTOR = 64  # elements; a multiple of what torch's vectorised loops take at once on any instruction set
PIECE = 32768  # elements; torch never splits an elementwise range this short over threads

Product = Callable[[torch.Tensor], torch.Tensor]  # [rows, in] -> [rows, out]


def rows_are_independent(product: Product, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Try a tile: does a row keep its bits wherever it stands in it and whatever the other rows hold?"""
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(TILE_ROWS, width, generator=generator).to(device, dtype)
    expected = product(tile)
    for shift in (1, 7, TILE_ROWS // 2, TILE_ROWS - 1):
        if not torch.equal(product(tile.roll(shift, 0)).roll(-shift, 0), expected):
            return False
    alone = torch.zeros_like(tile)
    alone[-1] = tile[-1]
    return torch.equal(product(alone)[-1], expected[-1])


def safe_tile_rows(product: Product, width: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows per tile that keep rows independent: `TILE_ROWS`, or 1 where the library's kernel mixes row positions."""
    return TILE_ROWS if rows_are_independent(product, width, dtype, device) else 1


def in_row_tiles(product: Product, x: torch.Tensor, tile_rows: int) -> torch.Tensor:
    """`product` of x [..., in], always called with exactly `tile_rows` rows (zeros pad the last tile)."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if count == 0:
        width = product(rows.new_zeros(tile_rows, x.shape[-1])).shape[-1]
        return rows.new_zeros(*x.shape[:-1], width)
    missing = -count % tile_rows
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, x.shape[-1])])
    out = torch.cat([product(tile) for tile in rows.split(tile_rows)])
    return out[:count].reshape(*x.shape[:-1], out.shape[-1])


def in_vector_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An elementwise `function` of x [..., width], with no element in a scalar tail of torch's loop."""
    width = x.shape[-1] if x.dim() else 1
    rows = x.reshape(-1, width)
    padded = F.pad(rows, (0, -width % VECTOR))
    if padded.numel() == 0:
        return function(x)
    out = torch.cat([function(piece) for piece in padded.reshape(-1).split(PIECE)])
    return out.view(padded.shape)[:, :width].reshape(x.shape)


def plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """`torch.nn.functional.linear` with weight [out, in]."""
    return lambda x: F.linear(x, weight, bias)


class ProductLinear(nn.Module):
    """Stands for a linear layer whose product is done by `product`, perhaps in row tiles.

    `weight` keeps the layer's shape and dtype for code that asks; where the product holds its own packed copy the
    values are NaN, so that arithmetic with it cannot go unnoticed.
    """

    def __init__(
        self, product: Product, weight: torch.Tensor, bias: torch.Tensor | None, tile_rows: int | None
    ) -> None:
        super().__init__()
        self.product, self.tile_rows = product, tile_rows
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        if self.tile_rows is not None:
            return in_row_tiles(self.product, x, self.tile_rows)
        return self.product(x)

    def extra_repr(self) -> str:
        """Shape and tile, as printed by the module."""
        return f"in={self.in_features}, out={self.out_features}, tile_rows={self.tile_rows}"


class _ExactActivation(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return in_vector_pieces(self.inner, x)


class ExactFunctions(TorchFunctionMode):
    """Does the same for functional calls inside modules that own their weights (experts, routers)."""

    _LINEAR = (F.linear,)
    _MATMUL = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
    _BMM = (torch.bmm, torch.Tensor.bmm)
    _ADDMM = (torch.addmm, torch.Tensor.addmm)
    _ELEMENTWISE = (F.silu, F.gelu, F.softplus, torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, F.mish)

    def __init__(self) -> None:
        super().__init__()
        self._tile_rows: dict[tuple[Any, ...], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Reroute products and activations; everything else runs as it is."""
        kwargs = kwargs or {}
        if func in self._LINEAR:
            return self._linear(*args, **kwargs)
        if func in self._MATMUL and args[1].dim() == 2 and args[0].dim() >= 2:
            return self._linear(args[0], args[1].transpose(0, 1))
        if func in self._BMM or (func in self._MATMUL and args[0].dim() == args[1].dim() == 3):
            return torch.stack([self._linear(a, b.transpose(0, 1)) for a, b in zip(args[0], args[1], strict=True)])
        if func in self._ADDMM and not kwargs:
            return self._linear(args[1], args[2].transpose(0, 1)) + args[0]
        if func in self._ELEMENTWISE:
            return in_vector_pieces(lambda x: func(x, *args[1:], **kwargs), args[0])
        return func(*args, **kwargs)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = plain_product(weight, bias)
        key = (tuple(weight.shape), weight.stride(), weight.dtype, input.dtype)
        if key not in self._tile_rows:
            self._tile_rows[key] = safe_tile_rows(product, input.shape[-1], input.dtype, input.device)
        return in_row_tiles(product, input, self._tile_rows[key])


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    known = home.endswith("transformers.activations") or home == "torch.nn.modules.activation"
    leaf = not any(True for _ in module.children()) and not any(True for _ in module.parameters())
    return known and leaf and not isinstance(module, (nn.Softmax, nn.LogSoftmax))


def _owns_matrices(module: nn.Module) -> bool:
    if isinstance(module, (nn.Embedding, ProductLinear)):
        return False
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))


def linear_weights(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """(weight [out, in], bias) of a plain linear layer (also transformers' Conv1D); None for anything else."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return module.weight.detach(), None if module.bias is None else module.bias.detach()
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
        return weight.detach().transpose(0, 1), bias.detach()
    return None


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Swap every module for `replacement(module)` in place; None leaves it. A module used twice is replaced once."""
    places: dict[int, tuple[nn.Module, list[tuple[nn.Module, str]]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(id(child), (child, []))[1].append((parent, name))
    while places:  # emptied as it goes, so that a replaced module frees its weights before the next is packed
        child, uses = places.popitem()[1]
        new = replacement(child)
        if new is not None:
            for parent, name in uses:
                setattr(parent, name, new)


def make_exact(model: nn.Module, exact_linear: Callable[[nn.Module], nn.Module | None]) -> None:
    """Make every product and activation of `model` exact, in place; `exact_linear` replaces plain linear layers."""
    set_experts: Any = getattr(model, "set_experts_implementation", None)
    if set_experts is not None:
        set_experts("eager")  # grouped products pick kernels by rows per expert
    functions = ExactFunctions()

    def replacement(module: nn.Module) -> nn.Module | None:
        if _is_activation(module):
            return _ExactActivation(module)
        return exact_linear(module)

    replace_modules(model, replacement)
    for module in model.modules():
        if _owns_matrices(module):
            _run_under(module, functions)


def _run_under(module: nn.Module, functions: ExactFunctions) -> None:
    forward = module.forward

    def exact_forward(*args: Any, **kwargs: Any) -> Any:
        with functions:
            return forward(*args, **kwargs)

    module.forward = exact_forward  # type: ignore[method-assign]
