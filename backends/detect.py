"""Which hardware target of `conf/hardware/` fits this machine; `hardware=auto` takes it. Imports no torch.

A GPU counts only where this installation could use it: the backend's folder is here and torch was built for it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import host

GENERIC = "generic"
# What NVIDIA calls its devices -> target. A laptop's RTX 4090 is a smaller chip.
_NVIDIA = (
    (r"\bG?H200\b", "h200"),
    (r"\bH100\b", "h100"),
    (r"\bA100\b", "a100"),
    (r"\bL4\b", "l4"),
    (r"\bRTX 4090\b(?!.*Laptop)", "rtx4090"),
)
# gfx_target_version of the kernel driver (major * 10000 + minor * 100 + stepping) -> target
_AMD = {90402: "mi300x", 90500: "mi355x", 110000: "rx7900xtx"}
# PCI device -> target, where an architecture has several: the card, and a part of it in a virtual machine
_AMD_DEVICES = {0x74A5: "mi325x", 0x74B9: "mi325x"}
_CPU = {
    "amx": ("xeon_spr", "AMX tiles multiply bf16"),
    "avx512_bf16": ("epyc_genoa", "AVX-512 with bf16 dot products, no AMX"),
    "avx512_vnni": ("xeon_icx", "AVX-512 without bf16"),
    "avx512": ("xeon_icx", "AVX-512 without bf16"),
}


@dataclass(frozen=True)
class Target:
    """A file of `conf/hardware/`, and why it was chosen."""

    name: str
    reason: str


def detect(backend: str = "auto", root: Path = Path("/")) -> Target:
    """The target for `backend` on this machine; "auto" and "target" leave the choice of the device open. Never raises.

    Args:
        root: where /proc and /sys are.
    """
    open_choice = backend in ("auto", "target")
    for name, library, find in (("cuda", "libtorch_cuda.so", _nvidia), ("rocm", "libtorch_hip.so", _amd)):
        if backend == name or (open_choice and _can_use(name, library)):
            found = find(root)
            if found is not None:
                return found
    if open_choice or backend == "cpu":
        return _cpu(root)
    return Target(GENERIC, f"nothing is known of what backend={backend} runs on")


def _can_use(backend: str, library: str) -> bool:
    torch = importlib.util.find_spec("torch")  # found, not imported
    folders = (torch.submodule_search_locations if torch else None) or ()
    built = any((Path(folder) / "lib" / library).exists() for folder in folders)
    return built and (Path(__file__).parent / backend / "__init__.py").is_file()


def _cpu(root: Path) -> Target:
    name = host.cpu_name(root)
    try:
        isa = host.isa(root)
    except ValueError as error:  # the backend will refuse it, with this very message
        return Target("laptop", str(error))
    target, why = _CPU.get(isa, ("laptop", "no AVX-512"))
    return Target(target, f"{name}, {isa}: {why}")


def _nvidia(root: Path) -> Target | None:
    """The first NVIDIA device; None if there is none."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    name = next((m[1].strip() for f in files if (m := re.search(r"^Model:(.*)$", _read(f), re.MULTILINE))), None)
    if name is None and root == Path("/"):  # Windows' Linux and some containers have no such files
        name = _nvidia_smi_name()
    if name is None:
        return None
    target = next((target for pattern, target in _NVIDIA if re.search(pattern, name)), None)
    return Target(target, name) if target else Target(GENERIC, f"{name}, which has no target of its own")


def _amd(root: Path) -> Target | None:
    """The first AMD device that the compute driver lists; None if there is none."""
    for file in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        said = dict(re.findall(r"^(gfx_target_version|device_id) (\d+)$", _read(file), re.MULTILINE))
        version = int(said.get("gfx_target_version", 0))  # 0: a CPU
        if version:
            gfx = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            target = _AMD_DEVICES.get(int(said.get("device_id", 0)), _AMD.get(version))
            return Target(target, f"AMD {gfx}") if target else Target(GENERIC, f"AMD {gfx} has no target of its own")
    return None


def _nvidia_smi_name() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
