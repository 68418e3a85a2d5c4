"""Each op in plain torch, obvious and slow: the specification that every kernel is tested against."""

from .attention import paged_attention
from .cache import copy_blocks, quantize_int8, write_kv
from .rows import norm, rotate
from .selection import draw_token, exponential

__all__ = [
    "copy_blocks",
    "draw_token",
    "exponential",
    "norm",
    "paged_attention",
    "quantize_int8",
    "rotate",
    "write_kv",
]
