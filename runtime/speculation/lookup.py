"""Prompt lookup: guess the next tokens from an earlier place of the same text that reads like its end.

Method: Saxena, "Prompt Lookup Decoding" (2023), https://github.com/apoorvumang/prompt-lookup-decoding; the search is
an index that grows by one entry a token, so that a look-up costs the same in a text of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CANDIDATES = 8  # earlier places that one look-up compares


@dataclass(frozen=True)
class Match:
    """An earlier place like the end of the text: its last `length` tokens are those before position `after`."""

    after: int
    length: int


class NgramIndex:
    """Where in a growing text its last tokens occurred before.

    Of the last few earlier places (CANDIDATES) with the same last `shortest` tokens, a look-up takes the one whose
    tokens before agree with the end of the text the furthest, up to `longest`; of equal ones the most recent.

    Memory: one dictionary entry and one integer a token.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> where the token after its last occurrence is
        self._earlier: list[int] = []  # the occurrence before that, by position; 0: none

    def lookup(self, token_ids: Sequence[int]) -> Match | None:
        """The best earlier place for the end of `token_ids`, which may only have grown since the last look-up."""
        self._extend(token_ids)
        end = len(token_ids)
        after = self._latest.get(tuple(token_ids[-self._shortest :]), 0)
        best = None
        for _ in range(CANDIDATES):
            if after == 0:
                break
            length = self._agreement(token_ids, after, end)
            if best is None or length > best.length:
                best = Match(after, length)
            if length == self._longest:
                break
            after = self._earlier[after]
        return best

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Enter every n-gram that a token follows: the last one would only find itself."""
        size = self._shortest
        for position in range(len(self._earlier), len(token_ids)):
            earlier = 0
            if position >= size:
                ngram = tuple(token_ids[position - size : position])
                earlier = self._latest.get(ngram, 0)
                self._latest[ngram] = position
            self._earlier.append(earlier)

    def _agreement(self, token_ids: Sequence[int], after: int, end: int) -> int:
        length = self._shortest
        while length < min(self._longest, after) and token_ids[after - 1 - length] == token_ids[end - 1 - length]:
            length += 1
        return length


def continuation(token_ids: Sequence[int], match: Match, count: int) -> list[int]:
    """The `count` tokens after a match; where they reach the end of the text they go on in a circle.

    A text that repeats itself is thus continued for as long as is asked, not only to its end.
    """
    period = len(token_ids) - match.after
    return [token_ids[match.after + i % period] for i in range(count)]
