"""Sampler: the next token of every row.

Order, as in vLLM: raw log-probabilities; logit bias, allowed tokens, grammar, min_tokens; penalties; bad words;
temperature; min_p; top-k; top-p; then a Gumbel-max draw with noise from (seed, position, token id).

A backend's `Selection` does what reads all logits. It treats a row by itself, as everything here does: a row's token
cannot depend on its neighbours.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet.backends.selection import Draw, Score, Selection
from pagefleet.backends.torch_selection import TorchSelection
from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.outputs import Logprob
from pagefleet.runtime.sampling import penalties
from pagefleet.runtime.sampling.grammar import Grammar
from pagefleet.runtime.sampling.logprobs import token_logprobs
from pagefleet.runtime.sampling.noise import draw_key
from pagefleet.runtime.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass
class SamplingRow:
    """What decides the next token of one sequence.

    Attributes:
        output_token_ids: tokens generated so far; their number is the position of the draw.
        seed: of this sequence.
        eos_token_ids: banned, with the stop tokens, until there are `min_tokens`.
        bad_word_ids: from `penalties.bad_word_sequences`.
        grammar: at the state after `output_token_ids`; not advanced here.
    """

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: Sequence[int]
    seed: int
    eos_token_ids: frozenset[int]
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    @property
    def plain(self) -> bool:
        """True when the logits are used as they are."""
        params = self.params
        return (
            not params.logit_bias
            and params.allowed_token_ids is None
            and self.grammar is None
            and len(self.output_token_ids) >= params.min_tokens
            and params.repetition_penalty == 1.0
            and not params.frequency_penalty
            and not params.presence_penalty
            and not self.bad_word_ids
        )


@dataclass(frozen=True)
class Sampled:
    """The next token of one row.

    Attributes:
        token_id: -1 if there is an error.
        logprob, logprobs: raw, of the token and of the most likely ones; None unless `params.logprobs` asks.
        error: why this row has no token (no finite logit, nothing allowed); the other rows are good.
        error_code: the code that goes with it.
    """

    token_id: int
    logprob: float | None = None
    logprobs: dict[int, Logprob] | None = None
    error: str | None = None
    error_code: ErrorCode | None = None


class Sampler:
    """Chooses tokens; holds no state that a draw depends on.

    Args:
        selection: the backend's; plain torch if there is none.
    """

    def __init__(self, vocab_size: int, selection: Selection | None = None) -> None:
        self.vocab_size = vocab_size
        self._selection = TorchSelection() if selection is None else selection

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[Sampled]:
        """Choose one token for each row.

        Args:
            logits: [L, V] of any float dtype; left as they are.
            rows: L rows, in the same order.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(
                f"logits: expected shape {(len(rows), self.vocab_size)} for {len(rows)} rows, got {tuple(logits.shape)}"
            )
        if not rows:
            return []
        choices = self._choose(logits, rows)
        asked = {
            i: choice
            for i, (choice, row) in enumerate(zip(choices, rows, strict=True))
            if isinstance(choice, int) and row.params.logprobs is not None
        }
        scores = dict(zip(asked, self._selection.score(logits, list(asked), list(asked.values())), strict=True))
        return [
            self._sampled(choice, row, logits[i], scores.get(i))
            for i, (choice, row) in enumerate(zip(choices, rows, strict=True))
        ]

    def _choose(self, logits: Tensor, rows: list[SamplingRow]) -> list[int | RequestError]:
        """A token for each row, or why it has none. Draws from logits as they are happen all at once."""
        best, largest = self._selection.largest(logits)
        choices: list[int | RequestError] = list(best)
        draws: dict[int, Draw] = {}
        for i, row in enumerate(rows):
            try:
                if not math.isfinite(largest[i]):
                    raise RequestError(
                        ErrorCode.INTERNAL,
                        "the model's logits hold NaN or infinity, or nothing finite, for this sequence; "
                        "try precision=fp32, and report the model if that fails too",
                    )
                if not row.plain:
                    choices[i] = self._choose_processed(logits[i], row)
                elif not row.params.greedy:
                    draws[i] = _draw(i, largest[i], row)
            except RequestError as error:
                choices[i] = error
        for i, token_id in zip(draws, self._selection.draw(logits, list(draws.values())), strict=True):
            choices[i] = token_id
        return choices

    def _choose_processed(self, logits: Tensor, row: SamplingRow) -> int:
        processed = self._processed(logits, row)[None]
        (best,), (largest,) = self._selection.largest(processed)
        if not math.isfinite(largest):
            raise RequestError(
                ErrorCode.INVALID_VALUE,
                "no token is allowed here: allowed_token_ids, min_tokens, bad_words or the grammar exclude each other",
            )
        return best if row.params.greedy else self._selection.draw(processed, [_draw(0, largest, row)])[0]

    def _processed(self, logits: Tensor, row: SamplingRow) -> Tensor:
        params = row.params
        penalties.check_token_ids(params, self.vocab_size)
        logits = logits.to(torch.float32, copy=True)
        penalties.add_bias(logits, params)
        penalties.keep_allowed(logits, params)
        if row.grammar is not None:
            row.grammar.mask(logits)
        penalties.ban_ends(logits, params, row.eos_token_ids, len(row.output_token_ids))
        penalties.penalise(logits, params, row.prompt_token_ids, row.output_token_ids)
        penalties.ban_bad_words(logits, row.bad_word_ids, row.output_token_ids)
        return logits

    def _sampled(self, choice: int | RequestError, row: SamplingRow, logits: Tensor, score: Score | None) -> Sampled:
        if isinstance(choice, RequestError):
            logger.warning("row without a token: %s", choice.message)
            return Sampled(-1, error=choice.message, error_code=choice.code)
        if score is None:
            return Sampled(choice)
        return Sampled(choice, score.logprob, token_logprobs(logits, choice, score, row.params.logprobs or 0))


def _draw(index: int, largest: float, row: SamplingRow) -> Draw:
    params = row.params
    key = draw_key(row.seed, len(row.output_token_ids))
    return Draw(index, largest, key, params.temperature, params.top_k, params.top_p, params.min_p)
