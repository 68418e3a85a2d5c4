"""One GPU: whether it can be used, and if not, why, in one line."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pagefleet.kernels import triton as kernels

from .. import host
from ..base import Availability, BackendError, MemoryInfo

if TYPE_CHECKING:
    from pagefleet.kernels.triton.targets import Target

logger = logging.getLogger(__name__)
VENDORS = {"cuda": "NVIDIA", "rocm": "AMD"}
LEAST_MEMORY = 1 << 30  # bytes: less does not hold a small model, its cache and the libraries' workspaces
_SCORE = 100


@dataclass(frozen=True)
class GpuDevice:
    """Where a GPU backend runs.

    Attributes:
        backend: "cuda" or "rocm".
        device: the torch device; a CPU for kernels in Triton's interpreter.
        title: the card's name.
        target: its architecture's entry in the tile table.
        processors: multiprocessors (compute units).
    """

    backend: str
    device: torch.device
    title: str
    target: Target
    processors: int

    def memory(self) -> MemoryInfo:
        """Bytes of the card, and of them free."""
        if self.device.type == "cpu":
            return MemoryInfo(host.memory_limit_bytes(), host.available_memory_bytes())
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryInfo(total, free)

    def synchronize(self) -> None:
        """Wait until everything that was launched is done."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)


def with_tiles(gpu: GpuDevice, arch: str | None) -> GpuDevice:
    """`gpu` with the tile sizes of another architecture; as it is for None, "auto" and where they do not fit."""
    if arch in (None, "auto", gpu.target.arch) or gpu.device.type == "cpu":
        return gpu
    from pagefleet.kernels.triton.targets import target_of

    try:
        target = gpu.target.with_tiles_of(target_of(str(arch)))
    except ValueError as error:
        logger.warning("backend.tiles=%s: %s; its own tiles are taken", arch, error)
        return gpu
    logger.info("backend.tiles=%s: tile sizes of that architecture, not of %s", arch, gpu.target.arch)
    return replace(gpu, target=target)


def probe_vendor(backend: str, runtime: Any = torch) -> Availability:
    """Whether the first GPU of the vendor can be used.

    Args:
        backend: "cuda" or "rocm".
        runtime: torch, or what stands for it in a test.
    """
    reason = _why_not(backend, runtime)
    if reason is not None:
        return Availability(False, reason)
    properties = runtime.cuda.get_device_properties(0)
    free, total = runtime.cuda.mem_get_info(0)
    said = f"{properties.name}, {_arch(backend, properties)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return Availability(True, said, _SCORE)


def first_device(backend: str) -> GpuDevice:
    """The first GPU of the vendor. Raises BackendError with the reason where there is none that can be used."""
    reason = _why_not(backend, torch)
    if reason is not None:
        raise BackendError(f"backend '{backend}' cannot run here: {reason}")
    from pagefleet.kernels.triton.targets import target_of

    properties = torch.cuda.get_device_properties(0)
    target = target_of(_arch(backend, properties))
    return GpuDevice(backend, torch.device("cuda", 0), properties.name, target, properties.multi_processor_count)


def _why_not(backend: str, runtime: Any) -> str | None:
    vendor = VENDORS[backend]
    built_for = runtime.version.cuda if backend == "cuda" else runtime.version.hip
    if built_for is None:
        return f"torch {runtime.__version__} is not built for {vendor} GPUs; install its {backend.upper()} build"
    if missing := kernels.unavailable():
        return missing
    if kernels.interpreted():
        return "TRITON_INTERPRET is set, so kernels would run in Triton's interpreter on the CPU; unset it"
    try:
        runtime.cuda.init()  # says what is_available() keeps to itself: no driver, one that is too old
        count = runtime.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        return f"no {vendor} GPU can be used: {_first_sentence(error)}"
    if count == 0:
        return f"there is a driver and no {vendor} GPU that this process may see (CUDA_VISIBLE_DEVICES hides them?)"
    properties = runtime.cuda.get_device_properties(0)
    from pagefleet.kernels.triton.targets import target_of

    try:
        target_of(_arch(backend, properties))
    except ValueError as error:
        return f"{properties.name}: {error}"
    free, total = runtime.cuda.mem_get_info(0)
    if free < LEAST_MEMORY:
        return (
            f"{properties.name} has {free / 2**20:.0f} MiB of its {total / 2**30:.0f} GiB free and needs at least "
            f"{LEAST_MEMORY / 2**30:.0f} GiB; end what else uses it"
        )
    return None


def _arch(backend: str, properties: Any) -> str:
    if backend == "cuda":
        return f"sm{properties.major}{properties.minor}"
    return str(properties.gcnArchName).partition(":")[0]


def _first_sentence(error: Exception) -> str:
    """Of torch's message, whose rest is advice over many lines."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0].rstrip(".") or type(error).__name__
