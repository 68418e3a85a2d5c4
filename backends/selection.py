"""What the sampler asks of a backend: choosing tokens from logits, on the device, without a copy of all of them.

`TorchSelection` in `backends/torch_selection.py` is the plain form on any device. Logits are [L, V] of any float dtype
and left as they are; every operation treats a row by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Draw:
    """One token to draw.

    Attributes:
        row: of the logits.
        largest: that row's largest logit, which is finite.
        key: 64 bits, from the sequence's seed and the token's position: all that the noise depends on.
        temperature: above 0.
        top_k: keep so many of the largest logits; 0 keeps all.
        top_p: keep the most likely tokens that together have this share of what is left.
        min_p: keep tokens at least this many times as likely as the most likely one.
    """

    row: int
    largest: float
    key: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Score:
    """Of one token in one row: its log-probability, its rank (1 + the number of larger logits), the log-sum-exp."""

    logprob: float
    rank: int
    total: float


class Selection(Protocol):
    """Choosing tokens."""

    def largest(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Per row the lowest id with the largest logit, and that logit; NaN counts as the largest."""
        ...

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """A token for each of `draws`: the largest probability / noise (Gumbel-max) among those kept.

        Kept is what min_p, top-k and top-p leave, in this order; what equals the last one kept stays too. The noise is
        exponential, by token id and key (see `kernels/reference/selection.py`).
        """
        ...

    def score(self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> list[Score]:
        """Of token_ids[i] in row rows[i]."""
        ...
