"""The planning formula: what a model needs before anything is loaded, and how many blocks fit. Pure arithmetic.

Peak = weights + activations of one step + logits workspace + KV pools. KV of a token in one group is
`layers * kv_heads * (key_size + value_size) * bytes`, the usual `2 * layers * kv_heads * head_dim * bytes`; a quantised
cache adds two scales for each layer and KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagefleet.runtime.errors import ModelError
from pagefleet.runtime.sizes import format_size

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
SCALE_BYTES = {"int8": 4}  # of the scale that a quantised cache keeps for each token and KV head
BLOCK_ALIGNMENT = 128
_NULL_BLOCKS = 1  # block 0 of every pool


@dataclass(frozen=True)
class GroupShape:
    """The layers that share a block table, as a model's config describes them; `window` None is full attention."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None = None

    def token_bytes(self, dtype: str) -> int:
        """KV bytes of one token in this group, for a cache of this dtype."""
        row = (self.head_dim + self.value_head_dim) * ELEMENT_BYTES[dtype] + 2 * SCALE_BYTES.get(dtype, 0)
        return self.num_layers * self.num_kv_heads * row


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide memory. `intermediate_size` is the widest MLP layer (of one token)."""

    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_len: int
    groups: tuple[GroupShape, ...]


@dataclass(frozen=True)
class GroupBudget:
    """One block of a KV group as the backend lays it out: its bytes, and the group's window in tokens."""

    block_bytes: int
    window: int | None = None


@dataclass(frozen=True)
class Fit:
    """What fits into a number of bytes.

    Attributes:
        blocks: per group, blocks of its pool, the null block included; empty if not even one token fits.
        tokens: tokens that can be in the cache at once.
        longest: longest sequence that fits when alone, at most `max_len`.
        sequences: sequences of `max_len` tokens that fit at once.
        pool_bytes: bytes of all pools.
    """

    blocks: tuple[int, ...]
    tokens: int
    longest: int
    sequences: int
    pool_bytes: int


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 0 to `limit` that fits, where all smaller ones do; by bisection, 0 is taken to fit."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def most_blocks(num_tokens: int, window: int | None, block_size: int, chunk: int) -> int:
    """Blocks a sequence holds in one group at its worst moment, computed `chunk` tokens at a time.

    A window group frees blocks behind the window after each chunk, so it is bounded by window + chunk, and one block
    more because neither end need lie on a block boundary.
    """
    whole = blocks_for(num_tokens, block_size)
    if window is None or window + chunk >= num_tokens:
        return whole
    return min(whole, blocks_for(window + chunk, block_size) + 1)


