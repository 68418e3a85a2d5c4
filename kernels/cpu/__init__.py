"""Compiled kernels for x86 processors, one build for every instruction set, chosen when they are loaded."""

from .native import FLOAT_TYPES, LEVELS, NativeKernels, load_native, why_not_native

__all__ = ["FLOAT_TYPES", "LEVELS", "NativeKernels", "load_native", "why_not_native"]
