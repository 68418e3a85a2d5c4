"""Each op in plain torch, obvious and slow: the specification that every kernel is tested against."""

from .attention import paged_attention
from .cache import copy_blocks, write_kv
from .rows import norm, rotate

__all__ = ["copy_blocks", "norm", "paged_attention", "rotate", "write_kv"]
