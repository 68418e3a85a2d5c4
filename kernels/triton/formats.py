"""Number formats inside kernels: 8-bit keys and values, and functions that Triton's language has no name for.

8-bit floats are coded with integer arithmetic, so they are the same bits on every GPU: some have no conversion
instruction for them, and AMD's older matrix cores use another encoding (fnuz).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import interpreted

INT8_LARGEST = tl.constexpr(127.0)
E4M3_LARGEST = tl.constexpr(448.0)
E5M2_LARGEST = tl.constexpr(57344.0)
LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(interpreted())


@dataclass(frozen=True)
class QuantizedViews:
    """The scales of one layer's 8-bit keys and values.

    Attributes:
        kind: "int8" (caches are int8), "fp8_e4m3" or "fp8_e5m2" (caches are uint8).
        key_scales: float32 [num_blocks, block_size, Hkv, groups], groups of `group_size` channels; any strides but 1
            in the last dimension. value_scales: the same for values.
        group_size: channels that share a scale, a power of two; None: all channels of a head.
    """

    kind: str
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    group_size: int | None = None


def padded(size: int) -> int:
    """The power of two from `size` up, at least 16: what a matrix product takes."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def product(a, b):
    """a @ b with float32 sums; float32 operands keep their precision.

    The interpreter's own product cannot take bfloat16, and the library behind it sums a row by where it stands.
    """
    if INTERPRETED:
        return tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 x as DTYPE, to nearest even. (The interpreter cuts bfloat16 off, so the bits are rounded first.)"""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def tanh(x):
    """Hyperbolic tangent in float32; absolute error of a few units in 1e-7."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def round_to_even(x):
    """Nearest integer of float32 |x| < 2^22 as int32, ties to even: the bits below a large number's last place."""
    shifted = (x + 12582912.0).to(tl.int32, bitcast=True)
    return shifted - 0x4B400000


@triton.jit
def largest_of(KIND: tl.constexpr):
    """The largest magnitude that an 8-bit kind holds."""
    if KIND == "int8":
        return INT8_LARGEST
    elif KIND == "fp8_e4m3":
        return E4M3_LARGEST
    else:
        return E5M2_LARGEST


@triton.jit
def _encode_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """uint8 bits of float32 x, |x| within the format: round to nearest even, subnormals kept."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    rounded = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    quantum: tl.constexpr = 2.0 ** (BIAS + MANTISSA - 1)  # subnormals are multiples of its inverse
    subnormal = round_to_even(magnitude.to(tl.float32, bitcast=True) * quantum)
    smallest_normal: tl.constexpr = (127 - BIAS + 1) << 23
    code = tl.where(magnitude < smallest_normal, subnormal, normal)
    return (code | sign).to(tl.uint8)


@triton.jit
def encode(x, KIND: tl.constexpr):
    """float32 x, already divided by its scale, as the 8-bit kind; what does not fit becomes the largest that does."""
    largest: tl.constexpr = largest_of(KIND)
    x = tl.minimum(tl.maximum(x, -largest), largest)
    if KIND == "int8":
        return round_to_even(x).to(tl.int8)
    elif KIND == "fp8_e4m3":
        return _encode_fp8(x, 3, 7)
    else:
        return _encode_fp8(x, 2, 15)


@triton.jit
def decode(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Stored values as DTYPE, without their scales. Exact for 8-bit kinds in any DTYPE of 16 bits or more."""
    if KIND == "fp8_e4m3":
        bits = x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)
    elif KIND == "fp8_e5m2":
        return (x.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    elif KIND == "int8":
        return x.to(tl.float32).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit
def quantize(x, KIND: tl.constexpr, QUANT_GROUP: tl.constexpr):
    """See `kernels.reference.quantize`: float32 x [rows, width] as codes [rows, width] and scales [rows, groups].

    `QUANT_GROUP` channels share a scale, and both it and the width are powers of two.
    """
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    grouped = tl.reshape(x, (rows, width // QUANT_GROUP, QUANT_GROUP))
    scales = tl.div_rn(tl.max(tl.abs(grouped), 2), tl.full((1,), largest_of(KIND), tl.float32)[None, :])
    inverse = tl.where(scales > 0.0, tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales), 0.0)
    codes = encode(grouped * inverse[:, :, None], KIND)
    return tl.reshape(codes, (rows, width)), scales


@triton.jit
def spread(scales, QUANT_GROUP: tl.constexpr):
    """scales [rows, groups] repeated over their channels: [rows, groups * QUANT_GROUP]."""
    rows: tl.constexpr = scales.shape[0]
    groups: tl.constexpr = scales.shape[1]
    wide = tl.broadcast_to(scales[:, :, None], (rows, groups, QUANT_GROUP))
    return tl.reshape(wide, (rows, groups * QUANT_GROUP))
