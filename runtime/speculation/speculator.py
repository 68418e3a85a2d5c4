"""Speculator: for each running sequence of a step, which tokens to run ahead on the guess that they come next.

The guess is looked up (lookup.py), run as further query rows of the step, and every row's token is then chosen by the
very rule of a step without a guess: its noise is a function of seed and position alone, so whatever is chosen after a
drafted token that was chosen too is what a later step would have chosen. A row after one that disagrees is dropped.
Tokens are therefore the same with speculation on and off, greedy or sampled: more than the rejection rule of
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), promises, which keeps only their
distribution.

When a guess pays. A step of M rows takes about F + r * M seconds: F to read the weights once, r for a row's arithmetic.
With B sequences running, a token costs (F + r * B) / B; a drafted row costs r and gives a token only if it and those
before it are right. The i-th drafted token of a sequence whose guesses are right with probability p is worth its row if

    p ** i > r * B / (F + r * B) = B / (break_even_rows + B),    break_even_rows = F / r

(times MARGIN, since guessing and choosing tokens take time as well). p is estimated for each sequence from all of its
guesses, also those that were not run: they are compared with the tokens that came, which costs no row.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from pagefleet.runtime.config import SpeculationConfig
from pagefleet.runtime.request import Sequence
from pagefleet.runtime.speculation.lookup import NgramIndex, continuation

MARGIN = 1.25  # how many times its price a drafted token must be worth; from 4 * break_even_rows sequences on none is
_MEMORY = 0.9  # weight of a guess relative to the next one: the last ten count most
_PRIOR_WEIGHT = 2.0  # guesses that the first estimate counts for


class Guesser:
    """What one sequence's text says about its next tokens, and how often it was right."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._index = NgramIndex(config.shortest_match, config.longest_match)
        self._right = config.first_chance * _PRIOR_WEIGHT
        self._made = _PRIOR_WEIGHT
        self._guess: list[int] = []
        self._position = 0  # of the guess's first token

    @property
    def chance(self) -> float:
        """Estimated probability that a guessed token comes, given that those before it came."""
        return self._right / self._made

    def learn(self, token_ids: Tokens[int]) -> None:
        """Compare the last guess with the tokens that came since; after the first wrong one it says nothing."""
        for offset, guessed in enumerate(self._guess):
            if self._position + offset >= len(token_ids):
                break
            right = token_ids[self._position + offset] == guessed
            self._right = self._right * _MEMORY + right
            self._made = self._made * _MEMORY + 1.0
            if not right:
                break
        self._guess = []

    def guess(self, token_ids: Tokens[int], count: int) -> list[int]:
        """The next `count` tokens, or none if the end of the text did not occur before."""
        match = self._index.lookup(token_ids)
        self._guess = [] if match is None else continuation(token_ids, match, count)
        self._position = len(token_ids)
        return self._guess


class Speculator:
    """Chooses drafts. What it remembers of a sequence is kept on the sequence, and decides no token."""

    def __init__(self, config: SpeculationConfig, eos_token_ids: frozenset[int]) -> None:
        self.config = config
        self._eos = eos_token_ids

    def price(self, num_running: int) -> float:
        """The chance below which a drafted token is not worth its row when `num_running` sequences run."""
        return MARGIN * num_running / (self.config.break_even_rows + num_running)

    def draft(self, sequence: Sequence, room: int, num_running: int) -> tuple[int, ...]:
        """At most `room` tokens to run after the last one of `sequence`; often none."""
        price = self.price(num_running)
        if room < 1 or price >= 1.0:
            return ()
        guesser = sequence.guesser = sequence.guesser or Guesser(self.config)
        guesser.learn(sequence.token_ids)
        most = min(room, self.config.num_tokens, max(1, self.config.most_rows // num_running))
        count, chance = 0, guesser.chance
        while count < most and chance ** (count + 1) > price:
            count += 1
        # With nothing worth running, one token is guessed all the same, to see whether it would have been right.
        guess = guesser.guess(sequence.token_ids, max(count, 1))
        return self._possible(sequence, guess[:count])

    def _possible(self, sequence: Sequence, guess: list[int]) -> tuple[int, ...]:
        """The guess up to the token that would end the sequence, or that its grammar forbids."""
        ends = self._eos.union(sequence.request.params.stop_token_ids)
        count = next((i for i, token in enumerate(guess) if token in ends), len(guess))
        if sequence.grammar is not None:
            count = sequence.grammar.foresee(guess[:count])
        return tuple(guess[:count])
