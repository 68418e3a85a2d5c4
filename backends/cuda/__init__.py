"""NVIDIA GPUs (compute capability 8.0 and up), by the Triton kernels that `backends/gpu` shares."""

from __future__ import annotations

from ..base import Availability, Backend, BackendOptions


def probe() -> Availability:
    """The first card that this process may see, or why there is none to use."""
    from ..gpu.device import probe_vendor

    return probe_vendor("cuda")


def create(options: BackendOptions) -> Backend:
    """Make it. Raises BackendError, with what `probe` says, where there is no card to use."""
    from ..gpu.device import first_device

    device = first_device("cuda")
    from ..gpu.backend import GpuBackend  # imports Triton

    return GpuBackend(options, device)
