"""At load: packed, chunked and paged against the model's own eager attention, one sequence at a time.

A model's own support flags are not reliable, so nothing is served that has not passed this on the very weights,
backend and dtype it is served with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from pagefleet.backends.base import AttentionBatch, Backend, GroupTables, KVGroup
from pagefleet.runtime.errors import ModelError

from .attention import PAGED, set_attention
from .layers import KeptOutputs, observing
from .quantize import Quantization

# Largest difference of logits, as a part of the spread of the eager ones. fp32 differs by the order of sums only; in 16
# bits the linear layers alone, run on other shapes, differ by about a third of these bounds.
TOLERANCE = {"fp32": 1e-3, "fp16": 3e-2, "bf16": 1.2e-1}
_LONGEST_TESTED_WINDOW = 64
# What quantising itself may add, by the start of a scheme's name (a router may choose other experts). The order of
# layers, positions and chunks is under test here, not quality: `pagefleet gate` measures that.
_QUANTIZATION_ERROR = {"w8a16": 0.5, "w8a8": 0.8, "w4a16": 0.8}


@dataclass(frozen=True)
class SelfTest:
    """Outcome of the self-test; `max_error` is relative to the spread of the eager logits."""

    ok: bool
    reason: str
    max_error: float


@dataclass(frozen=True)
class Expected:
    """What a model should give: fp32 logits [length, V] of each sequence, and of each sequence every layer's output.

    A layer's output is [length, H]; there are none for a model whose layers are not one list.
    """

    sequences: list[list[int]]
    logits: list[torch.Tensor]
    layers: list[list[torch.Tensor]]


class PagedModel(Protocol):
    """What the self-test needs of a model, however it is run."""

    backend: Backend
    device: str
    dtype: str
    quantization: Quantization
    kv_groups: Callable[[int, str], tuple[KVGroup, ...]]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def observing(self, note: Callable[[int, torch.Tensor], None]) -> AbstractContextManager[None]: ...


class PagedRun:
    """Sequences run step by step over KV pools of their own; blocks of different sequences are interleaved.

    Args:
        capacity: most tokens a sequence will have.
    """

    def __init__(
        self, model: PagedModel, num_sequences: int, capacity: int, block_size: int = 4, kv_dtype: str | None = None
    ) -> None:
        self.model, self.block_size = model, block_size
        self.lengths = [0] * num_sequences
        backend = model.backend
        groups = model.kv_groups(block_size, kv_dtype or model.dtype)
        blocks = -(-capacity // block_size)
        # block 0 is the null block; block b of sequence s is 1 + b * num_sequences + s
        self.tables = torch.arange(1, 1 + blocks * num_sequences).view(blocks, num_sequences).T.contiguous()
        self.pools = tuple(backend.allocate_pool(group, 1 + blocks * num_sequences) for group in groups)

    def step(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Append tokens to sequences, all in one forward pass; (sequence, its new tokens) each.

        Returns fp32 logits [new tokens, V] for each part.
        """
        device = self.model.device
        counts = [len(tokens) for _, tokens in parts]
        starts = [self.lengths[s] for s, _ in parts]
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
        tables = torch.stack([self.tables[s] for s, _ in parts])
        row = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(counts))
        slots = tables[row, positions // self.block_size] * self.block_size + positions % self.block_size
        tables = tables.to(device, torch.int32)
        batch = AttentionBatch(
            query_starts=torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32),
            kv_lengths=torch.tensor([a + n for a, n in zip(starts, counts, strict=True)], dtype=torch.int32).to(device),
            groups=tuple(GroupTables(slots.to(device), tables) for _ in self.pools),
        )
        tokens = torch.tensor([t for _, part in parts for t in part], device=device)
        with torch.inference_mode():
            plan = self.model.backend.plan(batch, self.pools)
            logits = self.model.logits(self.model.forward(tokens, positions.to(device), plan)).float()
        for s, part in parts:
            self.lengths[s] += len(part)
        return list(logits.split(counts))