def kv_blocks_that_fit(
    free_bytes: int,
    groups: Sequence[GroupBudget],
    block_size: int,
    *,
    max_len: int,
    max_sequences: int,
    max_batched_tokens: int,
) -> Fit:
    """Share `free_bytes` among the pools of the KV groups.

    Full-attention groups get equal numbers of blocks. A window group gets as many (then it is never what runs out
    first), at most what `max_sequences` sequences can hold in it. Only if a sequence of `max_len` would then not fit
    does a window group shrink, to no less than that one sequence needs.
    """
    need = [most_blocks(max_len, g.window, block_size, max_batched_tokens) for g in groups]
    full_need = blocks_for(max_len, block_size)
    ceiling = full_need * max_sequences

    def shares(base: int, squeeze: bool) -> list[int]:
        """Usable blocks per group when a full-attention group has `base`."""
        return [
            min(base, need[i] if squeeze else need[i] * max_sequences) if g.window is not None else base
            for i, g in enumerate(groups)
        ]

    def cost(usable: Sequence[int]) -> int:
        return sum((n + _NULL_BLOCKS) * g.block_bytes for n, g in zip(usable, groups, strict=True))

    base, squeeze = largest(ceiling, lambda n: cost(shares(n, False)) <= free_bytes), False
    if base < full_need:
        squeezed = largest(full_need, lambda n: cost(shares(n, True)) <= free_bytes)
        if squeezed > base:
            base, squeeze = squeezed, True
    usable = shares(base, squeeze)
    if base < 1 or cost(usable) > free_bytes:
        return Fit((), 0, 0, 0, 0)
    sequences = min(n // needed for n, needed in zip(usable, need, strict=True)) if groups else 0
    return Fit(
        blocks=tuple(n + _NULL_BLOCKS for n in usable),
        tokens=base * block_size,
        longest=_longest(usable, groups, block_size, max_len, max_batched_tokens),
        sequences=min(sequences, max_sequences),
        pool_bytes=cost(usable),
    )


def _longest(usable: Sequence[int], groups: Sequence[GroupBudget], block_size: int, limit: int, chunk: int) -> int:
    def fits(length: int) -> bool:
        return all(most_blocks(length, g.window, block_size, chunk) <= n for n, g in zip(usable, groups, strict=True))

    return largest(limit, fits)


def activation_bytes(shape: ModelShape, tokens: int, element_bytes: int) -> int:
    """Most bytes alive at once inside a decoder layer, for a step of `tokens` tokens.

    Residual and normed hidden states, with them the larger of attention (query, key, value, output) and MLP (gate,
    up, product).
    """
    widest = max((g.num_kv_heads * (g.head_dim + g.value_head_dim) for g in shape.groups), default=0)
    head = max((max(g.head_dim, g.value_head_dim) for g in shape.groups), default=0)
    attention = 2 * shape.num_heads * head + widest
    return tokens * (2 * shape.hidden_size + max(attention, 3 * shape.intermediate_size)) * element_bytes


def logits_bytes(shape: ModelShape, rows: int) -> int:
    """fp32 logits of so many rows, and a working copy for the sampler."""
    return 2 * rows * shape.vocab_size * 4


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory goes, in bytes, and what fits in what is left for KV.

    Attributes:
        limit: memory there is for all of it.
        kv_budget: bytes for the KV pools; may be negative when weights and workspace alone exceed the limit.
        token_bytes: KV bytes of one token, all groups (beyond a window, only the full-attention ones go on growing).
        fit: what `kv_budget` holds.
        advice: what would fit, when `max_len` does not; empty when it does.
    """

    limit: int
    weights: int
    activations: int
    logits: int
    kv_budget: int
    token_bytes: int
    max_len: int
    max_sequences: int
    max_batched_tokens: int
    block_size: int
    fit: Fit
    advice: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """True if a sequence of `max_len` tokens can run."""
        return self.fit.longest >= self.max_len

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "fits": self.fits,
            "memory_limit_bytes": self.limit,
            "weight_bytes": self.weights,
            "activation_bytes": self.activations,
            "logits_bytes": self.logits,
            "kv_budget_bytes": self.kv_budget,
            "kv_pool_bytes": self.fit.pool_bytes,
            "kv_bytes_per_token": self.token_bytes,
            "block_size": self.block_size,
            "blocks": list(self.fit.blocks),
            "tokens": self.fit.tokens,
            "max_len": self.max_len,
            "longest_sequence": self.fit.longest,
            "sequences_of_max_len": self.fit.sequences,
            "max_sequences": self.max_sequences,
            "max_batched_tokens": self.max_batched_tokens,
            "advice": list(self.advice),
        }


def plan_memory(
    shape: ModelShape,
    *,
    weight_bytes: int,
    limit_bytes: int,
    compute_dtype: str,
    kv_dtype: str = "auto",
    block_size: int = 16,
    max_len: int | None = None,
    max_sequences: int = 256,
    max_batched_tokens: int = 2048,
    memory_fraction: float = 0.8,
    kv_memory_bytes: int | None = None,
    drafted_rows: int = 0,
    loaded: bool = False,
) -> MemoryPlan:
    """Plan the memory of one engine.

    Args:
        weight_bytes: of the weights in `compute_dtype`.
        limit_bytes: memory there is: the total this process may use, or what is free once the weights are `loaded`.
        kv_dtype: "auto" is `compute_dtype`.
        kv_memory_bytes: bytes for KV as the user fixed them; None: `memory_fraction` of what is left.
        drafted_rows: rows of logits that speculation adds to a step.
    """
    element = ELEMENT_BYTES[compute_dtype]
    kv_dtype = compute_dtype if kv_dtype == "auto" else kv_dtype
    max_len = min(max_len or shape.max_len, shape.max_len)
    rows = min(max_sequences, max_batched_tokens)
    activations = activation_bytes(shape, max_batched_tokens, element)
    logits = logits_bytes(shape, rows + drafted_rows)
    left = limit_bytes - (0 if loaded else weight_bytes) - activations - logits
    budget = kv_memory_bytes if kv_memory_bytes is not None else int(left * memory_fraction) if left > 0 else left
    if kv_memory_bytes is not None and kv_memory_bytes > left:
        budget = left  # never promise what is not there
    budgets = [GroupBudget(_aligned(g.token_bytes(kv_dtype) * block_size), g.window) for g in shape.groups]
    fit = kv_blocks_that_fit(
        budget, budgets, block_size, max_len=max_len, max_sequences=rows, max_batched_tokens=max_batched_tokens
    )
    plan = MemoryPlan(
        limit=limit_bytes,
        weights=weight_bytes,
        activations=activations,
        logits=logits,
        kv_budget=budget,
        token_bytes=sum(g.token_bytes(kv_dtype) for g in shape.groups),
        max_len=max_len,
        max_sequences=rows,
        max_batched_tokens=max_batched_tokens,
        block_size=block_size,
        fit=fit,
    )
    if plan.fits:
        return plan
    advice = _advice(plan, shape, budgets, element, kv_memory_bytes, left)
    return MemoryPlan(**{**plan.__dict__, "advice": advice})


def _aligned(size: int) -> int:
    return blocks_for(size, BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def _advice(
    plan: MemoryPlan,
    shape: ModelShape,
    budgets: Sequence[GroupBudget],
    element: int,
    kv_memory_bytes: int | None,
    left: int,
) -> tuple[str, ...]:
    """What would make a sequence of `max_len` fit, cheapest for the user first."""
    lines = []
    if plan.fit.longest > 0:
        lines.append(f"model.max_len={plan.fit.longest} is the longest that fits as things are")
    needed = sum(
        (most_blocks(plan.max_len, b.window, plan.block_size, plan.max_batched_tokens) + _NULL_BLOCKS) * b.block_bytes
        for b in budgets
    )
    if needed <= left:
        setting = "cache.memory" if kv_memory_bytes is not None else "cache.memory_fraction"
        value = format_size(needed) if kv_memory_bytes is not None else f"{min(needed / left + 0.005, 1.0):.2f}"
        lines.append(f"{setting}={value.replace(' ', '')} gives one sequence of {plan.max_len} tokens its KV")
    smaller = max(plan.max_batched_tokens // 4, 1)
    saved = plan.activations - activation_bytes(shape, smaller, element)
    if saved > plan.limit // 100:
        lines.append(f"scheduler.max_batched_tokens={smaller} frees {format_size(saved)} of activations")
    fewer = max(plan.max_sequences // 8, 1)
    saved = plan.logits - logits_bytes(shape, fewer)
    if saved > plan.limit // 100:
        lines.append(f"scheduler.max_sequences={fewer} frees {format_size(saved)} of logits")
    if element == 4:
        lines.append(f"precision=bf16 halves the weights, to {format_size(plan.weights // 2)}, and the KV")
    total = plan.weights + plan.activations + plan.logits + needed
    lines.append(f"{format_size(total)} of memory would hold one sequence of {plan.max_len} tokens")
    return tuple(lines)


# -- the model's sizes -----------------------------------------------------------------------------------------------

_ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads"),
}


def shape_from_config(config: Any) -> ModelShape:
    """Read the sizes from a transformers configuration, or from the mapping in a `config.json`.

    Raises:
        ModelError: a size is missing.
    """
    text = _get(config, "text_config")
    if text is not None:
        config = text
    hidden = _need(config, "hidden_size")
    layers = _need(config, "num_hidden_layers")
    heads = _need(config, "num_attention_heads")
    kv_heads = 1 if _get(config, "multi_query") else _get(config, "num_key_value_heads") or heads
    key_dim, value_dim = _head_sizes(config, hidden, heads)
    if _get(config, "kv_lora_rank"):
        kv_heads = heads  # latent attention as transformers computes it: keys and values of every head
    counts: dict[int | None, int] = {}
    for window in _windows(config, layers):
        counts[window] = counts.get(window, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (item[0] is not None, item[0] or 0))
    experts = _get(config, "num_experts_per_tok") or 1
    widest = max(
        _get(config, "intermediate_size") or 4 * hidden, experts * (_get(config, "moe_intermediate_size") or 0)
    )
    return ModelShape(
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=widest,
        vocab_size=_need(config, "vocab_size"),
        max_len=_need(config, "max_position_embeddings"),
        groups=tuple(GroupShape(count, kv_heads, key_dim, value_dim, window) for window, count in ordered),
    )


def _head_sizes(config: Any, hidden: int, heads: int) -> tuple[int, int]:
    if _get(config, "kv_lora_rank"):
        key = _need(config, "qk_nope_head_dim") + _need(config, "qk_rope_head_dim")
        return key, _need(config, "v_head_dim")
    size = _get(config, "head_dim") or hidden // heads
    return size, size


def _windows(config: Any, layers: int) -> list[int | None]:
    window = _get(config, "sliding_window")
    kinds = _get(config, "layer_types")
    if kinds:
        shared = _get(config, "num_kv_shared_layers") or 0  # the last ones reuse the KV of earlier layers
        return [window if kind == "sliding_attention" else None for kind in kinds[: layers - shared]]
    if not window or _get(config, "use_sliding_window") is False:
        return [None] * layers
    pattern = _get(config, "sliding_window_pattern") or _get(config, "_sliding_window_pattern")
    if pattern:
        return [None if (layer + 1) % pattern == 0 else window for layer in range(layers)]
    return [window] * layers


def _get(config: Any, name: str) -> Any:
    for key in (name, *_ALIASES.get(name, ())):
        value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
        if value is not None:
            return value
    return None


def _need(config: Any, name: str) -> int:
    value = _get(config, name)
    if value is None:
        raise ModelError(f"the model's config has no {name}; memory cannot be planned without it")
    return int(value)
