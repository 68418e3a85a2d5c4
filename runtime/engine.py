"""Engine: add requests, step until nothing is left. A step is a transaction: plan, run, commit or roll back."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from pagefleet.backends.base import OutOfMemory
from pagefleet.runtime.batch import Batch, build_batch
from pagefleet.runtime.cache.manager import CacheManager
from pagefleet.runtime.config import SchedulerConfig
from pagefleet.runtime.degrade import give_up_something
from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.metrics import EngineMetrics
from pagefleet.runtime.outputs import CompletionOutput, OutputError, RequestOutput, RequestTimings
from pagefleet.runtime.request import Request, Sequence, Status
from pagefleet.runtime.runner import Runner
from pagefleet.runtime.sampling.grammar import GrammarFactory
from pagefleet.runtime.sampling.logprobs import prompt_logprobs
from pagefleet.runtime.sampling.penalties import bad_word_sequences
from pagefleet.runtime.sampling.sampler import Sampled, Sampler, SamplingRow
from pagefleet.runtime.sampling_params import SamplingParams
from pagefleet.runtime.scheduler import Scheduler, StepPlan
from pagefleet.runtime.text.detokenizer import Detokenizer
from pagefleet.runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_LOGPROB_ROWS = 128  # prompt positions whose logits exist at once


@dataclass(frozen=True)
class Draw:
    """One sequence that gets a next token from row `row` of the step's logits."""

    sequence: Sequence
    row: int


