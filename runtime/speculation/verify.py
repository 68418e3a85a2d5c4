"""Which of a step's choices stand: those whose assumptions came true."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from pagefleet.runtime.request import Sequence
from pagefleet.runtime.sampling.sampler import Sampled


@dataclass(frozen=True)
class Draw:
    """One choice of a next token, from row `row` of the step's logits.

    Attributes:
        sequence: whose token it is.
        ahead: drafted tokens that are assumed to come before it; a sequence's draws follow one another by their number.
    """

    sequence: Sequence
    row: int
    ahead: tuple[int, ...] = ()


def standing(draws: Listed[Draw], choices: Listed[Sampled]) -> Iterator[tuple[Draw, Sampled]]:
    """The draws whose assumed tokens are exactly those that were chosen, with their choices, in order."""
    chosen: list[int] = []
    for draw, choice in zip(draws, choices, strict=True):
        if not draw.ahead:
            chosen = []
        if chosen == list(draw.ahead):
            chosen.append(choice.token_id)
            yield draw, choice
