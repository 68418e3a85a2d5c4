"""Engine: add requests, step until nothing is left. A step is a transaction: plan, run, commit or roll back."""

from __future__ import annotations

import logging
import time

import torch

from pagefleet.backends.base import OutOfMemory, out_of_memory_as_error
from pagefleet.runtime.batch import Batch, build_batch
from pagefleet.runtime.cache.manager import CacheManager
from pagefleet.runtime.config import SchedulerConfig, SpeculationConfig
from pagefleet.runtime.degrade import give_up_something
from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.intake import Intake
from pagefleet.runtime.metrics import EngineMetrics
from pagefleet.runtime.outputs import OutputError, RequestOutput
from pagefleet.runtime.request import Request, Sequence, Status, TokensAfter
from pagefleet.runtime.results import request_output
from pagefleet.runtime.runner import Runner
from pagefleet.runtime.sampling.logprobs import prompt_logprobs
from pagefleet.runtime.sampling.sampler import Sampled, Sampler, SamplingRow
from pagefleet.runtime.sampling_params import SamplingParams
from pagefleet.runtime.scheduler import Scheduler, StepPlan
from pagefleet.runtime.speculation.speculator import Speculator
from pagefleet.runtime.speculation.verify import Draw, standing
from pagefleet.runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_LOGPROB_ROWS = 128  # prompt positions whose logits exist at once


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
        speculation: SpeculationConfig | None = None,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.tokenizer = tokenizer
        self.metrics = EngineMetrics()
        self._device = device
        self._selection = runner.backend.ops().selection()
        self._sampler = Sampler(runner.model.vocab_size, self._selection)
        self._eos = runner.model.eos_token_ids | tokenizer.eos_token_ids
        speculator = Speculator(speculation, self._eos) if speculation and speculation.name != "none" else None
        self.scheduler = Scheduler(config, cache, speculator)
        self._intake = Intake(
            tokenizer,
            vocab_size=runner.model.vocab_size,
            eos_token_ids=self._eos,
            max_len=max_len,
            longest_in_cache=lambda: cache.max_tokens(max_len, self.scheduler.chunk),
            seed=seed,
        )
        self._requests: dict[str, Request] = {}
        self._ended: list[RequestOutput] = []
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
            request = self._intake.request(request_id, prompt, prompt_token_ids, params, salt)
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
        started, clock = time.monotonic(), self.metrics.clock
        clock.start()
        plan = self.scheduler.schedule()
        clock.end_of("schedule")
        if not plan.scheduled:
            self._nothing_scheduled()
            return
        try:
            with out_of_memory_as_error():
                batch = build_batch(plan, self.cache.block_size, self._device)
                clock.end_of("batch")
                hidden = self.runner.forward(batch)
                clock.end_of("model")
                self._score_prompts(plan, hidden)
                draws = self._draws(batch)
                sampled = self._sample(batch, hidden, draws)
                clock.end_of("sampling")
        except OutOfMemory as error:
            self.scheduler.rollback(plan)
            self._give_something_up(plan, error)
            return
        except BaseException:
            self.scheduler.rollback(plan)
            raise
        self.commit(plan, draws, sampled)
        clock.end_of("commit")
        self.metrics.step(time.monotonic() - started, self.cache.utilization(), self._fragmentation())

    def commit(self, plan: StepPlan, draws: list[Draw], sampled: list[Sampled]) -> None:
        """Record a step: hash new full blocks, fork, append the tokens that stand, stop, free."""
        now = time.monotonic()
        for sequence in plan.admitted:
            sequence.request.scheduled = sequence.request.scheduled or now
        self.scheduler.commit(plan)
        self._fork(draws)
        for draw, choice in standing(draws, sampled):
            if draw.ahead:
                if draw.sequence.status is Status.FINISHED:  # at one of the tokens before
                    continue
                self.scheduler.confirm(draw.sequence)
                self.metrics.accepted_tokens += 1
            self._append(draw.sequence, choice, now)
        self.scheduler.settle(plan)
        self.metrics.drafted_tokens += sum(len(entry.draft) for entry in plan.scheduled)
        for request in {id(d.sequence.request): d.sequence.request for d in draws}.values():
            if request.finished:
                self._give_back(request)

    # -- running -------------------------------------------------------------------------------------------------

    def _draws(self, batch: Batch) -> list[Draw]:
        """Who gets a token: a request's siblings take their first one from its first sequence's row."""
        draws: list[Draw] = []
        row = 0
        for entry in batch.sampling:
            for known in range(len(entry.draft) + 1):
                draws.append(Draw(entry.sequence, row + known, entry.draft[:known]))
            if entry.sequence.index == 0 and entry.sequence.num_output == 0:
                draws += [Draw(sibling, row) for sibling in entry.sequence.request.sequences[1:]]
            row += 1 + len(entry.draft)
        return draws

    def _sample(self, batch: Batch, hidden: torch.Tensor, draws: list[Draw]) -> list[Sampled]:
        if not draws:
            return []
        self.metrics.clock.end_of("sampling")
        logits = self.runner.logits(hidden, batch.sample_rows)
        self.metrics.clock.end_of("model")
        if len(draws) != len(logits):
            logits = logits[torch.tensor([d.row for d in draws], device=logits.device)]
        return self._sampler.sample(logits, [self._sampling_row(d) for d in draws])

    def _sampling_row(self, draw: Draw) -> SamplingRow:
        """A row's rule and state: as they will be if the drafted tokens before it come."""
        sequence = draw.sequence
        return SamplingRow(
            params=sequence.request.params,
            prompt_token_ids=sequence.request.prompt_token_ids,
            output_token_ids=TokensAfter(sequence.token_ids, sequence.num_prompt, draw.ahead),
            seed=sequence.seed,
            eos_token_ids=self._eos,
            bad_word_ids=sequence.request.bad_word_ids,
            grammar=None if sequence.grammar is None else sequence.grammar.after(draw.ahead),
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
                    done.extend(prompt_logprobs(self._selection, self.runner.logits(hidden, rows), targets, count))
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
        if any(entry.draft for entry in plan.scheduled):
            log.warning("a step did not fit in memory (%s); giving up: speculation; the step is retried", error)
            self.scheduler.speculator = None
            return
        humbler = give_up_something(self.scheduler.config, plan.num_tokens, len(plan.scheduled), str(error))
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
        self._end(request_output(request, self.tokenizer, error))

    def _end(self, output: RequestOutput) -> None:
        self.metrics.finish(output)
        self._ended.append(output)

    def _fragmentation(self) -> float:
        """Share of slots in used blocks that hold no token (last block of each sequence)."""
        slots = sum(len(s.tables[0]) for s in self.scheduler.running) * self.cache.block_size
        return 1 - sum(s.num_computed for s in self.scheduler.running) / slots if slots else 0.0