class Engine:
    """One model on one device: the scheduler decides, the runner computes, the sampler chooses, commit records.

    Not thread-safe: one thread adds, steps and aborts.
    """

    def __init__(
        self,
        runner: Runner,
        cache: CacheManager,
        config: SchedulerConfig,
        tokenizer: Tokenizer,
        *,
        max_len: int,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.scheduler = Scheduler(config, cache)
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.metrics = EngineMetrics()
        self._device = device
        self._seed = seed
        self._sampler = Sampler(runner.model.vocab_size)
        self._eos = runner.model.eos_token_ids | tokenizer.eos_token_ids
        self._grammars: GrammarFactory | None = None
        self._requests: dict[str, Request] = {}
        self._ended: list[RequestOutput] = []
        self._next_number = 0
        self._last_token_at: dict[int, float] = {}

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """True while a step would give something."""
        return bool(self._requests or self._ended)

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and not yet given back."""
        return len(self._requests) + len(self._ended)

    @property
    def request_ids(self) -> list[str]:
        """Ids of requests that wait or run."""
        return list(self._requests)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        salt: str = "",
    ) -> None:
        """Queue a request. One that can never be served ends as an error output of the next step.

        Raises:
            ValueError: the id is in use.
        """
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; expected a new one")
        try:
            request = self._checked(request_id, prompt, prompt_token_ids, params, salt)
        except RequestError as error:
            self.reject(request_id, prompt, prompt_token_ids, error)
            return
        self._requests[request_id] = request
        self.scheduler.add(request.sequences[0])

    def reject(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], error: RequestError) -> None:
        """Give back an error output for a request that was never queued."""
        self._end(RequestOutput(request_id, prompt, prompt_token_ids, error=OutputError(error.code, error.message)))

    def abort(self, request_id: str) -> bool:
        """Stop a request; what it has so far comes back with finish_reason "abort". False if there is none."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._finish(sequence, "abort")
        self._give_back(request)
        return True

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self, more_expected: bool = False) -> list[RequestOutput]:
        """Run one step and return the requests that ended.

        Args:
            more_expected: the caller may add requests soon; an idle engine then waits, at most the batching timeout,
                for its batch to fill.

        Raises:
            Exception: whatever a failed forward raised; the cache is then as it was before the step.
        """
        if self.scheduler.has_work and not self.scheduler.holds(time.monotonic(), more_expected):
            self._run_step()
        ended, self._ended = self._ended, []
        return ended

    def _run_step(self) -> None:
        started = time.monotonic()
        plan = self.scheduler.schedule()
        if not plan.scheduled:
            self._nothing_scheduled()
            return
        try:
            batch = build_batch(plan, self.cache.block_size, self._device)
            hidden = self.runner.forward(batch)
            self._score_prompts(plan, hidden)
            draws = self._draws(batch)
            sampled = self._sample(batch, hidden, draws)
        except OutOfMemory as error:
            self.scheduler.rollback(plan)
            self._give_something_up(plan, error)
            return
        except BaseException:
            self.scheduler.rollback(plan)
            raise
        self.commit(plan, draws, sampled)
        self.metrics.step(time.monotonic() - started, self.cache.utilization(), self._fragmentation())

    def commit(self, plan: StepPlan, draws: list[Draw], sampled: list[Sampled]) -> None:
        """Record a step: hash new full blocks, fork, append tokens, stop, free."""
        now = time.monotonic()
        for sequence in plan.admitted:
            sequence.request.scheduled = sequence.request.scheduled or now
        self.scheduler.commit(plan)
        self._fork(draws)
        for draw, choice in zip(draws, sampled, strict=True):
            self._append(draw.sequence, choice, now)
        for request in {id(d.sequence.request): d.sequence.request for d in draws}.values():
            if request.finished:
                self._give_back(request)

    # -- adding --------------------------------------------------------------------------------------------------

    def _checked(
        self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, salt: str
    ) -> Request:
        max_tokens = self._token_limit(prompt_token_ids, params)
        bad_words = bad_word_sequences(self.tokenizer, params.bad_words)
        request = Request(request_id, prompt, prompt_token_ids, params, max_tokens, salt, bad_words)
        seed = params.seed if params.seed is not None else _derived_seed(self._seed, request_id)
        grammar = None if params.structured is None else self._grammar_factory().compile(params.structured)
        for index in range(params.n):
            sequence = Sequence(request, index, self._next_number, _fork_seed(seed, index), list(prompt_token_ids))
            self._next_number += 1
            sequence.grammar = None if grammar is None else grammar.fork()
            sequence.detokenizer = Detokenizer(
                self.tokenizer,
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
        vocabulary = self.runner.model.vocab_size
        named = [*prompt, *params.logit_bias, *params.stop_token_ids, *(params.allowed_token_ids or ())]
        bad = next((t for t in named if not 0 <= t < vocabulary), None)
        if bad is not None:
            raise RequestError(
                ErrorCode.INVALID_TOKEN, f"token id {bad} is outside the vocabulary; expected 0 to {vocabulary - 1}"
            )
        if length >= self.max_len:
            raise RequestError(
                ErrorCode.PROMPT_TOO_LONG,
                f"the prompt has {length} tokens; at most {self.max_len - 1} leave room for an answer in "
                f"model.max_len={self.max_len}; shorten it or raise model.max_len",
            )
        room = self.cache.max_tokens(self.max_len, self.scheduler.chunk) - length
        wanted = self.max_len - length if params.max_tokens is None else min(params.max_tokens, self.max_len - length)
        if room < 1 or (params.max_tokens is not None and wanted > room):
            raise RequestError(
                ErrorCode.NEVER_FITS,
                f"{length} prompt tokens and {wanted} new ones can never fit in the KV cache, which holds "
                f"{length + room} tokens of one sequence; lower max_tokens or raise cache.memory",
            )
        return min(wanted, room)

    def _grammar_factory(self) -> GrammarFactory:
        if self._grammars is None:
            eos = self.tokenizer.hf.eos_token_id
            self._grammars = GrammarFactory(self.tokenizer, min(self._eos) if eos is None else eos)
        return self._grammars

    # -- running -------------------------------------------------------------------------------------------------

    def _draws(self, batch: Batch) -> list[Draw]:
        """Who gets a token: a request's siblings take their first one from its first sequence's row."""
        draws = []
        for row, entry in enumerate(batch.sampling):
            draws.append(Draw(entry.sequence, row))
            if entry.sequence.index == 0 and entry.sequence.num_output == 0:
                draws += [Draw(sibling, row) for sibling in entry.sequence.request.sequences[1:]]
        return draws

    def _sample(self, batch: Batch, hidden: torch.Tensor, draws: list[Draw]) -> list[Sampled]:
        if not draws:
            return []
        logits = self.runner.logits(hidden, batch.sample_rows)
        if len(draws) != len(batch.sampling):
            logits = logits[torch.tensor([d.row for d in draws], device=logits.device)]
        return self._sampler.sample(logits, [self._sampling_row(d.sequence) for d in draws])

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        params = sequence.request.params
        return SamplingRow(
            params=params,
            prompt_token_ids=sequence.request.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            seed=sequence.seed,
            eos_token_ids=self._eos,
            bad_word_ids=sequence.request.bad_word_ids,
            grammar=sequence.grammar,
        )

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Log-probabilities of prompt tokens, for the requests that ask; a recomputed chunk is not scored twice."""
        offset = 0
        for entry in plan.scheduled:
            request, done = entry.sequence.request, entry.sequence.request.prompt_logprobs
            if done is not None and entry.sequence.index == 0:
                first = max(entry.start, len(done) - 1)
                last = min(entry.start + entry.num_new, len(request.prompt_token_ids) - 1)
                for position in range(first, last, _LOGPROB_ROWS):
                    end = min(position + _LOGPROB_ROWS, last)
                    rows = torch.arange(position, end, device=hidden.device) - entry.start + offset
                    targets = request.prompt_token_ids[position + 1 : end + 1]
                    count = request.params.prompt_logprobs or 0
                    done.extend(prompt_logprobs(self.runner.logits(hidden, rows), targets, count))
            offset += entry.num_new

    def _nothing_scheduled(self) -> None:
        """Nothing could be scheduled though something waits: with nothing running that is a fault, never a stall."""
        stuck = self.scheduler.waiting.peek()
        if stuck is None or self.scheduler.running:
            return
        self._fail(
            stuck.request,
            RequestError(
                ErrorCode.NEVER_FITS,
                f"{stuck.num_tokens} tokens do not fit in the empty KV cache; raise cache.memory",
            ),
        )

    def _give_something_up(self, plan: StepPlan, error: OutOfMemory) -> None:
        humbler = give_up_something(self.scheduler.config, str(error))
        if humbler is not None:
            self.scheduler.configure(humbler)
            return
        message = f"the device ran out of memory with this request alone: {error}"
        self._fail(plan.scheduled[0].sequence.request, RequestError(ErrorCode.OUT_OF_MEMORY, message))

    # -- committing ----------------------------------------------------------------------------------------------

    def _fork(self, draws: list[Draw]) -> None:
        copies: list[list[tuple[int, int]]] = [[] for _ in self.cache.pools]
        for draw in draws:
            sequence = draw.sequence
            if sequence.index > 0 and sequence.num_output == 0 and not sequence.tables:
                self.scheduler.fork(sequence.request.sequences[0], sequence, copies)
        self.runner.copy_blocks(copies)

    def _append(self, sequence: Sequence, choice: Sampled, now: float) -> None:
        request, params = sequence.request, sequence.request.params
        if choice.error is not None:
            self._fail(request, RequestError(choice.error_code or ErrorCode.INTERNAL, choice.error))
            return
        if sequence.status is Status.FINISHED:  # a sibling's row failed, and the request with it
            return
        sequence.token_ids.append(choice.token_id)
        self.metrics.output_tokens += 1
        if request.first_token is None:
            request.first_token = now
            self.metrics.time_to_first_token.add(now - request.arrived)
        if sequence.number in self._last_token_at:
            self.metrics.inter_token_latency.add(now - self._last_token_at[sequence.number])
        self._last_token_at[sequence.number] = now
        if choice.logprobs is not None and params.logprobs is not None:
            sequence.logprobs.append(choice.logprobs)
            sequence.cumulative_logprob += choice.logprob or 0.0
        if sequence.grammar is not None and choice.token_id not in self._eos:
            try:
                sequence.grammar.accept(choice.token_id)
            except RequestError as error:
                self._fail(request, error)
                return
        self._stop_if_done(sequence, choice.token_id)

    def _stop_if_done(self, sequence: Sequence, token_id: int) -> None:
        request, params, detokenizer = sequence.request, sequence.request.params, sequence.detokenizer
        assert detokenizer is not None
        free_to_stop = sequence.num_output >= params.min_tokens
        by_token = free_to_stop and token_id in params.stop_token_ids
        by_eos = free_to_stop and not params.ignore_eos and token_id in self._eos
        if by_token or by_eos:
            if params.include_stop_str_in_output:
                detokenizer.push(token_id)
            self._finish(sequence, "stop", token_id if by_token else None)
            return
        stop = detokenizer.push(token_id)
        if stop is not None:
            self._finish(sequence, "stop", stop)
        elif sequence.grammar is not None and sequence.grammar.finished:
            self._finish(sequence, "stop")
        elif sequence.num_output >= request.max_tokens:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: str, stop_reason: str | int | None = None) -> None:
        self.scheduler.finish(sequence)
        self._last_token_at.pop(sequence.number, None)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if sequence.detokenizer is not None and not isinstance(stop_reason, str):
            sequence.detokenizer.finish()

    def _fail(self, request: Request, error: RequestError) -> None:
        """End a whole request with an error; what it has so far comes along."""
        if request.request_id not in self._requests:
            return
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._finish(sequence, "error")
        self._give_back(request, OutputError(error.code, error.message))

    def _give_back(self, request: Request, error: OutputError | None = None) -> None:
        if self._requests.pop(request.request_id, None) is None:
            return
        self._name_tokens(request.prompt_logprobs or [])
        timings = RequestTimings(request.arrived, request.scheduled, request.first_token, time.monotonic())
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(s) for s in request.sequences],
            prompt_logprobs=request.prompt_logprobs,
            num_cached_tokens=request.sequences[0].num_cached,
            timings=timings,
            error=error,
        )
        self._end(output)

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        wants_logprobs = sequence.request.params.logprobs is not None
        self._name_tokens(sequence.logprobs)
        return CompletionOutput(
            index=sequence.index,
            text=sequence.detokenizer.text if sequence.detokenizer is not None else "",
            token_ids=sequence.output_token_ids,
            cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
            logprobs=sequence.logprobs if wants_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _name_tokens(self, positions: list[Any]) -> None:
        """Fill in the tokens' texts."""
        for listed in positions:
            for token_id, logprob in (listed or {}).items():
                if logprob.decoded_token is None:
                    object.__setattr__(logprob, "decoded_token", self.tokenizer.token_text(token_id))

    def _end(self, output: RequestOutput) -> None:
        self.metrics.finish(output)
        self._ended.append(output)

    def _fragmentation(self) -> float:
        """Share of slots in used blocks that hold no token (last block of each sequence)."""
        slots = sum(len(s.tables[0]) for s in self.scheduler.running) * self.cache.block_size
        return 1 - sum(s.num_computed for s in self.scheduler.running) / slots if slots else 0.0


def _derived_seed(seed: int, request_id: str) -> int:
    """Seed of a request that names none: the same for the same engine seed and request id, whatever else runs."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{request_id}".encode()).digest()[:8], "little") >> 1


def _fork_seed(seed: int, index: int) -> int:
    """Seed of a request's sequence `index`; the first one keeps the request's."""
    return seed if index == 0 else _derived_seed(seed, f"fork {index}")
