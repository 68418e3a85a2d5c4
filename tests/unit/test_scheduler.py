"""Promises of the scheduler on made-up sequences: no model, no device."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet.runtime.cache.manager import CacheManager
from pagefleet.runtime.config import SchedulerConfig, SpeculationConfig
from pagefleet.runtime.request import Request, Sequence, Status
from pagefleet.runtime.sampling_params import SamplingParams
from pagefleet.runtime.scheduler import Scheduler
from pagefleet.runtime.speculation.speculator import Speculator


def a_scheduler(blocks: int = 16, windows: tuple[int | None, ...] = (None,), **values: object) -> Scheduler:
    config = SchedulerConfig(**{"max_batched_tokens": 16, "max_sequences": 4, **values})  # type: ignore[arg-type]
    return Scheduler(config, CacheManager(list(windows), [blocks] * len(windows), block_size=2))


class Driver:
    """Steps a scheduler with made-up tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.sequences: list[Sequence] = []
        self.finished: list[int] = []

    def add(self, length: int, max_tokens: int, first: int = 1, arrived: float = 0.0) -> Sequence:
        number = len(self.sequences)
        prompt = [first + i % 3 for i in range(length)]
        request = Request(str(number), None, prompt, SamplingParams(), max_tokens, arrived=arrived)
        sequence = Sequence(request, 0, number, 0, list(prompt))
        request.sequences.append(sequence)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self, fail: bool = False) -> int:
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.config.max_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.config.max_sequences
        if fail:
            self.scheduler.rollback(plan)
            return 0
        self.scheduler.commit(plan)
        for entry in plan.scheduled:
            sequence = entry.sequence
            if sequence.num_computed == sequence.num_tokens:
                sequence.token_ids.append(100 + sequence.num_tokens)
                if sequence.num_output >= sequence.request.max_tokens:
                    self.scheduler.finish(sequence)
                    self.finished.append(sequence.number)
        return plan.num_tokens

    def run(self, limit: int = 2000) -> None:
        while self.scheduler.has_work:
            limit -= 1
            assert limit > 0, "the scheduler stalls"
            assert self.step() > 0, "a step with work waiting computed nothing"


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 14), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(0, 0), st.integers(0, 0)),
        st.tuples(st.just("fail"), st.integers(0, 0), st.integers(0, 0)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.integers(0, 0)),
    ),
    max_size=50,
)


@given(OPERATIONS, st.sampled_from([(None,), (None, 5), (4,)]), st.sampled_from([None, 3]))
@settings(max_examples=150, deadline=None)
def test_any_interleaving_ends_without_a_leak(
    operations: list[tuple[str, int, int]], windows: tuple[int | None, ...], chunk: int | None
) -> None:
    driver = Driver(a_scheduler(blocks=15, windows=windows, long_prefill_tokens=chunk))
    aborted = set()
    for kind, x, y in operations:
        if kind == "add":
            driver.add(x, y, first=1 + x % 2)
        elif kind == "abort" and x < len(driver.sequences):
            if driver.sequences[x].status is not Status.FINISHED:
                aborted.add(x)
            driver.scheduler.finish(driver.sequences[x])
        elif kind in ("step", "fail"):
            driver.step(fail=kind == "fail")
        driver.scheduler.cache.check()
    driver.run()
    cache = driver.scheduler.cache
    cache.check()
    assert all(pool.num_used == 0 for pool in cache.pools)
    assert sorted(driver.finished) == [s.number for s in driver.sequences if s.number not in aborted]


def test_two_long_sequences_in_a_pool_that_holds_one_both_end() -> None:
    driver = Driver(a_scheduler(blocks=11, reserve_ratio=0.0))
    driver.add(4, 16)
    driver.add(4, 16, first=5)
    driver.run()
    assert sorted(driver.finished) == [0, 1]
    assert driver.scheduler.num_preemptions > 0


def test_running_sequences_come_first_and_long_prompts_are_chunked() -> None:
    driver = Driver(a_scheduler(blocks=64, long_prefill_tokens=6, length_bucket=0))
    driver.add(3, 5)
    driver.step()
    driver.add(20, 1, first=7)
    plan = driver.scheduler.schedule()
    assert [(e.sequence.number, e.start, e.num_new) for e in plan.scheduled] == [(0, 3, 1), (1, 0, 6)]


def test_waiting_sequences_that_share_a_prefix_follow_one_another_shorter_buckets_first() -> None:
    driver = Driver(a_scheduler(blocks=200, max_sequences=1, length_bucket=8))
    for length, first in ((12, 1), (4, 50), (4, 1), (20, 50)):
        driver.add(length, 1, first=first)
    driver.run()
    assert driver.finished == [2, 0, 1, 3]


