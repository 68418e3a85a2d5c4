"""The schema of `conf/`: dataclasses that check themselves. Imports no torch, so a wrong value is known at once.

`runtime/compose.py` turns command-line overrides into a `Config`.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pagefleet.backends import SHARED
from pagefleet.runtime.errors import ConfigError
from pagefleet.runtime.sampling_params import SamplingParams, StructuredOutput
from pagefleet.runtime.sizes import parse_size

COMMANDS = ("batch", "plan", "doctor", "bench", "gate")
BENCH_WORKLOADS = ("custom", "w1", "w2", "w3", "w4", "all")
DTYPES = ("fp32", "bf16", "fp16")
QUANTIZED_PRECISIONS = ("w8a8", "w8a16", "w4a16")
PRECISIONS = ("auto", *DTYPES, *QUANTIZED_PRECISIONS)
GROUP_SIZES = (32, 64, 128)
DEFAULT_INT4_GROUP = 32
LATER_PRECISIONS = ("fp8",)
CACHE_DTYPES = ("auto", "fp32", "bf16", "fp16", "int8")
LATER_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2", "int4")
DECLARED_BACKENDS = ("cpu", "cuda", "onnx", "reference", "rocm")
ATTENTION = ("auto", "triton", "flash_attn", "torch_varlen", "flashinfer", "aiter", "torch")
GRAPHS = ("auto", "on", "off")
TILES = ("auto", "sm80", "sm86", "sm89", "sm90", "gfx90a", "gfx942", "gfx950", "gfx1100")
LOWERING = ("auto", "off")
SPECULATIONS = ("none", "ngram")
PROGRESS_KINDS = ("auto", "rich", "plain", "off")
MAX_BLOCK_SIZE = 256
MAX_GRAPH_BUCKET = 4096


def installed_backends() -> tuple[str, ...]:
    """Backends whose code is here, found without importing them: folders of `pagefleet.backends` and entry points."""
    spec = importlib.util.find_spec("pagefleet.backends")
    folders = (spec.submodule_search_locations if spec else None) or ()
    names = {init.parent.name for folder in folders for init in Path(folder).glob("*/__init__.py")}
    names -= SHARED
    return tuple(sorted(names | {entry.name for entry in entry_points(group="pagefleet.backends")}))


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a close match, else nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_choice(key: str, value: Any, allowed: Iterable[str], later: Iterable[str] = ()) -> None:
    """Raise ConfigError unless `value` is allowed; names in `later` are known, but not in this version."""
    allowed, later = list(allowed), list(later)
    if value in allowed:
        return
    available = ", ".join(allowed)
    if value in later:
        raise ConfigError(f"{key}={value}: not available in this version; available: {available}")
    raise ConfigError(f"{key}: expected one of {available}; got {value!r}{suggestion(value, allowed + later)}")


def check_int(key: str, value: Any, low: int, high: int | None = None, optional: bool = False) -> None:
    """Raise ConfigError unless `value` is an integer from `low` to `high` (or None, if optional)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        span = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ConfigError(f"{key}: expected {span}{' or null' if optional else ''}, got {value!r}")


