"""Sampler: the next token of every row.

Order, as in vLLM: raw log-probabilities; logit bias, allowed tokens, grammar, min_tokens; penalties; bad words;
temperature; min_p; top-k; top-p; then a Gumbel-max draw with noise from (seed, position, token id).

Everything but the first argmax works on one row at a time: a row's token cannot depend on its neighbours.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.outputs import Logprob
from pagefleet.runtime.sampling import penalties
from pagefleet.runtime.sampling.grammar import Grammar
from pagefleet.runtime.sampling.logprobs import token_logprobs
from pagefleet.runtime.sampling.noise import draw_key, exponential
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
    output_token_ids: list[int]
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
    """Chooses tokens; holds no state that a draw depends on."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._token_ids: Tensor | None = None

    def sample(self, logits: Tensor, rows: list[SamplingRow]) -> list[Sampled]:
        """Choose one token for each row.

        Args:
            logits: fp32 [L, V]; left as they are.
            rows: L rows, in the same order.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(
                f"logits: expected shape {(len(rows), self.vocab_size)} for {len(rows)} rows, got {tuple(logits.shape)}"
            )
        if not rows:
            return []
        best, finite = _argmax_rows(logits)
        return [self._sample_row(logits[i], row, best[i], finite[i]) for i, row in enumerate(rows)]

    def _sample_row(self, logits: Tensor, row: SamplingRow, best: int, finite: bool) -> Sampled:
        try:
            if not finite:
                raise RequestError(
                    ErrorCode.INTERNAL,
                    "the model's logits hold NaN or infinity, or nothing finite, for this sequence; "
                    "try precision=fp32, and report the model if that fails too",
                )
            token_id = best if row.params.greedy and row.plain else self._choose(logits, row, best)
        except RequestError as error:
            logger.warning("row without a token: %s", error.message)
            return Sampled(-1, error=error.message, error_code=error.code)
        if row.params.logprobs is None:
            return Sampled(token_id)
        listed = token_logprobs(logits, token_id, row.params.logprobs)
        return Sampled(token_id, listed[token_id].logprob, listed)

    def _choose(self, logits: Tensor, row: SamplingRow, best: int) -> int:
        if not row.plain:
            logits = self._processed(logits, row)
            best = _argmax_rows(logits[None])[0][0]
        largest = float(logits[best])
        if not math.isfinite(largest):
            raise RequestError(
                ErrorCode.INVALID_VALUE,
                "no token is allowed here: allowed_token_ids, min_tokens, bad_words or the grammar exclude each other",
            )
        if row.params.greedy:
            return best
        scaled = logits.sub(largest).div_(row.params.temperature)
        ids, weights = _kept(self._all_ids(scaled), scaled, row.params)
        scores = weights.div_(exponential(draw_key(row.seed, len(row.output_token_ids)), ids))
        return int(ids[_argmax_rows(scores[None])[0][0]])

    def _processed(self, logits: Tensor, row: SamplingRow) -> Tensor:
        params = row.params
        penalties.check_token_ids(params, self.vocab_size)
        logits = logits.clone()
        penalties.add_bias(logits, params)
        penalties.keep_allowed(logits, params)
        if row.grammar is not None:
            row.grammar.mask(logits)
        penalties.ban_ends(logits, params, row.eos_token_ids, len(row.output_token_ids))
        penalties.penalise(logits, params, row.prompt_token_ids, row.output_token_ids)
        penalties.ban_bad_words(logits, row.bad_word_ids, row.output_token_ids)
        return logits

    def _all_ids(self, like: Tensor) -> Tensor:
        if self._token_ids is None or self._token_ids.device != like.device:
            self._token_ids = torch.arange(self.vocab_size, device=like.device)
        return self._token_ids


def _argmax_rows(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Per row: the lowest id with the largest logit (NaN counts as largest), and whether that logit is finite.

    numpy's is eight times as fast as torch's for tensors that it can read without a copy.
    """
    if logits.is_cpu:
        array = logits.detach().numpy()
        best = array.argmax(axis=1)
        return best.tolist(), np.isfinite(array[np.arange(len(best)), best]).tolist()
    largest = logits.argmax(dim=-1)
    return largest.tolist(), torch.isfinite(logits.gather(1, largest[:, None])).flatten().tolist()


def _kept(ids: Tensor, scaled: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """What min_p, top-k and top-p leave, in this order; what equals the last one kept stays too.

    Args:
        ids: [V] ascending.
        scaled: [V] logits over temperature, the largest being 0; overwritten.

    Returns:
        Ids, ascending, and their weights: probabilities over that of the most likely token.
    """
    floor = math.log(params.min_p) if params.min_p > 0.0 else float("-inf")
    if 0 < params.top_k < len(ids):
        floor = max(floor, float(torch.topk(scaled, params.top_k).values[-1]))
    if floor > float("-inf"):
        ids = (scaled >= floor).nonzero().flatten()
        scaled = scaled[ids]
    weights = scaled.exp_()
    if params.top_p >= 1.0:
        return ids, weights
    kept = (weights >= _nucleus_floor(weights, params.top_p)).nonzero().flatten()
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
