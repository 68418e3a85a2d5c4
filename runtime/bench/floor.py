"""The floor: the least time that a workload can take on a machine, from what the machine was measured to do.

A roofline (Williams, Waterman and Patterson, CACM 2009) for each operation: a product takes at least its operations
over the measured ceiling of products in its dtype, and at least the bytes of its weights, or of the keys and values it
reads, over the measured read bandwidth. Operations follow one another, so their floors add up.

It assumes a perfect engine: every prompt token computed once (a shared prefix once for all), weights read once a step,
shared keys and values read once a step, no time for anything but products.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pagefleet.runtime.bench.workloads import Workload
from pagefleet.runtime.memory_plan import GroupShape, ModelShape
from pagefleet.runtime.weights import TensorInfo

WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "w8a8": 1.0, "w8a16": 1.0, "w4a16": 0.5}
KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int4": 0.5}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_READ_BYTES = 512 * 2**20  # more than any last-level cache keeps
_PRODUCT_ROWS, _PRODUCT_SIZE = (64, 256, 1024), 2048
_NOT_LINEAR = ("embed", "wte", "wpe", "lm_head", "output.weight", "shared.weight")


@dataclass(frozen=True)
class Ceilings:
    """What a machine was measured to do.

    Attributes:
        read_bytes_per_s: of one read through an array far larger than its caches.
        products_per_s: dtype ("fp32", "bf16", "fp16", "int8") -> operations a second of a matrix product, two for
            each multiply-add.
    """

    read_bytes_per_s: float
    products_per_s: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def product_dtype(precision: str) -> str:
    """The dtype whose product ceiling a precision is held to: weight-only schemes multiply in bf16."""
    return {"fp32": "fp32", "fp16": "fp16", "w8a8": "int8"}.get(precision, "bf16")


def attention_dtype(precision: str) -> str:
    """The dtype that attention multiplies in."""
    return "bf16" if product_dtype(precision) == "int8" else product_dtype(precision)


def measure_ceilings(
    device: str,
    synchronize: Callable[[], None],
    precisions: Collection[str],
    pack: Callable[..., Callable[..., Any]] | None = None,
    repeats: int = 7,
) -> Ceilings:
    """Measure on `device` with all of torch's threads; the best of `repeats` tries counts, for this is a ceiling.

    Args:
        precisions: whose product ceilings are wanted.
        pack: a backend's own packed linear layer, `pack(weight [n, k], None)(x [m, k])`; where it beats torch's plain
            product it is the ceiling.
    """

    def best(run: Callable[[], object]) -> float:
        times = []
        for _ in range(repeats + 1):
            synchronize()
            started = time.perf_counter()
            run()
            synchronize()
            times.append(time.perf_counter() - started)
        return min(times[1:])

    with torch.inference_mode():
        data = torch.ones(_READ_BYTES // 8, dtype=torch.int64, device=device)
        read = _READ_BYTES / min(best(data.sum), best(data.view(torch.float32).sum))
        del data
        wanted = sorted({kind(p) for p in precisions for kind in (product_dtype, attention_dtype)})
        products = {name: _product_ceiling(name, device, best, pack) for name in wanted}
    return Ceilings(read, products)


def _product_ceiling(
    name: str, device: str, best: Callable[[Callable[[], object]], float], pack: Callable[..., Any] | None
) -> float:
    rates = []
    for rows in _PRODUCT_ROWS:
        for run in _products(name, rows, device, pack):
            rates.append(2 * rows * _PRODUCT_SIZE**2 / best(run))
    return max(rates)


def _products(name: str, rows: int, device: str, pack: Callable[..., Any] | None) -> list[Callable[[], object]]:
    """The ways to multiply [rows, n] by [n, n] that may be the fastest here."""
    if name == "int8":
        x, w = (
            torch.randint(-9, 9, (n, _PRODUCT_SIZE), dtype=torch.int8, device=device) for n in (rows, _PRODUCT_SIZE)
        )
        return [lambda: torch._int_mm(x, w.t())]
    x, w = (torch.randn(n, _PRODUCT_SIZE, device=device).to(_DTYPES[name]) for n in (rows, _PRODUCT_SIZE))
    if pack is None:
        return [lambda: x @ w.t()]
    packed = pack(w.clone(), None)
    return [lambda: x @ w.t(), lambda: packed(x)]


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model that decide its floor.

    Attributes:
        linear: weights of the products that every token goes through, the head left out. Of experts, those that a
            token picks.
        head: weights of the head.
        shape: layers, heads and their sizes.
    """

    linear: float
    head: float
    shape: ModelShape

    @classmethod
    def of(cls, infos: Sequence[TensorInfo], config: Any, shape: ModelShape) -> ModelSizes:
        """From a checkpoint's tensors (see `weights.tensor_infos`) and its transformers configuration."""
        text = getattr(config, "text_config", None) or config
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        experts = next((count for name in names if (count := getattr(text, name, 0))), 0)
        picked = getattr(text, "num_experts_per_tok", 1) / experts if experts else 1.0
        linear = 0.0
        for info in infos:
            if len(info.shape) >= 2 and not any(word in info.name for word in _NOT_LINEAR):
                is_expert = "experts." in info.name and "shared" not in info.name
                linear += math.prod(info.shape) * (picked if is_expert else 1.0)
        return cls(linear, float(shape.vocab_size * shape.hidden_size), shape)


