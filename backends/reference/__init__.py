"""The oracle: pure torch, on any device, one query at a time."""

from __future__ import annotations

from ..base import Availability, Backend, BackendOptions


def probe() -> Availability:
    """Always available: torch is all it needs."""
    return Availability(True, "pure torch, slow, made to be compared with", score=1)


def create(options: BackendOptions) -> Backend:
    """Make it; `options.extra["device"]` is a torch device string, "cpu" if not given."""
    from .backend import ReferenceBackend

    return ReferenceBackend(options)