def test_sequences(windows: Sequence[int | None], max_len: int, vocabulary: int) -> list[list[int]]:
    """Two sequences of different lengths; the longer one crosses every window short enough to be cheap."""
    short = [w for w in windows if w is not None and w <= _LONGEST_TESTED_WINDOW]
    longest = min(max([11, *(w + 4 for w in short)]), max_len)
    generator = torch.Generator().manual_seed(0)
    lengths = (min(7, longest), longest)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def run_eager(
    module: Any, sequences: list[list[int]], device: str, layers: Sequence[tuple[str, nn.Module]] = ()
) -> Expected:
    """Run each sequence by transformers alone, with its own eager attention. `layers` are those to record."""
    set_attention(module, "eager")
    logits, outputs = [], []
    try:
        with torch.inference_mode():
            for ids in sequences:
                kept = KeptOutputs()
                with observing(layers, kept):
                    out = module(input_ids=torch.tensor([ids], device=device), use_cache=False)
                logits.append(out.logits[0].float())
                outputs.append(kept.outputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelError(
            f"{type(module).__name__} is not supported: its own eager attention fails, so nothing can be "
            f"compared ({type(error).__name__}: {error})"
        ) from error
    finally:
        set_attention(module, PAGED)
    return Expected(sequences, logits, outputs)


def run_self_test(model: PagedModel, expected: Expected) -> SelfTest:
    """Run the model packed and in two chunks, and compare with what is expected."""
    sequences = expected.sequences
    run = PagedRun(model, len(sequences), max(map(len, sequences)))
    cuts = [max(1, len(ids) * (i + 1) // 3) for i, ids in enumerate(sequences)]  # chunks end inside blocks
    first = run.step([(i, ids[:cut]) for i, (ids, cut) in enumerate(zip(sequences, cuts, strict=True))])
    rest = [(i, ids[cut:]) for i, (ids, cut) in enumerate(zip(sequences, cuts, strict=True)) if len(ids) > cut]
    second = dict(zip((i for i, _ in rest), run.step(rest), strict=True)) if rest else {}
    limit, worst = _limit(model), 0.0
    for i, want in enumerate(expected.logits):
        got = torch.cat([first[i], second[i]]) if i in second else first[i]
        if got.shape != want.shape:
            return SelfTest(False, f"logits have shape {tuple(got.shape)}, expected {tuple(want.shape)}", float("inf"))
        finite = want.isfinite()  # some heads mask part of the vocabulary
        if not torch.equal(finite, got.isfinite()):
            return SelfTest(False, f"logits of sequence {i} are not finite where eager ones are", float("inf"))
        want, got = want.masked_fill(~finite, 0), got.masked_fill(~finite, 0)
        spread = float((want - want.mean(-1, keepdim=True)).abs().max())
        errors = (got - want).abs().amax(-1) / max(spread, 1e-12)
        worst = max(worst, float(errors.max()))
        if worst > limit:
            at = int((errors > limit).nonzero()[0])
            part = "first" if at < cuts[i] else "second"
            reason = (
                f"logits of sequence {i} differ from eager attention from position {at} on ({part} chunk) "
                f"by {worst:.2g} of their spread; at most {limit:g} is rounding in {model.dtype}"
                f"{_first_wrong_layer(model, expected, limit)}"
            )
            return SelfTest(False, reason, worst)
    return SelfTest(True, f"packed and chunked equals eager within {worst:.2g} (limit {limit:g})", worst)


def _limit(model: PagedModel) -> float:
    scheme = model.quantization.scheme
    return TOLERANCE[model.dtype] + (0.0 if scheme is None else _QUANTIZATION_ERROR[scheme.split("_")[0]])


def _first_wrong_layer(model: PagedModel, expected: Expected, limit: float) -> str:
    """Which layer is the first to differ when the sequences run whole, for the reason of a failed test."""
    for i, (ids, want) in enumerate(zip(expected.sequences, expected.layers, strict=True)):
        kept = KeptOutputs()
        if want:
            with model.observing(kept):
                PagedRun(model, 1, len(ids)).step([(0, ids)])
        for number, (one, other) in enumerate(zip(kept.outputs, want, strict=False)):
            if float((one - other).abs().max()) > limit * float(other.abs().max()):
                return f"; layer {number} is the first that differs (sequence {i}, run whole)"
    return ""
