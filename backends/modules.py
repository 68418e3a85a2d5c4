"""Linear layers of a model that runs as it is, replaced by a backend's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .exact import ProductLinear, linear_weights, make_exact, replace_modules
from .ops import Ops
from .torch_ops import TorchLinear

SchemeOf = Callable[[nn.Module], "str | None"]  # of a module; None keeps its weight's dtype


def replace_linears(model: nn.Module, ops: Ops, exact: bool, scheme_of: SchemeOf | None = None) -> int:
    """Replace the plain linear layers of `model`, in place, by `ops.linear`; returns how many.

    A layer that plain torch would compute anyway stays, unless `exact`. The original weight is released as soon as no
    other module holds it (a tied embedding keeps it).
    """
    replaced = 0

    def replacement(module: nn.Module) -> nn.Module | None:
        nonlocal replaced
        weights = linear_weights(module)
        if weights is None:
            return None
        weight, bias = weights
        linear = ops.linear(weight, bias, None if scheme_of is None else scheme_of(module))
        if isinstance(linear, TorchLinear):
            return ProductLinear(linear, weight, bias, None) if exact else None
        replaced += 1
        return ProductLinear(linear, torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape), bias, None)

    if exact:
        make_exact(model, replacement)
    else:
        replace_modules(model, replacement)
    return replaced