def token_bytes(group: GroupShape, kv_dtype: str) -> float:
    """Bytes of one token's keys and values in a group; below 16 bits with one fp32 scale a token and head for each."""
    element = KV_BYTES[kv_dtype]
    scales = 2 * 4.0 if element < 2 else 0.0
    return group.num_layers * group.num_kv_heads * ((group.head_dim + group.value_head_dim) * element + scales)


@dataclass(frozen=True)
class Floor:
    """Least seconds of each kind of operation of a workload."""

    prefill_products: float
    prefill_attention: float
    decode_products: float
    decode_attention: float
    head: float

    @property
    def seconds(self) -> float:
        """All of them, one after another."""
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, float]:
        """Plain JSON values, the sum first."""
        return {"seconds": self.seconds, **asdict(self)}


def floor(workload: Workload, sizes: ModelSizes, ceilings: Ceilings, precision: str, kv_dtype: str) -> Floor:
    """The floor of a workload at a precision ("bf16", "w8a8", ...) with a KV cache dtype."""
    product, bandwidth = ceilings.products_per_s[product_dtype(precision)], ceilings.read_bytes_per_s
    attention_product = ceilings.products_per_s[attention_dtype(precision)]
    rows, steps = len(workload.own_lengths), workload.new - 1  # the first new token comes with the prefill

    def linear(weights: float, tokens: float, times: int = 1) -> float:
        return times * max(2 * weights * tokens / product, weights * WEIGHT_BYTES[precision] / bandwidth)

    def attention(queries: Sequence[tuple[int, int]]) -> float:
        """Seconds of the products of queries at positions first..last, in all layers."""
        operations = 0.0
        for group in sizes.shape.groups:
            seen = sum(_keys_seen(first, last, group.window) for first, last in queries)
            each = 2 * sizes.shape.num_heads * (group.head_dim + group.value_head_dim)
            operations += group.num_layers * each * seen
        return operations / attention_product

    own = [(workload.shared + 1, length) for length in workload.lengths]
    prompt_queries = [(1, workload.shared), *own] if workload.shared else own
    prompt_tokens = sum(last - first + 1 for first, last in prompt_queries)
    decode_queries = [(length + 1, length + steps) for length in workload.lengths] if steps else []
    return Floor(
        prefill_products=linear(sizes.linear, prompt_tokens),
        prefill_attention=attention(prompt_queries),
        decode_products=linear(sizes.linear, rows, steps),
        decode_attention=max(attention(decode_queries), _kv_reads(workload, sizes.shape, kv_dtype) / bandwidth),
        head=linear(sizes.head, rows, steps + 1),
    )


def _keys_seen(first: int, last: int, window: int | None) -> int:
    """Keys that the queries at positions `first` to `last` (counted from 1) see, together."""
    if window is None or last <= window:
        return (first + last) * (last - first + 1) // 2
    if first > window:
        return window * (last - first + 1)
    return _keys_seen(first, window, None) + window * (last - window)


def _kv_reads(workload: Workload, shape: ModelShape, kv_dtype: str) -> float:
    """Bytes of keys and values that all decode steps read, what is shared once a step."""
    read = 0.0
    for group in shape.groups:
        window = group.window or workload.longest
        tokens = 0
        for step in range(1, workload.new):
            own = [min(length + step, window) for length in workload.own_lengths]
            tokens += sum(own) + max(min(workload.shared, window - length) for length in own)
        read += token_bytes(group, kv_dtype) * tokens
    return read
