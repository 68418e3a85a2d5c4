"""The card (or CPU tensors that stand for one), how long things take on it, and what it can do at most."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Any, TypeVar

import torch

from pagefleet.backends import registry
from pagefleet.backends.base import Backend, BackendError, BackendOptions
from pagefleet.backends.gpu.device import GpuDevice, first_device
from pagefleet.kernels.triton.targets import target_of

T = TypeVar("T")
GIB = 1 << 30


class Machine:
    """Where the sections run.

    Args:
        dry: CPU tensors stand for a card, and kernels run in Triton's interpreter.

    Raises:
        BackendError: there is no card that can be used.
    """

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.name = "rocm" if torch.version.hip else "cuda"
        self.gpu = self._stand_in() if dry else first_device(self.name)
        self.device = self.gpu.device
        self._deadline = monotonic()
        if dry:
            registry.create = self._create_dry  # type: ignore[assignment]

    @staticmethod
    def _stand_in() -> GpuDevice:
        return GpuDevice("cuda", torch.device("cpu"), "none", target_of("interpreter"), 8)

    def _create_dry(
        self, name: str = "auto", options: BackendOptions | None = None, real: Any = registry.create
    ) -> Backend:
        return self.backend(options) if name == self.name else real(name, options)

    def backend(self, options: BackendOptions | None = None, **extra: Any) -> Backend:
        """A new backend on the card; `extra` as `backend.*` of the configuration."""
        from pagefleet.backends.gpu.backend import GpuBackend

        return GpuBackend(options or BackendOptions(extra=extra), self.gpu)

    def pick(self, real: T, dry: T) -> T:
        """A size: what a card gets, or what the interpreter can bear."""
        return dry if self.dry else real

    # -- time ----------------------------------------------------------------------------------------------------

    def begin(self, budget_s: float) -> None:
        """A section begins, and has so many seconds."""
        self._deadline = monotonic() + budget_s

    def seconds_left(self) -> float:
        """Of the section that runs."""
        return self._deadline - monotonic()

    def synchronize(self) -> None:
        """Wait for the card."""
        self.gpu.synchronize()

    def seconds(self, run: Callable[[], object], repeats: int = 5, inner: int = 1) -> float:
        """The best time of `run`, of which `inner` are launched without waiting in between; the first try is warmup."""
        times = []
        for _ in range(1 + self.pick(repeats, 1)):
            self.synchronize()
            began = monotonic()
            for _ in range(self.pick(inner, 1)):
                run()
            self.synchronize()
            times.append((monotonic() - began) / self.pick(inner, 1))
        return min(times[1:])

    # -- ceilings ------------------------------------------------------------------------------------------------

    @cached_property
    def copy_bytes_per_s(self) -> float:
        """Bytes read and written by the best copy of an array far larger than the caches."""
        source = torch.ones(self.pick(4 * GIB, 1 << 12) // 8, dtype=torch.int64, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source), inner=4)

    def product_flops(self, dtype: torch.dtype, size: int = 8192) -> float:
        """Operations a second of a square matrix product, two for each multiply-add."""
        size = self.pick(size, 32)
        a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: a @ b.T, inner=8)

    @cached_property
    def bf16_flops(self) -> float:
        """The matrix ceiling that prefill is held to."""
        return self.product_flops(torch.bfloat16)

    # -- facts ---------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """The card and the versions."""
        packages = {}
        for package in ("torch", "triton", "transformers", "numpy"):
            with suppress(PackageNotFoundError):
                packages[package] = version(package)
        memory = self.gpu.memory()
        return {
            "card": "CPU tensors in Triton's interpreter" if self.dry else self.gpu.title,
            "arch": self.gpu.target.arch,
            "backend": self.gpu.backend,
            "processors": self.gpu.processors,
            "memory_bytes": memory.total,
            "memory_free_bytes": memory.free,
            "driver": torch.version.hip or torch.version.cuda,
            "python": platform.python_version(),
            **packages,
        }

    def still_works(self) -> bool:
        """Whether the card answers: after an illegal access a process gets nothing but errors from it."""
        try:
            self.synchronize()
            return float(torch.ones(4, device=self.device).sum()) == 4.0
        except (RuntimeError, BackendError):
            return False

    @contextmanager
    def memory_given_back(self) -> Iterator[None]:
        """Afterwards the card is free of what was made inside."""
        try:
            yield
        finally:
            self.free_memory()

    def free_memory(self) -> None:
        """Give back to the card what torch only keeps for reuse: what is free there decides the size of pools."""
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()
