"""8-bit keys and values: codes and float32 scales, one scale for each token, head and group of channels.

The scale is the group's largest magnitude over the largest that the kind holds, as in KIVI (Liu et al., 2024) but
symmetric: no zero point, so that attention can multiply codes first and scale after.
"""

from __future__ import annotations

import torch

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
CODES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def quantize(x: torch.Tensor, kind: str, group_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of x [..., D].

    Args:
        kind: "int8", "fp8_e4m3" or "fp8_e5m2".
        group_size: channels that share a scale; the last group may be short. None: all D.

    Returns:
        Codes [..., D] (`CODES[kind]`; 8-bit floats rounded to nearest even) and float32 scales [..., groups]. A group
        of zeros has scale 0.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in LARGEST:
        raise ValueError(f"quantize: kind is '{kind}'; expected one of {', '.join(LARGEST)}")
    size = x.shape[-1]
    group_size = min(group_size or size, size)
    wide = x.float()
    grouped = torch.nn.functional.pad(wide, (0, -size % group_size)).unflatten(-1, (-1, group_size))
    scales = grouped.abs().amax(-1) / LARGEST[kind]
    inverse = torch.where(scales > 0, 1 / scales, 0)
    scaled = (wide * inverse.repeat_interleave(group_size, -1)[..., :size]).clamp(-LARGEST[kind], LARGEST[kind])
    codes = torch.round(scaled) if kind == "int8" else scaled
    return codes.to(CODES[kind]), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, group_size: int | None = None) -> torch.Tensor:
    """float64 values of codes [..., D] with scales [..., groups]: what attention reads."""
    size = codes.shape[-1]
    group_size = min(group_size or size, size)
    return codes.double() * scales.double().repeat_interleave(group_size, -1)[..., :size]
