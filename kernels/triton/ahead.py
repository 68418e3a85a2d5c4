"""Compiling the kernels for a GPU that is not here: real machine code, its shared memory and what it spills.

A launch inside `compiling_for(target)` goes all the way through Triton as on that GPU (argument types, alignment,
compile-time constants), but ends when the machine code is made. Nothing runs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from .targets import Target


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code.

    Attributes:
        code_bytes: of the cubin or hsaco.
        shared_bytes: shared memory (LDS) of one program.
        scratch_bytes: private memory of one thread, where registers spill; None if no tool is there to tell.
        registers: of one thread; None likewise.
        seconds: that compiling took.
    """

    kernel: str
    arch: str
    code_bytes: int
    shared_bytes: int
    scratch_bytes: int | None
    registers: int | None
    seconds: float


class _NoDevice:
    """A driver that only knows what it would drive."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:  # kernels are cached by device: one for each target
        return str(self._target)

    def get_current_stream(self, device: object) -> int:
        return 0


def gpu_target(target: Target) -> GPUTarget:
    """As Triton names it."""
    arch = int(target.arch.removeprefix("sm")) if target.vendor == "cuda" else target.arch
    return GPUTarget(target.vendor, arch, target.warp_size)


@contextmanager
def compiling_for(target: Target) -> Iterator[list[Compiled]]:
    """Collect what launches of this package's kernels compile to; they return without having run.

    Not for processes that use a GPU, and not for threads: Triton's active driver is replaced.
    """
    run: Callable[..., Any] = JITFunction.run
    done: list[Compiled] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        began = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        done.append(_examined(kernel, self.fn.__name__, target, time.perf_counter() - began))
        return kernel

    driver: Any = triton.runtime.driver
    active, always = driver._active, triton.knobs.compilation.always_compile
    driver.set_active(_NoDevice(gpu_target(target)))
    triton.knobs.compilation.always_compile = True
    JITFunction.run = compile_only
    try:
        yield done
    finally:
        JITFunction.run = run
        triton.knobs.compilation.always_compile = always
        driver._active = active  # `reset_active` fails where there is no GPU


@contextmanager
def recording() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Collect (kernel, what is fixed when it is compiled) of launches; nothing is compiled."""
    run: Callable[..., Any] = JITFunction.run
    done: list[tuple[str, dict[str, Any]]] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip((p.name for p in self.params), args, strict=False)) | options
        done.append((self.fn.__name__, {p.name: given[p.name] for p in self.params if p.is_constexpr}))

    JITFunction.run = record
    try:
        yield done
    finally:
        JITFunction.run = run


def _examined(kernel: Any, name: str, target: Target, seconds: float) -> Compiled:
    code = kernel.asm["cubin" if target.vendor == "cuda" else "hsaco"]
    if target.vendor == "cuda":
        scratch, registers = _cubin_usage(code)
    else:
        text = kernel.asm["amdgcn"]
        scratch, registers = (
            int(found[1]) if (found := re.search(rf"{label}: *(\d+)", text)) else None
            for label in ("ScratchSize", r"\.vgpr_count")
        )
    return Compiled(name, target.arch, len(code), kernel.metadata.shared, scratch, registers, seconds)


def _cubin_usage(code: bytes) -> tuple[int | None, int | None]:
    """(stack and local bytes, registers) of a cubin, from the `cuobjdump` that comes with Triton."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    return (None, None) if found is None else (int(found[2]) + int(found[3]), int(found[1]))
