"""The key of a draw: a number for (seed, position), whatever else runs.

Nothing is stored between steps, so preemption, batch neighbours and restarts cannot change a draw. The noise of each
token id follows from the key (`exponential` in kernels/reference/selection.py).
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def draw_key(seed: int, position: int) -> int:
    """The 64-bit key of one draw, by SplitMix64; `position` is the number of output tokens so far."""
    return _mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)
