"""Linear layers with 8-bit and 4-bit weights: how weights and rows are quantised, and what the product is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST_ROW = 1e-30  # largest magnitude of a row below which it counts as zeros: the inverse of its scale overflows


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [out, in] of small integers.

    Attributes:
        values: int8 [out, in] for 8 bits; uint8 [out, in] of 0 to 15 for 4 bits.
        scales: float32 [out], or float16 [out, groups] where `group` is set.
        offsets: float16 [out, groups] of a 4-bit weight, else None.
        group: consecutive columns that share a scale; None where a whole row does. 4-bit weights have groups.
    """

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    group: int | None = None

    @property
    def bits(self) -> int:
        """8 or 4."""
        return 4 if self.values.dtype == torch.uint8 else 8

    def dequantized(self) -> torch.Tensor:
        """values * scales + offsets, float32 [out, in]."""
        if self.group is None:
            return self.values.float() * self.scales[:, None]
        columns = self.values.shape[1]
        scales = self.scales.float().repeat_interleave(self.group, 1)[:, :columns]
        out = self.values.float() * scales
        if self.offsets is not None:
            out += self.offsets.float().repeat_interleave(self.group, 1)[:, :columns]
        return out


def quantize_weight_int8(weight: torch.Tensor, group: int | None = None) -> QuantizedWeight:
    """Symmetric 8 bits of weight [out, in]: the largest magnitude of a row (or of `group` columns) becomes 127."""
    if group is None:
        wide = weight.float()
        scales = wide.abs().amax(1) / 127
        values = (wide / _not_zero(scales)[:, None]).round_().clamp_(-127, 127)
        return QuantizedWeight(values.to(torch.int8), scales)
    grouped = _grouped(weight, group)
    scales = (grouped.abs().amax(-1) / 127).half()
    values = (grouped / _not_zero(scales.float())[..., None]).round_().clamp_(-127, 127)
    return QuantizedWeight(values.flatten(1)[:, : weight.shape[1]].to(torch.int8), scales, None, group)


def quantize_weight_int4(weight: torch.Tensor, group: int) -> QuantizedWeight:
    """Asymmetric 4 bits of weight [out, in]: the least of `group` columns becomes 0, the largest 15."""
    grouped = _grouped(weight, group)
    offsets = grouped.amin(-1).half()
    scales = ((grouped.amax(-1) - offsets.float()) / 15).half()
    values = (grouped - offsets.float()[..., None]) / _not_zero(scales.float())[..., None]
    values = values.round_().clamp_(0, 15).flatten(1)[:, : weight.shape[1]].to(torch.uint8)
    return QuantizedWeight(values, scales, offsets, group)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric 8 bits of every row of x [rows, n]: int8 [rows, n] and float32 scales [rows].

    A row with an element that is not finite has the scale NaN.
    """
    wide = x.float()
    most = wide.abs().amax(1) if x.shape[1] else wide.new_zeros(x.shape[0])
    strange = ~wide.isfinite().all(1)
    most = torch.where(strange, torch.nan, torch.where(most < SMALLEST_ROW, 0.0, most))
    inverse = torch.where(most > 0, torch.full_like(most, 127.0) / most, 0.0)  # `127 / most` would round twice
    values = (wide * inverse[:, None]).nan_to_num(0.0).round().clamp(-127, 127)
    return values.to(torch.int8), most / 127


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, quantize_activations: bool
) -> torch.Tensor:
    """x [rows, in] times the transposed weight, plus bias [out]; in float64, returned in x's dtype.

    Args:
        quantize_activations: rows of x become 8-bit integers first, and products are exact in integers.

    Raises:
        ValueError: 8-bit activations with a 4-bit weight, or with one that has groups.
    """
    if quantize_activations:
        if weight.group is not None:
            raise ValueError("8-bit activations need a weight with one scale a row")
        rows, scales = quantize_rows(x)
        out = rows.double() @ weight.values.double().T * (scales.double()[:, None] * weight.scales.double())
    else:
        out = x.double() @ weight.dequantized().double().T
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype)


def _grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """float32 [out, groups, group]; the last group is filled up with its own last column."""
    wide = weight.float()
    missing = -wide.shape[1] % group
    if missing:
        wide = torch.cat([wide, wide[:, -1:].expand(-1, missing)], 1)
    return wide.view(wide.shape[0], -1, group)


def _not_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, 1.0, x)
