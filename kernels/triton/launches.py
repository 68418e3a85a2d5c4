"""Launches of every kernel in every configuration that the backends use, on tensors of zeros: for compiling ahead.

`covering` is the smallest set in which every branch that a kernel takes when it is compiled occurs; `every` is the
whole product over the head shapes of real models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from . import attention, cache, formats, heads, rows, sampling
from .formats import QuantizedViews
from .targets import Target

Launch = tuple[str, Callable[[], object]]
KINDS = (None, "int8", "fp8_e4m3", "fp8_e5m2")
FEATURES: tuple[dict[str, object], ...] = (
    {},
    {"window": 4096},
    {"softcap": 50.0, "window": 4096},
    {"sinks": torch.zeros(128)},
    {"alibi_slopes": torch.zeros(128)},
)
KERNELS = {
    "attention_kernel",
    "merge_kernel",
    "write_kernel",
    "move_kernel",
    "heads_kernel",
    "add_norm_kernel",
    "activation_kernel",
    "largest_kernel",
    "draw_kernel",
    "score_kernel",
}
# query heads, KV heads, head size, as in Llama 3 8B, Qwen 2.5 7B, Gemma 3 1B, Phi 3, SmolLM2, GPT-2
HEADS = ((32, 8, 128), (28, 4, 128), (4, 1, 256), (32, 32, 96), (9, 3, 64), (12, 12, 64))


def _caches(
    kv_heads: int, size: int, dtype: torch.dtype, kind: str | None, group_size: int | None, block_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor, QuantizedViews | None]:
    held = {None: dtype, "int8": torch.int8}.get(kind, torch.uint8)
    shape = (2, kv_heads, block_size, size)
    keys, values = (torch.zeros(shape, dtype=held).transpose(1, 2) for _ in range(2))
    if kind is None:
        return keys, values, None
    groups = 1 if group_size is None else -(-size // group_size)
    scales = [torch.zeros(2, kv_heads, block_size, groups).transpose(1, 2) for _ in range(2)]
    return keys, values, QuantizedViews(kind, scales[0], scales[1], group_size)


def _attention(
    target: Target,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kind: str | None = None,
    group_size: int | None = None,
    decode: bool = False,
    features: dict[str, object] | None = None,
    block_size: int = 16,
) -> Launch:
    num_heads, kv_heads, size = shape
    padded = formats.padded(size)
    tiles = target.attention(num_heads // kv_heads, padded, padded, dtype.itemsize, decode)

    def launch() -> object:
        keys, values, quantized = _caches(kv_heads, size, dtype, kind, group_size, block_size)
        places = (torch.zeros(2, 16).int(), torch.zeros(3).int(), torch.zeros(2).int())
        return attention.paged_attention(
            torch.zeros(32, num_heads, size, dtype=dtype),
            keys,
            values,
            *places,
            scale=0.1,
            tiles=tiles,
            splits=8 if decode else 1,
            quantized=quantized,
            **(features or {}),  # type: ignore[arg-type]
        )

    part = "decode" if decode else "prefill"
    words = [part, "x".join(map(str, shape)), str(dtype).removeprefix("torch."), kind or "plain", *(features or {})]
    return f"attention {' '.join(words)}{'' if group_size is None else f' groups of {group_size}'}", launch


def _heads(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kind: str | None,
    group_size: int | None = None,
    norm: str | None = None,
    value_norm: bool = False,
    rotary: bool = True,
    **options: bool,
) -> Launch:
    num_heads, kv_heads, size = shape

    def launch() -> object:
        keys, values, quantized = _caches(kv_heads, size, dtype, kind, group_size)
        parameters = None
        if norm is not None:
            weight = torch.zeros(max(num_heads, kv_heads) * size if options.get("all_heads") else size)
            parameters = (norm, weight, weight if norm == "layer" else None, 1e-6)
        norms = heads.HeadNorms(
            parameters,
            parameters,
            parameters if value_norm else None,
            options.get("all_heads", False),
            options.get("after_rotary", False),
        )
        angles, slots = torch.zeros(3, size // 2) if rotary else None, torch.zeros(3).long()
        return heads.query_and_store(
            torch.zeros(3, (num_heads + 2 * kv_heads) * size, dtype=dtype), num_heads, keys, values, slots,
            cos=angles, sin=angles, interleaved=options.get("interleaved", False), norms=norms, quantized=quantized,
        )  # fmt: skip

    words = ["x".join(map(str, shape)), str(dtype).removeprefix("torch."), kind or "plain", norm or "no norm", *options]
    return f"heads {' '.join(words)}", launch


def _write(shape: tuple[int, int, int], dtype: torch.dtype, kind: str | None, group_size: int | None = None) -> Launch:
    def launch() -> object:
        keys, values, quantized = _caches(shape[1], shape[2], dtype, kind, group_size)
        new = torch.zeros(3, shape[1], shape[2], dtype=dtype)
        return cache.write_kv(new, new, keys, values, torch.zeros(3).long(), quantized)

    return f"write {'x'.join(map(str, shape))} {dtype} {kind}", launch


def _rows(width: int, dtype: torch.dtype, kind: str) -> Iterator[Launch]:
    x, weight = torch.zeros(3, width, dtype=dtype), torch.zeros(width)
    norm = (kind, weight, weight if kind == "layer" else None, 1e-6)
    yield f"norm {kind} {width} {dtype}", lambda: rows.add_norm(x, None, norm)
    yield f"residual, norm {kind} {width} {dtype}", lambda: rows.add_norm(x, x, norm)
    yield f"post norm, residual, norm {kind} {width} {dtype}", lambda: rows.add_norm(x, x, norm, norm)
    bare = (kind, None, None, 1e-6)
    yield f"post norm, residual {kind} {width} {dtype}", lambda: rows.add_norm(x, x, None, norm)
    yield f"bare post norm, residual, bare norm {kind} {width} {dtype}", lambda: rows.add_norm(x, x, bare, bare)


def _small(dtype: torch.dtype) -> Iterator[Launch]:
    x, blocks = torch.zeros(3, 64, dtype=dtype), torch.zeros(4, 256, dtype=torch.uint8)
    for name in rows.ACTIVATIONS:
        yield f"activation {name} {dtype}", lambda name=name: rows.activation(x, name, gated=True)
    yield "activation, no gate", lambda: rows.activation(x, "gelu")
    ids = torch.zeros(3).long()
    yield "copy", lambda: cache.move_blocks(blocks, blocks, ids, ids)
    yield "gather", lambda: cache.move_blocks(blocks, blocks, sources=ids)
    yield "scatter", lambda: cache.move_blocks(blocks, blocks, destinations=ids)


def _sampling(dtype: torch.dtype) -> Iterator[Launch]:
    logits, ids, numbers = torch.zeros(2, 128256, dtype=dtype), torch.zeros(2).long(), torch.zeros(2)
    yield f"largest {dtype}", lambda: sampling.largest(logits)
    yield f"draw {dtype}", lambda: sampling.draw(logits, ids, numbers, ids, numbers, ids, numbers, numbers)
    yield f"score {dtype}", lambda: sampling.score(logits, ids, ids)


def covering(target: Target) -> Iterator[Launch]:
    """A few launches in which everything occurs; a minute for all targets together on one core."""
    llama, smol, bf16 = HEADS[0], HEADS[4], torch.bfloat16
    yield _attention(target, llama, bf16, block_size=32)
    yield _attention(target, llama, bf16, kind="fp8_e4m3", decode=True, block_size=32)
    yield _attention(target, HEADS[2], bf16, kind="int8", group_size=32, features=FEATURES[2])
    yield _attention(target, smol, torch.float32, features=FEATURES[3])
    yield _attention(target, smol, torch.float16, kind="fp8_e5m2", group_size=32, features=FEATURES[4])
    yield _heads(llama, bf16, "int8", norm="rms", value_norm=True)
    yield _heads(smol, torch.float32, None, rotary=False)
    together = {"all_heads": True, "interleaved": True, "after_rotary": True}
    yield _heads(smol, torch.float16, "fp8_e5m2", 32, "layer", **together)
    yield _write(llama, bf16, "fp8_e4m3")
    yield _write(smol, torch.float32, None)
    yield _write(smol, bf16, "int8", 32)
    yield _write(smol, torch.float16, "fp8_e5m2")
    yield from list(_rows(4096, bf16, "rms"))[::2]
    yield from list(_rows(576, torch.float32, "layer"))[1::2]
    yield from _small(bf16)
    yield from _sampling(bf16)


def every(target: Target) -> Iterator[Launch]:
    """The whole sweep: some hundreds of launches a target."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for shape, dtype, decode in itertools.product(HEADS, dtypes, (False, True)):
        for kind in KINDS:
            yield _attention(target, shape, dtype, kind, decode=decode)
        yield _attention(target, shape, dtype, "int8", 32, decode)
        for features in FEATURES[1:]:
            yield _attention(target, shape, dtype, decode=decode, features=features)
    for shape, dtype, kind in itertools.product(HEADS, dtypes, KINDS):
        yield _write(shape, dtype, kind)
        yield _heads(shape, dtype, kind)
        for norm in ("rms", "layer"):
            yield _heads(shape, dtype, kind, norm=norm)
            yield _heads(shape, dtype, kind, norm=norm, all_heads=True, after_rotary=True)
        yield _heads(shape, dtype, kind, interleaved=True)
        yield _heads(shape, dtype, kind, norm="rms", value_norm=True, rotary=False)
        if kind is not None:
            yield _write(shape, dtype, kind, 32)
            yield _heads(shape, dtype, kind, 32)
    for width, dtype, kind in itertools.product((576, 2048, 4096, 8192), dtypes, ("rms", "layer")):
        yield from _rows(width, dtype, kind)
    for dtype in dtypes:
        yield from _small(dtype)
        yield from _sampling(dtype)
