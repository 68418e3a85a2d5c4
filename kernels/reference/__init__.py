"""Each op in plain torch, obvious and slow: the specification that every kernel is tested against."""

from .attention import paged_attention
from .cache import copy_blocks, move_blocks, quantize_int8, write_kv
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
from .selection import draw_token, exponential, largest_token, score_token

__all__ = [
    "QuantizedWeight",
    "activation",
    "copy_blocks",
    "dequantize",
    "draw_token",
    "exponential",
    "largest_token",
    "move_blocks",
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
    "score_token",
    "write_kv",
]
