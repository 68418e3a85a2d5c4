"""The schema of `conf/`: dataclasses that check themselves. Imports no torch, so a wrong value is known at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """Which model. `path` is a checkpoint folder, a GGUF file, or a hub id."""

    path: str = ""
    revision: str | None = None
    tokenizer: str | None = None
    max_len: int | None = None
    trust_remote_code: bool = False


@dataclass
class BackendConfig:
    """Which device; `auto` explains its choice."""

    name: str = "auto"
    threads: int | None = None
    attention: str = "auto"


@dataclass
class PrecisionConfig:
    """Compute dtype of weights and activations; `exact` makes rows independent of what runs beside them, bit for bit."""

    name: str = "auto"
    exact: bool = False


@dataclass
class CacheConfig:
    """The paged KV cache. `memory` is a size ("2GiB") or None for a fraction of what is free."""

    dtype: str = "auto"
    block_size: int = 16
    memory: str | None = None
    memory_fraction: float = 0.8
    num_blocks: int | None = None
    prefix_caching: bool = True
    quant_group_size: int | None = None
    window: int | None = None
    sink_tokens: int = 4


@dataclass
class SchedulerConfig:
    """Token budget and batching.

    Attributes:
        max_batched_tokens: tokens one step may compute.
        max_sequences: sequences that run at once.
        long_prefill_tokens: most prompt tokens of one sequence in a step; None: the budget.
        batch_timeout_ms: how long an idle engine waits for a batch to fill.
        length_bucket: waiting requests are ordered by prompt length in buckets of this many tokens (0: arrival order).
        max_skips: after this many overtakings a waiting request goes first.
        reserve_ratio: share of the remaining max_tokens of running sequences that admission keeps free.
    """

    max_batched_tokens: int = 2048
    max_sequences: int = 256
    long_prefill_tokens: int | None = None
    batch_timeout_ms: float = 100.0
    length_bucket: int = 256
    max_skips: int = 64
    reserve_ratio: float = 0.3


@dataclass
class JobConfig:
    """A batch job: where rows come from and go to."""

    input: str = ""
    output: str = ""
    on_mismatch: str = "refuse"
    fsync_interval_s: float = 1.0
    max_in_flight: int = 512
    progress: str = "auto"
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config:
    """Everything. `seed` makes sampling repeatable."""

    model: ModelConfig = field(default_factory=ModelConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    job: JobConfig = field(default_factory=JobConfig)
    seed: int = 0
