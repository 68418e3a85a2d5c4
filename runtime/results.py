"""Results: what a finished request gives back, made of its sequences."""

from __future__ import annotations

import time
from typing import Any

from pagefleet.runtime.outputs import CompletionOutput, OutputError, RequestOutput, RequestTimings
from pagefleet.runtime.request import Request, Sequence
from pagefleet.runtime.text.tokenizer import Tokenizer


def request_output(request: Request, tokenizer: Tokenizer, error: OutputError | None = None) -> RequestOutput:
    """The output of a request whose sequences have all ended; with an error, what there is of them."""
    _name_tokens(request.prompt_logprobs or [], tokenizer)
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[_completion(s, tokenizer) for s in request.sequences],
        prompt_logprobs=request.prompt_logprobs,
        num_cached_tokens=request.sequences[0].num_cached,
        timings=RequestTimings(request.arrived, request.scheduled, request.first_token, time.monotonic()),
        error=error,
    )


def _completion(sequence: Sequence, tokenizer: Tokenizer) -> CompletionOutput:
    wants_logprobs = sequence.request.params.logprobs is not None
    _name_tokens(sequence.logprobs, tokenizer)
    return CompletionOutput(
        index=sequence.index,
        text=sequence.detokenizer.text if sequence.detokenizer is not None else "",
        token_ids=sequence.output_token_ids,
        cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
        logprobs=sequence.logprobs if wants_logprobs else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )


def _name_tokens(positions: list[Any], tokenizer: Tokenizer) -> None:
    """Fill in the tokens' texts."""
    for listed in positions:
        for token_id, logprob in (listed or {}).items():
            if logprob.decoded_token is None:
                object.__setattr__(logprob, "decoded_token", tokenizer.token_text(token_id))
