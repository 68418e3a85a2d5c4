"""Intake: from what a user asked to a Request with its sequences, or to the reason why it can never be served."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.request import Request, Sequence
from pagefleet.runtime.sampling.grammar import GrammarFactory
from pagefleet.runtime.sampling.penalties import bad_word_sequences
from pagefleet.runtime.sampling_params import SamplingParams
from pagefleet.runtime.text.detokenizer import Detokenizer
from pagefleet.runtime.text.tokenizer import Tokenizer


class Intake:
    """Checks requests and gives each of their sequences its number, seed, grammar and detokenizer.

    Args:
        max_len: longest sequence of the model, in tokens.
        longest_in_cache: how many tokens of a lone sequence the KV cache holds now, at most `max_len`.
        seed: of requests that name none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_len: int,
        longest_in_cache: Callable[[], int],
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._max_len = max_len
        self._longest_in_cache = longest_in_cache
        self._seed = seed
        self._grammars: GrammarFactory | None = None
        self._next_number = 0

    def request(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, salt: str
    ) -> Request:
        """A request that can be served.

        Raises:
            RequestError: it can never be, and why.
        """
        max_tokens = self._token_limit(prompt_token_ids, params)
        bad_words = bad_word_sequences(self._tokenizer, params.bad_words)
        request = Request(request_id, prompt, prompt_token_ids, params, max_tokens, salt, bad_words)
        seed = params.seed if params.seed is not None else _derived_seed(self._seed, request_id)
        grammar = None if params.structured is None else self._grammar_factory().compile(params.structured)
        for index in range(params.n):
            sequence = Sequence(request, index, self._next_number, _fork_seed(seed, index), list(prompt_token_ids))
            self._next_number += 1
            sequence.grammar = None if grammar is None else grammar.fork()
            sequence.detokenizer = Detokenizer(
                self._tokenizer,
                prompt_token_ids,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            request.sequences.append(sequence)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        return request

    def _token_limit(self, prompt: list[int], params: SamplingParams) -> int:
        """How many tokens the request may generate. Raises RequestError if it can never be served."""
        length = len(prompt)
        if length == 0:
            raise RequestError(ErrorCode.EMPTY_PROMPT, "the prompt has no tokens; expected at least one")
        named = [*prompt, *params.logit_bias, *params.stop_token_ids, *(params.allowed_token_ids or ())]
        bad = next((t for t in named if not 0 <= t < self._vocab_size), None)
        if bad is not None:
            raise RequestError(
                ErrorCode.INVALID_TOKEN,
                f"token id {bad} is outside the vocabulary; expected 0 to {self._vocab_size - 1}",
            )
        if length >= self._max_len:
            raise RequestError(
                ErrorCode.PROMPT_TOO_LONG,
                f"the prompt has {length} tokens; at most {self._max_len - 1} leave room for an answer in "
                f"model.max_len={self._max_len}; shorten it or raise model.max_len",
            )
        room = self._longest_in_cache() - length
        most = self._max_len - length
        wanted = most if params.max_tokens is None else min(params.max_tokens, most)
        if room < 1 or (params.max_tokens is not None and wanted > room):
            raise RequestError(
                ErrorCode.NEVER_FITS,
                f"{length} prompt tokens and {wanted} new ones can never fit in the KV cache, which holds "
                f"{length + room} tokens of one sequence; lower max_tokens or raise cache.memory",
            )
        return min(wanted, room)

    def _grammar_factory(self) -> GrammarFactory:
        if self._grammars is None:
            eos = self._tokenizer.hf.eos_token_id
            self._grammars = GrammarFactory(self._tokenizer, min(self._eos) if eos is None else eos)
        return self._grammars


def _derived_seed(seed: int, request_id: str) -> int:
    """Seed of a request that names none: the same for the same engine seed and request id, whatever else runs."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{request_id}".encode()).digest()[:8], "little") >> 1


def _fork_seed(seed: int, index: int) -> int:
    """Seed of a request's sequence `index`; the first one keeps the request's."""
    return seed if index == 0 else _derived_seed(seed, f"fork {index}")