def check_real(key: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number in [low, high], or (low, high] with `open_low`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value > high or value < low or (open_low and value == low):
        raise ConfigError(f"{key}: expected a number in {'(' if open_low else '['}{low}, {high}], got {value!r}")


def _not_yet(key: str, value: Any) -> None:
    if value is not None:
        raise ConfigError(f"{key}={value}: not available in this version; available: null")


def _check_buckets(buckets: list[int]) -> None:
    for size in buckets:
        check_int("backend.graph_buckets", size, low=1, high=MAX_GRAPH_BUCKET)
    if not buckets or sorted(set(buckets)) != buckets:
        raise ConfigError(
            f"backend.graph_buckets: expected different numbers of sequences in rising order or null, got {buckets}"
        )


@dataclass
class ModelConfig:
    """Which model. `path` is a checkpoint folder, a GGUF file, or a hub id.

    `lowering`: "auto" runs what is understood as fused operations, "off" runs transformers' own modules.
    """

    path: str = ""
    revision: str | None = None
    tokenizer: str | None = None
    max_len: int | None = None
    trust_remote_code: bool = False
    lowering: str = "auto"

    def __post_init__(self) -> None:
        check_choice("model.lowering", self.lowering, LOWERING)
        check_int("model.max_len", self.max_len, low=1, optional=True)


@dataclass
class HardwareConfig:
    """The hardware target whose values were taken; a label, the values are in the other sections.

    `memory`: what such a card has, for `pagefleet plan` on a machine without one; None: measured where it runs.
    """

    name: str = "generic"
    memory: str | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            parse_size(self.memory, "hardware.memory")


@dataclass
class BackendConfig:
    """Which device; `auto` explains its choice.

    Attributes:
        threads: of a CPU backend; None: every core this process may use.
        attention: what computes attention on a GPU; "auto" takes the best that is installed, and says why.
        graphs: whether a GPU replays captured steps of single tokens; "auto" keeps them if the self-test passes.
        graph_buckets: numbers of sequences that are captured, and steps are padded to; None: the backend's own.
        tiles: the architecture whose tile sizes GPU kernels take; "auto": the device's own.
    """

    name: str = "auto"
    threads: int | None = None
    attention: str = "auto"
    graphs: str = "auto"
    graph_buckets: list[int] | None = None
    tiles: str = "auto"

    def __post_init__(self) -> None:
        if self.name not in ("auto", *DECLARED_BACKENDS):  # look at the disk only when needed
            check_choice("backend", self.name, ("auto", *sorted({*DECLARED_BACKENDS, *installed_backends()})))
        check_int("backend.threads", self.threads, low=1, high=4096, optional=True)
        check_choice("backend.attention", self.attention, ATTENTION)
        check_choice("backend.graphs", self.graphs, GRAPHS)
        check_choice("backend.tiles", self.tiles, TILES)
        if self.graph_buckets is not None:
            _check_buckets(self.graph_buckets)


@dataclass
class PrecisionConfig:
    """Compute dtype, or how linear layers are quantised.

    Attributes:
        name: a dtype, or a scheme of linear layers: 8-bit or 4-bit weights, with activations of 8 or 16 bits.
        exact: makes rows independent of what runs beside them, bit for bit.
        compute: the dtype of everything that a scheme does not quantise; "auto": the backend's preferred one.
        group_size: weights that share a scale; None: 32 for w4a16, a whole output channel for the others.
        quantize_head: whether the scheme is for the output head too. Embeddings never are quantised.
    """

    name: str = "auto"
    exact: bool = False
    compute: str = "auto"
    group_size: int | None = None
    quantize_head: bool = False

    def __post_init__(self) -> None:
        check_choice("precision", self.name, PRECISIONS, LATER_PRECISIONS)
        check_choice("precision.compute", self.compute, ("auto", *DTYPES))
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"precision.group_size: expected one of {sizes} or null, got {self.group_size!r}")
        quantized = self.name in QUANTIZED_PRECISIONS
        if self.group_size is not None and (not quantized or self.name == "w8a8"):
            raise ConfigError(
                f"precision.group_size={self.group_size}: only w8a16 and w4a16 have groups, not precision={self.name}"
            )
        if self.quantize_head and not quantized:
            raise ConfigError(f"precision.quantize_head=true: precision={self.name} quantises nothing")
        if not quantized and self.compute not in ("auto", self.name):
            raise ConfigError(
                f"precision.compute={self.compute}: precision={self.name} is itself the compute dtype; leave it unset"
            )

    @property
    def scheme(self) -> str | None:
        """The scheme of linear layers as backends name it, such as "w4a16_g64"; None: they keep the compute dtype."""
        if self.name not in QUANTIZED_PRECISIONS:
            return None
        group = self.group_size or (DEFAULT_INT4_GROUP if self.name == "w4a16" else None)
        return self.name if group is None else f"{self.name}_g{group}"


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

    def __post_init__(self) -> None:
        check_choice("cache.dtype", self.dtype, CACHE_DTYPES, LATER_CACHE_DTYPES)
        check_int("cache.block_size", self.block_size, low=1, high=MAX_BLOCK_SIZE)
        if self.memory is not None:
            parse_size(self.memory, "cache.memory")
        check_real("cache.memory_fraction", self.memory_fraction, 0.0, 1.0, open_low=True)
        check_int("cache.num_blocks", self.num_blocks, low=2, optional=True)  # one of them is the null block
        _not_yet("cache.quant_group_size", self.quant_group_size)
        _not_yet("cache.window", self.window)
        check_int("cache.sink_tokens", self.sink_tokens, low=0)

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes."""
        return None if self.memory is None else parse_size(self.memory, "cache.memory")


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

    def __post_init__(self) -> None:
        check_int("scheduler.max_batched_tokens", self.max_batched_tokens, low=1)
        check_int("scheduler.max_sequences", self.max_sequences, low=1)
        check_int("scheduler.long_prefill_tokens", self.long_prefill_tokens, low=1, optional=True)
        check_real("scheduler.batch_timeout_ms", self.batch_timeout_ms, 0.0, 60_000.0)
        check_int("scheduler.length_bucket", self.length_bucket, low=0)
        check_int("scheduler.max_skips", self.max_skips, low=0)
        check_real("scheduler.reserve_ratio", self.reserve_ratio, 0.0, 1.0)


@dataclass
class SpeculationConfig:
    """Running guessed tokens ahead; changes no token, only how many steps they take.

    Attributes:
        name: where guesses come from; "ngram": from an earlier place of the same text that reads like its end.
        num_tokens: most tokens run ahead of a sequence in a step.
        shortest_match, longest_match: tokens at the end of the text that must occur before, and that are compared.
        break_even_rows: how many rows' arithmetic takes as long as reading the weights once: the more, the more
            sequences may run beside guesses that pay (runtime/speculation/speculator.py has the rule).
        first_chance: how likely a guess is taken to be right before there is experience with the sequence.
    """

    name: str = "none"
    num_tokens: int = 8
    shortest_match: int = 2
    longest_match: int = 8
    break_even_rows: int = 16
    first_chance: float = 0.5

    def __post_init__(self) -> None:
        check_choice("speculation", self.name, SPECULATIONS)
        check_int("speculation.num_tokens", self.num_tokens, low=1, high=64)
        check_int("speculation.shortest_match", self.shortest_match, low=1, high=64)
        check_int("speculation.longest_match", self.longest_match, low=self.shortest_match, high=64)
        check_int("speculation.break_even_rows", self.break_even_rows, low=1, high=65_536)
        check_real("speculation.first_chance", self.first_chance, 0.0, 1.0)

    @property
    def most_rows(self) -> int:
        """Most drafted tokens of a step: beyond, even right guesses gain next to nothing, and logits need memory."""
        return 0 if self.name == "none" else 2 * self.break_even_rows


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

    def __post_init__(self) -> None:
        check_choice("job.on_mismatch", self.on_mismatch, ("refuse", "restart"))
        check_real("job.fsync_interval_s", self.fsync_interval_s, 0.0, 3600.0)
        check_int("job.max_in_flight", self.max_in_flight, low=1)
        check_choice("job.progress", self.progress, PROGRESS_KINDS)
        _check_sampling_defaults(self.defaults)


def _check_sampling_defaults(defaults: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(SamplingParams)]
    for name in defaults:
        if name not in known:
            raise ConfigError(
                f"job.defaults.{name}: not a sampling parameter; allowed: {', '.join(known)}{suggestion(name, known)}"
            )
    values = dict(defaults)
    constraint = values.get("structured")
    try:
        if isinstance(constraint, Mapping):
            values["structured"] = StructuredOutput(**constraint)
        SamplingParams(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"job.defaults.{error}") from error


@dataclass
class PlanConfig:
    """`pagefleet plan`: `memory` is a size to plan for; None: what this process may use."""

    json: bool = False
    memory: str | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            parse_size(self.memory, "plan.memory")


@dataclass
class DoctorConfig:
    """`pagefleet doctor`."""

    json: bool = False


@dataclass
class BenchConfig:
    """`pagefleet bench`: prompts cut from a text; lengths in tokens. The sizes in tokens shape workload `custom`."""

    workload: str = "custom"
    small: bool = False
    runs: int = 1
    warmup: int = 1
    text: str | None = None
    floor: bool = True
    num_prompts: int = 32
    input_len: int = 128
    input_len_spread: float = 0.5
    output_len: int = 64
    shared_prefix_len: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        check_choice("bench.workload", self.workload, BENCH_WORKLOADS)
        check_int("bench.runs", self.runs, low=1)
        check_int("bench.warmup", self.warmup, low=0)
        check_int("bench.num_prompts", self.num_prompts, low=1)
        check_int("bench.input_len", self.input_len, low=1)
        check_real("bench.input_len_spread", self.input_len_spread, 0.0, 1.0)
        check_int("bench.output_len", self.output_len, low=1)
        check_int("bench.shared_prefix_len", self.shared_prefix_len, low=0)


@dataclass
class GateConfig:
    """`pagefleet gate`: the text, what is compared with, and the bounds."""

    text: str | None = None
    max_tokens: int = 512
    baseline_precision: str = "fp32"
    max_perplexity_increase: float = 0.05
    min_top1_agreement: float = 0.9
    min_layer_cosine: float = 0.98
    json: bool = False

    def __post_init__(self) -> None:
        check_int("gate.max_tokens", self.max_tokens, low=2)
        check_choice("gate.baseline_precision", self.baseline_precision, ("fp32", "bf16", "fp16"))
        check_real("gate.max_perplexity_increase", self.max_perplexity_increase, 0.0, 1000.0)
        check_real("gate.min_top1_agreement", self.min_top1_agreement, 0.0, 1.0)
        check_real("gate.min_layer_cosine", self.min_layer_cosine, -1.0, 1.0)


@dataclass
class Config:
    """Everything. `seed` makes sampling repeatable."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    job: JobConfig = field(default_factory=JobConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("seed", self.seed, low=-(2**63), high=2**63 - 1)


