"""What to give up, in order, when a step does not fit in memory. Every step down is logged once, with its reason."""

from __future__ import annotations

import logging
from dataclasses import replace

from pagefleet.runtime.config import SchedulerConfig

log = logging.getLogger(__name__)

_SMALLEST_BUDGET = 64


def give_up_something(
    config: SchedulerConfig, num_tokens: int, num_sequences: int, reason: str
) -> SchedulerConfig | None:
    """A humbler configuration than the step of this many tokens and sequences that failed.

    First a smaller token budget, then fewer sequences at once; half of what the step had, so that the next one is
    smaller. None if nothing is left: one sequence alone was too much.
    """
    if num_tokens > _SMALLEST_BUDGET:
        humbler = replace(config, max_batched_tokens=max(num_tokens // 2, _SMALLEST_BUDGET))
        what = f"max_batched_tokens {config.max_batched_tokens} -> {humbler.max_batched_tokens}"
    elif num_sequences > 1:
        humbler = replace(config, max_sequences=num_sequences // 2)
        what = f"max_sequences {config.max_sequences} -> {humbler.max_sequences}"
    else:
        return None
    log.warning("a step did not fit in memory (%s); giving up: %s; the step is retried", reason, what)
    return humbler
