"""Scheduler: who runs in a step and with how many tokens. One rule, no phases: every sequence has tokens to compute.

Nothing is final until `commit`; `rollback` undoes a plan. Device-blind: it works on counts and block numbers only.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field, replace

from pagefleet.runtime.cache.manager import CacheManager
from pagefleet.runtime.config import SchedulerConfig
from pagefleet.runtime.request import Sequence, Status
from pagefleet.runtime.speculation.speculator import Speculator


@dataclass(frozen=True)
class Scheduled:
    """One sequence's share of a step: `num_new` tokens from position `start` on, the last ones of them a draft."""

    sequence: Sequence
    start: int
    num_new: int
    draft: tuple[int, ...] = ()

    @property
    def num_sure(self) -> int:
        """Tokens without the draft: their KV stays whatever is chosen."""
        return self.num_new - len(self.draft)

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the step computes."""
        return [*self.sequence.token_ids[self.start : self.start + self.num_sure], *self.draft]

    @property
    def samples(self) -> bool:
        """True if the step reaches the sequence's last token, so that a next one is chosen."""
        return self.start + self.num_sure == self.sequence.num_tokens


@dataclass
class StepPlan:
    """What the scheduler decided for a step."""

    scheduled: list[Scheduled] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(s.num_new for s in self.scheduled)


