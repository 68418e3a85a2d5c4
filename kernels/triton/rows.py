"""Operations on rows: normalisation with the residual added, and gated activations. Computed in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .formats import rounded, tanh

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")
COLUMNS = 1024  # of one program of an activation


@triton.jit
def normalised(
    x, live, weight, bias, at, size, eps, KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """float32 x [1, width], zero where not `live`, normalised over its `size` elements; `at` places weight and bias."""
    if KIND == "layer":
        x = tl.where(live, x - tl.sum(x, 1)[:, None] / size, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 1)[:, None] / size + eps)
    if HAS_WEIGHT:
        x *= tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + at, mask=live, other=0.0).to(tl.float32)
    return x


@triton.jit
def add_norm_kernel(
    out,
    total,
    x,
    residual,
    norm_weight,
    norm_bias,
    post_weight,
    post_bias,
    x_stride,
    residual_stride,
    size,
    scale,
    norm_eps,
    post_eps,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    HAS_NORM_WEIGHT: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr,
    POST: tl.constexpr,
    HAS_POST_WEIGHT: tl.constexpr,
    HAS_POST_BIAS: tl.constexpr,
):
    """One row: total = residual + scale * post(x), out = norm(total). NORM and POST are "none", "rms" or "layer"."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)[None, :]
    live = at < size
    value = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    if POST != "none":
        value = normalised(
            value, live, post_weight, post_bias, at, size, post_eps, POST, HAS_POST_WEIGHT, HAS_POST_BIAS
        )
    if HAS_RESIDUAL:
        value = tl.load(residual + row * residual_stride + at, mask=live, other=0.0).to(tl.float32) + scale * value
        kept = rounded(value, total.dtype.element_ty)  # what the next layer will see of it is what is normalised here
        tl.store(total + row * size + at, kept, mask=live)
        value = kept.to(tl.float32)
    if NORM != "none":
        value = normalised(
            value, live, norm_weight, norm_bias, at, size, norm_eps, NORM, HAS_NORM_WEIGHT, HAS_NORM_BIAS
        )
        tl.store(out + row * size + at, rounded(value, out.dtype.element_ty), mask=live)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """An activation of float32 x; NAME is one of `ACTIVATIONS`."""
    if NAME == "silu":
        return x / (1.0 + tl.exp(-x))
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif NAME == "relu":
        return tl.maximum(x, 0.0)
    elif NAME == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        return x


@triton.jit
def activation_kernel(out, x, x_stride, size, NAME: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of one row: activation(x), times the second half of the row if GATED."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = column < size
    value = activate(tl.load(x + row * x_stride + column, mask=live, other=0.0).to(tl.float32), NAME)
    if GATED:
        value *= tl.load(x + row * x_stride + size + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, rounded(value, out.dtype.element_ty), mask=live)


Parameters = tuple[str, "torch.Tensor | None", "torch.Tensor | None", float]  # kind, weight [n], bias [n], eps


def _warps(width: int) -> int:
    """Warps for a row of `width` elements: sixteen elements a thread or fewer."""
    return max(1, min(16, width // 512))


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Parameters | None,
    post: Parameters | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(total), total) of rows [rows, n]: total = residual + scale * post(x), in x's dtype.

    Args:
        residual: None: total is x as it is, and `post` and `scale` are not applied.
        norm, post: (kind, weight, bias, eps) as in `kernels.reference.norm`; None leaves out. Without `norm` the total
            is returned twice.
    """
    rows, size = x.shape
    norm_kind, norm_weight, norm_bias, norm_eps = norm or ("none", None, None, 0.0)
    post_kind, post_weight, post_bias, post_eps = (post if residual is not None else None) or ("none", None, None, 0.0)
    total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    out = total if norm is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows == 0 or (residual is None and norm is None):
        return out, total
    width = triton.next_power_of_2(size)
    add_norm_kernel[(rows,)](
        out,
        total,
        x,
        x if residual is None else residual,
        *(x if t is None else t for t in (norm_weight, norm_bias, post_weight, post_bias)),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        size,
        scale,
        norm_eps,
        post_eps,
        WIDTH=width,
        HAS_RESIDUAL=residual is not None,
        NORM=norm_kind,
        HAS_NORM_WEIGHT=norm_weight is not None,
        HAS_NORM_BIAS=norm_bias is not None,
        POST=post_kind,
        HAS_POST_WEIGHT=post_weight is not None,
        HAS_POST_BIAS=post_bias is not None,
        num_warps=_warps(width),
    )
    return out, total


def activation(x: torch.Tensor, name: str, gated: bool = False) -> torch.Tensor:
    """See `kernels.reference.activation`: x [rows, I], or [rows, 2 I] with gates first if `gated`; returns [rows, I].

    Raises:
        ValueError: an unknown name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: '{name}' is unknown; expected one of {', '.join(ACTIVATIONS)}")
    rows, size = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = x.new_empty(rows, size)
    if rows and size:
        grid = (rows, triton.cdiv(size, COLUMNS))
        activation_kernel[grid](out, x, x.stride(0), size, NAME=name, GATED=gated, COLUMNS=COLUMNS)
    return out
