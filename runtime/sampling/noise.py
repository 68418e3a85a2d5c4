"""Stateless sampling noise: a number for (seed, position, token id), whatever else runs.

Counter-based as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the mixing function is
SplitMix64's (Steele, Lea, Flood, OOPSLA 2014). Nothing is stored between steps, so preemption, batch neighbours and
restarts cannot change a draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIT = 2.0**-32
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest float32 below 1: keeps the exponential finite


def draw_key(seed: int, position: int) -> int:
    """The 64-bit key of one draw; `position` is the number of output tokens so far."""
    return _mix((_mix(seed & _MASK) + (position + 1) * _GOLDEN) & _MASK)


def exponential(key: int, token_ids: Tensor) -> Tensor:
    """Exponential(1) noise, float32 > 0, one for each of `token_ids` (int64, any shape).

    `argmax(p / exponential)` draws a token with probability p: it is the Gumbel-max rule (add `-log(exponential)` to
    the logits) without its outer logarithm.
    """
    bits = (token_ids + 1) * _signed(_GOLDEN)
    bits += _signed(key)
    bits ^= _shift_right(bits, 30)
    bits *= _signed(_MIX_1)
    bits ^= _shift_right(bits, 27)
    bits *= _signed(_MIX_2)
    uniform = _shift_right(bits, 32).to(torch.float32).add_(0.5).mul_(_UNIT).clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's keeps the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
