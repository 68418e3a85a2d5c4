"""Each op in plain torch, obvious and slow: the specification that every kernel is tested against."""

from .attention import paged_attention
from .cache import copy_blocks, quantize_int8, write_kv
from .heads import query_and_store
from .linear import (
    QuantizedWeight,
    quantize_rows,
    quantize_weight_int4,
    quantize_weight_int8,
    quantized_linear,
)
from .quantized import dequantize, quantize
from .rows import activation, norm, rotate
from .selection import draw_token, exponential

__all__ = [
    "QuantizedWeight",
    "activation",
    "copy_blocks",
    "dequantize",
    "draw_token",
    "exponential",
    "norm",
    "paged_attention",
    "quantize",
    "quantize_int8",
    "quantize_rows",
    "quantize_weight_int4",
    "quantize_weight_int8",
    "quantized_linear",
    "query_and_store",
    "rotate",
    "write_kv",
]