def test_the_longest_waiting_sequence_is_overtaken_a_bounded_number_of_times() -> None:
    driver = Driver(a_scheduler(blocks=200, max_sequences=1, length_bucket=4, max_skips=3))
    driver.add(15, 1)
    for _ in range(10):
        driver.add(2, 1)
    driver.run()
    assert driver.finished.index(0) == 3


def test_the_batching_timeout_holds_only_an_idle_engine_that_expects_more() -> None:
    driver = Driver(a_scheduler(batch_timeout_ms=100.0, max_sequences=2))
    driver.add(2, 3, arrived=10.0)
    assert driver.scheduler.holds(10.05, more_expected=True)
    assert not driver.scheduler.holds(10.05, more_expected=False)
    assert not driver.scheduler.holds(10.11, more_expected=True)
    driver.add(2, 3, arrived=10.0)
    assert not driver.scheduler.holds(10.05, more_expected=True), "a full batch does not wait"
    driver.step()
    driver.add(2, 3, arrived=20.0)
    assert not driver.scheduler.holds(20.0, more_expected=True), "with work running nothing waits"


def test_a_failed_step_leaves_tables_counts_and_order_as_they_were() -> None:
    driver = Driver(a_scheduler(blocks=64))
    driver.add(5, 4)
    driver.step()
    driver.add(6, 4, first=9)
    before = ([list(s.tables[0]) for s in driver.sequences], driver.scheduler.cache.pools[0].num_used)
    driver.step(fail=True)
    assert ([list(s.tables[0]) for s in driver.sequences], driver.scheduler.cache.pools[0].num_used) == before
    assert driver.sequences[1].status is Status.WAITING
    driver.run()
    assert sorted(driver.finished) == [0, 1]


def test_sequences_that_join_in_one_step_compute_their_shared_prefix_once() -> None:
    driver = Driver(a_scheduler(blocks=64, windows=(None, 6), max_batched_tokens=30))
    for length in (12, 13, 12):
        driver.add(length, 2)
    plan = driver.scheduler.schedule()
    assert [(e.start, e.num_new) for e in plan.scheduled] == [(0, 12), (12, 1), (10, 2)]
    first, second, third = (s.tables[0] for s in driver.sequences)
    assert second[:6] == first
    assert third[:5] == first[:5]
    assert third[5] != first[5], "the last token of a prompt is always computed"
    driver.scheduler.rollback(plan)
    assert all(pool.num_used == 0 for pool in driver.scheduler.cache.pools)
    driver.run()
    assert all(pool.num_used == 0 for pool in driver.scheduler.cache.pools)


def test_a_prefix_that_a_step_computes_in_part_is_shared_as_far_as_it_goes() -> None:
    driver = Driver(a_scheduler(blocks=64, long_prefill_tokens=7))
    driver.add(12, 2)
    driver.add(12, 2)
    plan = driver.scheduler.schedule()
    assert [(e.start, e.num_new) for e in plan.scheduled] == [(0, 7), (6, 6)]
    driver.scheduler.rollback(plan)
    driver.run()
    assert all(pool.num_used == 0 for pool in driver.scheduler.cache.pools)


# -- speculation -----------------------------------------------------------------------------------------------------


class AnyDraft(Speculator):
    """Drafts of any length; the driver's made-up tokens are 100 + position, and some drafted ones are not."""

    def __init__(self, seed: int) -> None:
        super().__init__(SpeculationConfig("ngram", num_tokens=5), frozenset())
        self._random = random.Random(seed)

    def draft(self, sequence: Sequence, room: int, num_running: int) -> tuple[int, ...]:
        count = self._random.randint(0, max(min(room, self.config.num_tokens), 0))
        wrong = self._random.randint(0, 2 * count)
        return tuple(100 + sequence.num_tokens + i if i != wrong else 99 for i in range(count))


