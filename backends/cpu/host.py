"""The host as the CPU backend sees it; the code is in `backends.host`, which needs no backend."""

from ..host import (
    ISA_ENV,
    available_memory_bytes,
    cpu_flags,
    has_fast_bf16,
    isa,
    memory_limit_bytes,
    return_unused_memory,
    usable_threads,
)

__all__ = [
    "ISA_ENV",
    "available_memory_bytes",
    "cpu_flags",
    "has_fast_bf16",
    "isa",
    "memory_limit_bytes",
    "return_unused_memory",
    "usable_threads",
]
