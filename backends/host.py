"""What this process may use of the machine: instruction set, memory, threads.

The limits of a container are cgroup limits, and the nearest one may sit on any ancestor of the process's own group:
every level up to the root is read, in cgroup v1 and v2 alike.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

ISA_ENV = "PAGEFLEET_ISA"
_AVX512 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
ISA_FLAGS = {  # name -> /proc/cpuinfo flags it needs; least first, each with all of the one before
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": _AVX512,
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512_bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
    "amx": _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
}
_NO_LIMIT = 1 << 60  # cgroup v1 says "no limit" with a number near 2^63


def _cpuinfo(root: Path, *names: str) -> str | None:
    """The first value in /proc/cpuinfo under one of these names; None where there is no such line or file."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return None


def cpu_name(root: Path = Path("/")) -> str:
    """What the processor calls itself; its architecture where it says nothing."""
    return _cpuinfo(root, "model name") or platform.processor() or platform.machine()


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Feature flags of the first processor in /proc/cpuinfo; empty where there is no such file."""
    return frozenset((_cpuinfo(root, "flags", "Features") or "").split())


def isa(root: Path = Path("/")) -> str:
    """The best instruction set that we have a name for, "generic" if none; `PAGEFLEET_ISA` can only lower it.

    Raises:
        ValueError: `PAGEFLEET_ISA` is no known name, or asks for more than the processor has.
    """
    flags = cpu_flags(root)
    known = ["generic", *ISA_FLAGS]
    best = max((name for name in known if ISA_FLAGS.get(name, set()) <= flags), key=known.index)
    asked = os.environ.get(ISA_ENV)
    if not asked:
        return best
    if asked not in known:
        raise ValueError(f"{ISA_ENV}={asked} is not an instruction set; expected one of: {', '.join(known)}")
    if known.index(asked) > known.index(best):
        raise ValueError(f"{ISA_ENV}={asked} asks for more than this processor has ({best}); unset it or lower it")
    return asked


def has_fast_bf16(root: Path = Path("/")) -> bool:
    """Whether bf16 products are faster than fp32 here. Without the instructions they are about seven times slower."""
    return isa(root) in ("avx512_bf16", "amx")


def _cgroup_folders(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the process's cgroup for `controller`, from its own up to the mount's root, v1 and v2."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        bases = [mount / controllers, mount / controller] if controllers else [mount, mount / "unified"]
        for base in bases:
            folder = base / path.strip("/")
            while True:  # inside a container the path may be the host's: then only the upper folders exist
                if folder.is_dir():
                    yield folder
                if folder == base:
                    break
                folder = folder.parent


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):  # absent, or "max"
        return None


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """The least of the host's memory and every cgroup limit above this process."""
    limits = [psutil.virtual_memory().total]
    for folder in _cgroup_folders("memory", root):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limit = _read_number(folder / name)
            if limit is not None and 0 < limit < _NO_LIMIT:
                limits.append(limit)
    return min(limits)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can still be taken before the host or a cgroup runs out; file cache counts as available."""
    available = [psutil.virtual_memory().available]
    for folder in _cgroup_folders("memory", root):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read_number(folder / limit_name), _read_number(folder / usage_name)
            if limit is not None and usage is not None and 0 < limit < _NO_LIMIT:
                available.append(limit - usage + _reclaimable_bytes(folder))
    return max(0, min(available))


def return_unused_memory() -> None:
    """Have the C library give the system back what it holds and nobody uses: hundreds of MB after weights were read."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None  # glibc has it
    if trim is not None:
        trim(0)


def _reclaimable_bytes(folder: Path) -> int:
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    stats = dict(line.split()[:2] for line in text.splitlines() if " " in line)
    return int(stats.get("total_inactive_file", stats.get("inactive_file", 0)))


def usable_threads(root: Path = Path("/")) -> int:
    """Threads this process should run: its affinity, cut by the tightest cgroup quota (rounded up), at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    threads = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    for folder in _cgroup_folders("cpu", root):
        try:
            quota_text, period_text = (folder / "cpu.max").read_text().split()
            quota, period = (-1 if quota_text == "max" else int(quota_text)), int(period_text)
        except (OSError, ValueError):
            quota, period = (
                _read_number(folder / "cpu.cfs_quota_us") or -1,
                _read_number(folder / "cpu.cfs_period_us") or 0,
            )
        if quota > 0 and period > 0:
            threads = min(threads, quota / period)
    return max(1, math.ceil(threads))
