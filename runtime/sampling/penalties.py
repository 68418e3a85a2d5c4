"""What changes the logits of one row before temperature: biases, bans, penalties, bad words. All work in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.sampling_params import SamplingParams
from pagefleet.runtime.text.tokenizer import Tokenizer

_NEVER = float("-inf")


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name tokens the model does not have.

    Raises:
        RequestError: INVALID_TOKEN.
    """
    named = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named.items():
        largest = max(ids, default=-1)
        if largest >= vocab_size:
            raise RequestError(
                ErrorCode.INVALID_TOKEN, f"{name}: token id {largest} does not exist; expected 0 to {vocab_size - 1}"
            )


def add_bias(logits: Tensor, params: SamplingParams) -> None:
    """Add `logit_bias` to logits [V], in place."""
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)


def keep_allowed(logits: Tensor, params: SamplingParams) -> None:
    """Ban every token that is not in `allowed_token_ids` in logits [V], in place."""
    if params.allowed_token_ids is not None:
        banned = torch.ones_like(logits, dtype=torch.bool)
        banned[torch.tensor(params.allowed_token_ids, device=logits.device)] = False
        logits.masked_fill_(banned, _NEVER)


def ban_ends(logits: Tensor, params: SamplingParams, eos_token_ids: frozenset[int], num_output: int) -> None:
    """Ban end-of-sequence and stop tokens in logits [V] until there are `min_tokens`, in place."""
    if num_output < params.min_tokens:
        ends = [i for i in eos_token_ids.union(params.stop_token_ids) if i < logits.shape[0]]
        logits[torch.tensor(ends, dtype=torch.int64, device=logits.device)] = _NEVER


def penalise(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Repetition penalty on tokens of prompt and output, then frequency and presence on the output's; [V], in place."""
    vocab_size = logits.shape[0]
    if params.repetition_penalty != 1.0:
        seen = _known({*prompt, *output}, vocab_size).to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = torch.unique(_known(output, vocab_size), return_counts=True)
        minus = counts.to(logits.dtype) * params.frequency_penalty + params.presence_penalty
        logits[ids.to(logits.device)] -= minus.to(logits.device)


def ban_bad_words(logits: Tensor, bad_word_ids: Sequence[tuple[int, ...]], output: Sequence[int]) -> None:
    """Ban the token that would complete a bad word in logits [V], in place."""
    for *prefix, last in bad_word_ids:
        before = len(prefix)
        if last < logits.shape[0] and before <= len(output) and list(output[len(output) - before :]) == prefix:
            logits[last] = _NEVER


def bad_word_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell the words, each as it reads at the start of a text and after a space."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip() or word, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        for sequence in (bare, spaced):
            ends_with_bare = len(sequence) > len(bare) and sequence[-len(bare) :] == bare
            if sequence and not ends_with_bare:
                sequences[sequence] = None
    return tuple(sequences)


def _known(ids: set[int] | Sequence[int], vocab_size: int) -> Tensor:
    tensor = torch.tensor(list(ids), dtype=torch.int64)
    return tensor[tensor < vocab_size]