class WaitingQueue:
    """Sequences that wait, preempted ones first, the rest by shared prefix, then length bucket, with ageing.

    Sequences whose first tokens are equal follow one another, so that the first one's blocks serve the others. The
    one that waits longest is overtaken at most `max_skips` times.
    """

    def __init__(self, config: SchedulerConfig, prefix_tokens: int) -> None:
        self.config = config
        self._prefix_tokens = prefix_tokens
        self._preempted: list[tuple[int, Sequence]] = []
        self._heap: list[tuple[int, int, int, Sequence]] = []
        self._arrivals: deque[Sequence] = deque()
        self._families: dict[tuple[int, ...], list[int]] = {}
        self._waiting: set[int] = set()
        self._fresh: set[int] = set()  # of those, the ones that have not run
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has not run yet."""
        self._waiting.add(sequence.number)
        self._fresh.add(sequence.number)
        self._arrivals.append(sequence)
        family = self._families.setdefault(self._family(sequence), [sequence.number, 0])
        family[1] += 1
        bucket = sequence.num_tokens // self.config.length_bucket if self.config.length_bucket else 0
        order = family[0] if self.config.length_bucket else sequence.number
        heapq.heappush(self._heap, (order, bucket, sequence.number, sequence))

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue a sequence that ran and lost its blocks: it goes before all that have not run."""
        self._waiting.add(sequence.number)
        heapq.heappush(self._preempted, (sequence.number, sequence))

    def peek(self) -> Sequence | None:
        """The next to be admitted, or None."""
        while self._preempted and self._preempted[0][-1].number not in self._waiting:
            heapq.heappop(self._preempted)
        if self._preempted:
            return self._preempted[0][-1]
        while self._arrivals and self._arrivals[0].number not in self._fresh:
            self._arrivals.popleft()
            self._overtaken = 0
        while self._heap and self._heap[0][-1].number not in self._fresh:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        if self._overtaken >= self.config.max_skips:
            return self._arrivals[0]
        return self._heap[0][-1]

    def oldest(self) -> Sequence | None:
        """The one that waits longest, or None."""
        self.peek()
        return self._preempted[0][-1] if self._preempted else (self._arrivals[0] if self._arrivals else None)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, because it is admitted or aborted."""
        if sequence.number not in self._waiting:
            return
        self._waiting.discard(sequence.number)
        if sequence.number not in self._fresh:
            return
        self._fresh.discard(sequence.number)
        key = self._family(sequence)
        self._families[key][1] -= 1
        if self._families[key][1] == 0:
            del self._families[key]
        self._overtaken = 0 if sequence is self._arrivals[0] else self._overtaken + 1

    def prompt_tokens(self) -> int:
        """Tokens that wait (an upper bound, used by the batching timeout)."""
        return sum(s.num_tokens for s in self._arrivals if s.number in self._fresh)

    def _family(self, sequence: Sequence) -> tuple[int, ...]:
        return tuple(sequence.token_ids[: self._prefix_tokens])


class Scheduler:
    """Shares each step's token budget out: running sequences first, oldest first, then waiting ones.

    When blocks run out the youngest running sequence is preempted (its blocks stay hashed) and recomputed later.
    Drafts take only what all of them leave of the budget, and no block that anyone had to give up.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheManager, speculator: Speculator | None = None) -> None:
        self.config = config
        self.cache = cache
        self.speculator = speculator
        self.waiting = WaitingQueue(config, prefix_tokens=cache.block_size)
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """True while anything runs or waits."""
        return bool(self.running) or len(self.waiting) > 0

    def configure(self, config: SchedulerConfig) -> None:
        """Use other limits from the next step on; sequences beyond them are preempted, the youngest first."""
        self.config = config
        self.waiting.config = config
        while len(self.running) > config.max_sequences:
            self._preempt(self.running[-1])

    @property
    def chunk(self) -> int:
        """Most tokens of one sequence in a step."""
        limit = self.config.long_prefill_tokens
        return self.config.max_batched_tokens if limit is None else min(limit, self.config.max_batched_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that can run once there is room."""
        sequence.tables = self.cache.no_blocks()
        self.waiting.add(sequence)

    def holds(self, now: float, more_expected: bool) -> bool:
        """True if an idle engine should wait for its batch to fill; with work running nothing waits."""
        oldest = self.waiting.oldest()
        if not more_expected or self.running or oldest is None:
            return False
        full = len(self.waiting) >= self.config.max_sequences
        full = full or self.waiting.prompt_tokens() >= self.config.max_batched_tokens
        return not full and now - oldest.request.arrived < self.config.batch_timeout_ms / 1000

    def schedule(self) -> StepPlan:
        """Decide the next step and reserve its blocks."""
        plan = StepPlan()
        self.cache.begin_step()
        budget = self.config.max_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            num_new = min(sequence.remaining, self.chunk, budget)
            if not self.cache.reserve(sequence, num_new):
                preempted = True
                self._preempt(self.running[-1])
                continue  # the same index again: the victim may have been this sequence itself
            self.cache.announce(sequence, num_new)
            plan.scheduled.append(Scheduled(sequence, sequence.num_computed, num_new))
            budget -= num_new
            index += 1
        if not preempted:
            self._admit(plan, budget)
            self._speculate(plan)
        return plan

    def rollback(self, plan: StepPlan) -> None:
        """Undo `schedule`: blocks are given back, admitted sequences wait again."""
        for entry in plan.scheduled:
            self.cache.rollback(entry.sequence)
        for sequence in reversed(plan.admitted):
            self.running.remove(sequence)
            self.cache.free(sequence)
            sequence.status = Status.WAITING
            self.waiting.add_preempted(sequence)

    def commit(self, plan: StepPlan) -> None:
        """The step's KV is in the cache; that of drafts counts only when `confirm` says so."""
        for entry in plan.scheduled:
            self.cache.commit(entry.sequence, entry.num_sure)
        self._count_hits(plan)

    def confirm(self, sequence: Sequence) -> None:
        """The last token of `sequence` was in its draft: its KV is in the cache too."""
        self.cache.commit(sequence, 1)

    def settle(self, plan: StepPlan) -> None:
        """Nothing more is confirmed: blocks that only refused drafts needed are given back."""
        for entry in plan.scheduled:
            if entry.draft:
                self.cache.rollback(entry.sequence)

    def fork(self, parent: Sequence, child: Sequence, copies: list[list[tuple[int, int]]]) -> None:
        """Start `child` from its parent's cache; without a free block or place it waits and recomputes."""
        child.tables = self.cache.no_blocks()
        if len(self.running) < self.config.max_sequences and self.cache.fork(parent, child, copies):
            child.status = Status.RUNNING
            self._insert(child)
        else:
            child.status = Status.WAITING
            self.waiting.add_preempted(child)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it was doing, and free its blocks."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self.cache.free(sequence)
        sequence.status = Status.FINISHED

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and len(self.running) < self.config.max_sequences:
            sequence = self.waiting.peek()
            if sequence is None:
                return
            hit = self.cache.match(sequence)
            growth = self._growth_of_running()
            if not self.cache.fits(sequence, hit, growth, self.chunk):
                return
            self.cache.attach(sequence, hit)
            num_new = min(sequence.remaining, self.chunk, budget)
            if not self.cache.reserve(sequence, num_new):
                self.cache.free(sequence)
                return
            self.cache.announce(sequence, num_new)
            self.waiting.remove(sequence)
            sequence.status = Status.RUNNING
            self._insert(sequence)
            plan.admitted.append(sequence)
            plan.scheduled.append(Scheduled(sequence, sequence.num_computed, num_new))
            budget -= num_new

    def _count_hits(self, plan: StepPlan) -> None:
        """Prompt tokens that were looked up in the cache, and found, by the sequences that started in this step."""
        new = {sequence.number for sequence in plan.admitted if sequence.preemptions == 0}
        for entry in plan.scheduled:
            if entry.sequence.number in new:
                self.cache.queried_tokens += entry.sequence.num_tokens
                self.cache.hit_tokens += entry.start

    def _speculate(self, plan: StepPlan) -> None:
        """Add drafts to sequences that compute one token, the newest of their output."""
        if self.speculator is None:
            return
        left = min(self.config.max_batched_tokens - plan.num_tokens, self.speculator.config.most_rows)
        for index, entry in enumerate(plan.scheduled):
            sequence = entry.sequence
            if entry.num_new > 1 or not entry.samples or sequence.num_output == 0:
                continue
            most = min(self.chunk, sequence.request.max_tokens - sequence.num_output, self.cache.room(sequence))
            draft = self.speculator.draft(sequence, min(left, most - 1), len(self.running))
            if draft and self.cache.reserve(sequence, 1 + len(draft)):
                plan.scheduled[index] = replace(entry, num_new=1 + len(draft), draft=draft)
                left -= len(draft)

    def _growth_of_running(self) -> int:
        """Tokens to keep free: what running sequences still have to compute, and a share of what they may generate."""
        growth = 0.0
        for s in self.running:
            growth += s.remaining + self.config.reserve_ratio * max(s.request.max_tokens - s.num_output, 0)
        return int(growth)

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self.cache.free(victim)
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.num_preemptions += 1
        self.waiting.add_preempted(victim)

    def _insert(self, sequence: Sequence) -> None:
        """Keep `running` ordered by arrival, so that the last one is the youngest."""
        position = len(self.running)
        while position > 0 and self.running[position - 1].number > sequence.number:
            position -= 1
        self.running.insert(position, sequence)
