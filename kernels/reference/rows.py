"""Operations on rows: normalisation and rotation. Computed in float32, in float64 for float64 input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def norm(
    x: torch.Tensor, kind: str, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Normalise x [..., n] over its last dimension.

    Args:
        kind: "rms" divides by the root of the mean square, "layer" takes the mean away first.
        weight, bias: [n] or None.

    Raises:
        ValueError: an unknown kind.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    elif kind != "rms":
        raise ValueError(f"norm: kind is '{kind}'; expected 'rms' or 'layer'")
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate pairs of x [T, heads, D] by the angles of cos, sin [T, R / 2]; elements from R on stay.

    Pair i is (2i, 2i + 1) if `interleaved`, else (i, i + R / 2).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    a, b = first * cos - second * sin, second * cos + first * sin
    out = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([out.to(x.dtype), rest], -1)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
}


def activation(x: torch.Tensor, name: str, gated: bool = False) -> torch.Tensor:
    """An activation of x [rows, I]; if `gated`, activation(x[:, :I]) * x[:, I:] of x [rows, 2 I].

    Raises:
        ValueError: an unknown name.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation: '{name}' is unknown; expected one of {', '.join(_ACTIVATIONS)}")
    if not gated:
        return _ACTIVATIONS[name](x)
    gate, up = x.chunk(2, -1)
    return _ACTIVATIONS[name](gate) * up
