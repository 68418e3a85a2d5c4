"""Choosing a token from the logits of one row: the filters, the noise, the draw."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIT = 2.0**-32
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest float32 below 1: keeps the exponential finite


def exponential(key: int, token_ids: Tensor) -> Tensor:
    """Exponential(1) noise, float32 > 0, one for each of `token_ids` (int64, any shape), for a 64-bit key.

    Counter-based as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the mixing function is
    SplitMix64's (Steele, Lea, Flood, OOPSLA 2014). `argmax(p / exponential)` draws a token with probability p: it is
    the Gumbel-max rule (add `-log(exponential)` to the logits) without its outer logarithm.
    """
    bits = (token_ids + 1) * _signed(_GOLDEN)
    bits += _signed(key)
    bits ^= _shift_right(bits, 30)
    bits *= _signed(_MIX_1)
    bits ^= _shift_right(bits, 27)
    bits *= _signed(_MIX_2)
    uniform = _shift_right(bits, 32).to(torch.float32).add_(0.5).mul_(_UNIT).clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()


def draw_token(
    logits: Tensor, largest: float, key: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> int:
    """Draw one token from logits [V], of which `largest` is the largest and finite; see `Selection.draw`."""
    scaled = logits.float().sub(largest).div_(temperature)
    ids, weights = _kept(scaled, top_k, top_p, min_p)
    return first_largest(weights.div_(exponential(key, ids)), ids)


def largest_token(logits: Tensor) -> tuple[int, float]:
    """The lowest id with the largest of logits [V], and that logit; NaN counts as the largest."""
    strange = logits.isnan().nonzero()
    at = int(strange[0]) if len(strange) else int((logits == logits.max()).nonzero()[0])
    return at, float(logits[at])


def score_token(logits: Tensor, token_id: int) -> tuple[float, int, float]:
    """(log-probability of a token, 1 + the number of larger logits, log-sum-exp) of logits [V]."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = torch.logsumexp(wide, dim=0)
    return float(wide[token_id] - total), 1 + int((wide > wide[token_id]).sum()), float(total)


def first_largest(scores: Tensor, ids: Tensor) -> int:
    """The first of `ids` whose score is the largest."""
    # numpy's argmax is eight times as fast as torch's for tensors that it can read without a copy
    return int(ids[int(scores.numpy().argmax()) if scores.is_cpu else scores.argmax()])


def _kept(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """Ids that the filters leave, ascending, and their weights: probabilities over that of the most likely token.

    scaled: [V] logits over temperature, the largest being 0; overwritten.
    """
    ids = torch.arange(len(scaled), device=scaled.device)
    floor = math.log(min_p) if min_p > 0.0 else float("-inf")
    if 0 < top_k < len(ids):
        floor = max(floor, float(torch.topk(scaled, top_k).values[-1]))
    if floor > float("-inf"):
        ids = (scaled >= floor).nonzero().flatten()
        scaled = scaled[ids]
    weights = scaled.exp_()
    if top_p >= 1.0:
        return ids, weights
    kept = (weights >= _nucleus_floor(weights, top_p)).nonzero().flatten()
    return ids[kept], weights[kept]


def _nucleus_floor(weights: Tensor, top_p: float) -> float:
    """The smallest weight in the nucleus: the most likely tokens that together reach `top_p` of the mass.

    Tokens less likely than (1 - top_p) / V weigh less than 1 - top_p together, so only the others are sorted.
    """
    total = float(weights.sum(dtype=torch.float64))
    likely = weights[weights >= total * (1.0 - top_p) / len(weights)]
    descending = _descending(likely)
    mass = torch.cumsum(descending, dim=0, dtype=torch.float64)
    last = int((mass < top_p * total).sum())
    return float(descending[min(last, len(descending) - 1)])


def _descending(values: Tensor) -> Tensor:
    """Sorted copy; numpy's sort of plain values is about ten times as fast as torch's, which also sorts indices."""
    if values.is_cpu:
        return torch.from_numpy(np.sort(values.numpy())[::-1].copy())
    return torch.sort(values, descending=True).values


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's keeps the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
