"""Each op in plain torch, obvious and slow: the specification that every kernel is tested against."""

from .attention import paged_attention
from .cache import copy_blocks, write_kv

__all__ = ["copy_blocks", "paged_attention", "write_kv"]
