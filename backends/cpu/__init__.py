"""CPUs, as they are found: attention in torch, products prepacked by oneDNN where that is faster."""

from __future__ import annotations

from ..base import Availability, Backend, BackendOptions


def probe() -> Availability:
    """Available wherever torch runs; says which instruction set and how many threads."""
    from .. import host

    return Availability(True, f"{host.isa()}, {host.usable_threads()} threads", score=10)


def create(options: BackendOptions) -> Backend:
    """Make it. Raises BackendError for an impossible thread count."""
    from .backend import CpuBackend

    return CpuBackend(options)