def check_ready(config: Config, command: str) -> None:
    """What `command` needs beyond valid values: a model, files, a backend whose code is here.

    Raises:
        ConfigError: something is missing; nothing has been loaded yet.
    """
    check_choice("command", command, COMMANDS)
    if command == "doctor":
        return
    needed = {"model.path": config.model.path}
    if command == "batch":
        needed |= {"job.input": config.job.input, "job.output": config.job.output}
    missing = [key for key, value in needed.items() if not value]
    if missing:
        example = " ".join(f"{key}=..." for key in missing)
        raise ConfigError(
            f"pagefleet {command} needs {', '.join(missing)}: add {example} (see pagefleet {command} --help)"
        )
    present = installed_backends()
    if config.backend.name not in ("auto", *present):
        check_choice("backend", config.backend.name, ("auto", *present), later=DECLARED_BACKENDS)


def result_shaping(config: Config) -> dict[str, Any]:
    """What decides the tokens of a job's results; the job's fingerprint is made of it. Plain JSON values.

    `config` names what was chosen (see `runtime/choices.py`): "auto" may be something else on the next machine.
    """
    return {
        "backend": config.backend.name,
        "model.path": config.model.path,
        "model.revision": config.model.revision,
        "model.tokenizer": config.model.tokenizer,
        "model.max_len": config.model.max_len,
        "precision": config.precision.name,
        "precision.exact": config.precision.exact,
        "precision.compute": config.precision.compute,
        "precision.scheme": config.precision.scheme,
        "precision.quantize_head": config.precision.quantize_head,
        "cache.dtype": config.cache.dtype,
        "seed": config.seed,
        "job.defaults": dict(config.job.defaults),
    }
