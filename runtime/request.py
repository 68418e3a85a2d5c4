"""Request and Sequence: the state of what is being generated. Plain data; behaviour is in the scheduler and engine."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, overload

from pagefleet.runtime.outputs import Logprob
from pagefleet.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagefleet.runtime.speculation.speculator import Guesser
    from pagefleet.runtime.text.detokenizer import Detokenizer


class TokensAfter(Listed[int]):
    """The tokens of a list from `start` on and some that follow it, without a copy until they are read.

    A step needs their number for every row and the tokens for few. It must be read before the list grows.
    """

    __slots__ = ("_ahead", "_start", "_tokens")

    def __init__(self, tokens: list[int], start: int, ahead: tuple[int, ...] = ()) -> None:
        self._tokens, self._start, self._ahead = tokens, start, ahead

    def __len__(self) -> int:
        return len(self._tokens) - self._start + len(self._ahead)

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return [*self._tokens[self._start :], *self._ahead][index]


def block_table(blocks: Iterable[int] = ()) -> array[int]:
    """A block table that holds `blocks`."""
    return array("i", blocks)


class Status(Enum):
    """Life of a sequence: WAITING <-> RUNNING -> FINISHED."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """One continuation being generated for a request.

    Attributes:
        number: unique and increasing within an engine; also the order of arrival.
        num_computed: leading tokens whose KV is in the cache.
        hashes: prefix hashes of the full blocks so far, extended as tokens arrive.
        tables: per KV group, the block numbers in logical order (0 where a window slid past); arrays of C integers,
            which a batch takes over without converting them.
    """

    request: Request
    index: int
    number: int
    seed: int
    token_ids: list[int]
    status: Status = Status.WAITING
    num_computed: int = 0
    num_cached: int = 0
    hashes: list[bytes] = field(default_factory=list)
    tables: list[array[int]] = field(default_factory=list)
    detokenizer: Detokenizer | None = None
    grammar: Any = None
    guesser: Guesser | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far (a copy)."""
        return self.token_ids[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed


@dataclass(eq=False)
class Request:
    """One prompt with its sampling parameters.

    Attributes:
        max_tokens: resolved limit (the parameter's, cut by the model's length).
        sequences: the first one prefills the prompt; the others fork from it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    salt: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        """True when every sequence has ended."""
        return all(s.status is Status.FINISHED for s in self.sequences)
