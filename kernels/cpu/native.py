"""Loading the compiled module, and choosing the instruction set that it runs on.

The module has no torch in it: kernels take addresses and sizes. It is linked with OpenMP, and torch is imported before
it, so that both use torch's OpenMP library and with it one pool of threads.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger(__name__)

LEVELS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")  # each has what the ones before it have
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # as csrc/types.h numbers them
FLOAT_TYPES = {dtype: number for dtype, number in TYPES.items() if dtype.is_floating_point}

NativeKernels = Any  # the module `_native`: functions of addresses and numbers

_failure: str | None = None
_module: ModuleType | None = None
_level: str | None = None


def _load() -> ModuleType | None:
    global _failure, _module
    if _module is None and _failure is None:
        try:
            _module = importlib.import_module("pagefleet.kernels.cpu._native")
        except ImportError as error:
            _failure = f"the compiled kernels are not there ({error}); install with a C++ compiler to build them"
    return _module


def load_native(isa: str) -> NativeKernels | None:
    """The compiled kernels, set to run on `isa` from here on; None where they cannot be (see `why_not_native`).

    One process runs one instruction set at a time: the last call decides.
    """
    global _level
    module = _load() if isa in LEVELS else None
    if module is not None and isa != _level:
        module.set_isa(isa)
        _level = isa
    return module


def why_not_native(isa: str) -> str | None:
    """Why `load_native(isa)` gives nothing; None if it gives kernels."""
    if isa not in LEVELS:
        return f"there are no compiled kernels for instruction set '{isa}'; there are for {', '.join(LEVELS)}"
    _load()
    return _failure
