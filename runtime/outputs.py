"""What a request gives back; names follow vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagefleet.runtime.errors import ErrorCode


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token (before penalties and temperature), its rank (1 is the most likely), its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class OutputError:
    """Why a request has no answer."""

    code: ErrorCode
    message: str


@dataclass
class CompletionOutput:
    """One continuation.

    Attributes:
        finish_reason: "stop", "length", "abort" or "error"; None while running.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence or length.
        logprobs: per generated token, token id -> Logprob; None if not asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestTimings:
    """Seconds on a monotonic clock; None where the point was not reached."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass
class RequestOutput:
    """Result of one request. `error` is set for a request that could not be served; its outputs are then empty
    or partial, with finish_reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    timings: RequestTimings | None = None
    error: OutputError | None = None
