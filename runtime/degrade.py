"""What to give up, in order, when a step does not fit in memory. Every step down is logged once, with its reason."""

from __future__ import annotations

import logging
from dataclasses import replace

from pagefleet.runtime.config import SchedulerConfig

log = logging.getLogger(__name__)

_SMALLEST_BUDGET = 64


def give_up_something(config: SchedulerConfig, reason: str) -> SchedulerConfig | None:
    """A humbler configuration: first a smaller token budget, then fewer sequences. None if nothing is left."""
    if config.max_batched_tokens > _SMALLEST_BUDGET:
        humbler = replace(config, max_batched_tokens=max(config.max_batched_tokens // 2, _SMALLEST_BUDGET))
        what = f"max_batched_tokens {config.max_batched_tokens} -> {humbler.max_batched_tokens}"
    elif config.max_sequences > 1:
        humbler = replace(config, max_sequences=config.max_sequences // 2)
        what = f"max_sequences {config.max_sequences} -> {humbler.max_sequences}"
    else:
        return None
    log.warning("a step did not fit in memory (%s); giving up: %s; the step is retried", reason, what)
    return humbler