class DraftingDriver(Driver):
    """Accepts what of a draft is right, as the engine does."""

    drafted = accepted = 0

    def step(self, fail: bool = False) -> int:
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.config.max_batched_tokens
        if fail:
            self.scheduler.rollback(plan)
            self.check_blocks()
            return 0
        self.scheduler.commit(plan)
        for entry in plan.scheduled:
            assert len(entry.token_ids) == entry.num_new
            if not entry.samples:
                assert not entry.draft
                continue
            self.drafted += len(entry.draft)
            self.append(entry.sequence)
            for token in entry.draft:
                if entry.sequence.token_ids[-1] != token or entry.sequence.status is Status.FINISHED:
                    break
                self.accepted += 1
                self.scheduler.confirm(entry.sequence)
                self.append(entry.sequence)
        self.scheduler.settle(plan)
        self.check_blocks()
        return plan.num_tokens

    def append(self, sequence: Sequence) -> None:
        sequence.token_ids.append(100 + sequence.num_tokens)
        if sequence.num_output == sequence.request.max_tokens:
            self.scheduler.finish(sequence)
            self.finished.append(sequence.number)

    def check_blocks(self) -> None:
        """Sequences own the blocks of their computed tokens and no more; hashed blocks hold what they say."""
        cache = self.scheduler.cache
        cache.check()
        for sequence in self.scheduler.running:
            for pool, window, table in zip(cache.pools, cache.windows, sequence.tables, strict=True):
                assert len(table) == cache.blocks_for(sequence.num_computed)
                slid = 0 if window is None else max(sequence.num_computed - window + 1, 0) // cache.block_size
                assert all(table[slid:]), "a block that is still seen was freed"
                for index, block in enumerate(table):
                    if pool.is_hashed(block):
                        assert 2 * index + 2 <= sequence.num_computed
                        assert pool.lookup(sequence.hashes[index], sequence.token_ids[2 * index : 2 * index + 2])


@given(OPERATIONS, st.sampled_from([(None,), (None, 5), (4,)]), st.sampled_from([None, 3]), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_drafts_leave_blocks_and_hashes_as_if_they_had_not_been(
    operations: list[tuple[str, int, int]], windows: tuple[int | None, ...], chunk: int | None, seed: int
) -> None:
    driver = DraftingDriver(a_scheduler(blocks=15, windows=windows, long_prefill_tokens=chunk))
    driver.scheduler.speculator = AnyDraft(seed)
    aborted = set()
    for kind, x, y in operations:
        if kind == "add":
            driver.add(x, y, first=1 + x % 2)
        elif kind == "abort" and x < len(driver.sequences):
            if driver.sequences[x].status is not Status.FINISHED:
                aborted.add(x)
            driver.scheduler.finish(driver.sequences[x])
        elif kind in ("step", "fail"):
            driver.step(fail=kind == "fail")
    driver.run()
    driver.scheduler.cache.check()
    assert all(pool.num_used == 0 for pool in driver.scheduler.cache.pools)
    assert sorted(driver.finished) == [s.number for s in driver.sequences if s.number not in aborted]
    assert all(s.num_output <= s.request.max_tokens for s in driver.sequences)


def test_every_accepted_draft_token_saves_a_step() -> None:
    steps = {}
    for seed in (None, 1):
        driver = DraftingDriver(a_scheduler(blocks=64))
        driver.scheduler.speculator = None if seed is None else AnyDraft(seed)
        driver.add(4, 40)
        steps[seed] = 0
        while driver.scheduler.has_work:
            driver.step()
            steps[seed] += 1
    assert 0 < driver.accepted < driver.drafted
    assert steps[1] == steps[None] - driver.accepted


def test_drafts_take_what_prompts_leave_of_the_budget_and_no_block_that_is_missing() -> None:
    driver = DraftingDriver(a_scheduler(blocks=64, max_batched_tokens=12))
    driver.add(6, 30)  # 1 2 3 1 2 3
    driver.step()
    driver.scheduler.speculator = Speculator(SpeculationConfig("ngram", first_chance=1.0), frozenset())
    sequence = driver.sequences[0]
    sequence.token_ids[-1:] = [1, 2, 3, 1]
    assert driver.scheduler.cache.reserve(sequence, 3)
    driver.scheduler.cache.commit(sequence, 3)
    driver.add(7, 5, first=50)
    plan = driver.scheduler.schedule()
    assert [(e.num_new, e.draft) for e in plan.scheduled] == [(5, (2, 3, 1, 2)), (7, ())]
    driver.scheduler.rollback(plan)
    driver.scheduler.finish(driver.sequences[1])
    pool = driver.scheduler.cache.pools[0]
    for left, expected in ((1, (2, 3)), (0, ())):  # blocks of two tokens; the newest token has its slot
        assert pool.allocate(pool.num_free - left) is not None
        plan = driver.scheduler.schedule()
        assert [e.draft for e in plan.scheduled] == [expected]
        driver.scheduler.rollback(plan)
    assert driver.scheduler.num_preemptions == driver.scheduler.cache.failed_reservations == 0
