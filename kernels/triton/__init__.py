"""GPU kernels in Triton, one source for NVIDIA and AMD. Every one has its reference twin in `kernels.reference`.

Importing this package does not import Triton, which is not made for every platform: ask `unavailable()` first, then
import the modules. With TRITON_INTERPRET=1 in the environment before that, they run on CPU tensors, slowly.
"""

from __future__ import annotations

import importlib.util
import os


def unavailable() -> str | None:
    """Why these kernels cannot be used in this process, and what to do; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'pagefleet[gpu]'; it exists for Linux)"
    return None


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
