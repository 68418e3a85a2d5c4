"""At load: packed, chunked and paged against the model's own eager attention, one sequence at a time.

A model's own support flags are not reliable, so nothing is served that has not passed this on the very weights,
backend and dtype it is served with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagefleet.backends.base import AttentionBatch, GroupTables
from pagefleet.runtime.errors import ModelError

from .attention import PAGED, set_attention

if TYPE_CHECKING:
    from .hf_model import HFModel

# Largest difference of logits, as a part of the spread of the eager ones. fp32 differs by the order of sums only; in 16
# bits the linear layers alone, run on other shapes, differ by about a third of these bounds.
TOLERANCE = {"fp32": 1e-3, "fp16": 3e-2, "bf16": 1.2e-1}
_LONGEST_TESTED_WINDOW = 64


@dataclass(frozen=True)
class SelfTest:
    """Outcome of the self-test; `max_error` is relative to the spread of the eager logits."""

    ok: bool
    reason: str
    max_error: float


class PagedRun:
    """Sequences run step by step over KV pools of their own; blocks of different sequences are interleaved.

    Args:
        capacity: most tokens a sequence will have.
    """

    def __init__(
        self, model: HFModel, num_sequences: int, capacity: int, block_size: int = 4, kv_dtype: str | None = None
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
            logits = self.model.logits(self.model.forward(tokens, positions.to(device), plan))
        for s, part in parts:
            self.lengths[s] += len(part)
        return list(logits.split(counts))


def test_sequences(model: HFModel) -> list[list[int]]:
    """Two sequences of different lengths; the longer one crosses every window short enough to be cheap."""
    windows = [w for w in model.windows if w is not None and w <= _LONGEST_TESTED_WINDOW]
    longest = min(max([11, *(w + 4 for w in windows)]), model.max_len)
    generator = torch.Generator().manual_seed(0)
    lengths = (min(7, longest), longest)
    return [torch.randint(model.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def eager_logits(model: HFModel, sequences: list[list[int]]) -> list[torch.Tensor]:
    """fp32 logits [length, V] of each sequence, by transformers alone."""
    set_attention(model.module, "eager")
    try:
        with torch.inference_mode():
            return [
                model.module(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0].float()
                for ids in sequences
            ]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelError(
            f"{type(model.module).__name__} is not supported: its own eager attention fails, so nothing can be "
            f"compared ({type(error).__name__}: {error})"
        ) from error
    finally:
        set_attention(model.module, PAGED)


def run_self_test(
    model: HFModel, sequences: list[list[int]] | None = None, expected: list[torch.Tensor] | None = None
) -> SelfTest:
    """Run the model packed and in two chunks, and compare with `expected` (by default: eager, now)."""
    sequences = sequences or test_sequences(model)
    expected = expected or eager_logits(model, sequences)
    run = PagedRun(model, len(sequences), max(map(len, sequences)))
    cuts = [max(1, len(ids) * (i + 1) // 3) for i, ids in enumerate(sequences)]  # chunks end inside blocks
    first = run.step([(i, ids[:cut]) for i, (ids, cut) in enumerate(zip(sequences, cuts, strict=True))])
    rest = [(i, ids[cut:]) for i, (ids, cut) in enumerate(zip(sequences, cuts, strict=True)) if len(ids) > cut]
    second = dict(zip((i for i, _ in rest), run.step(rest), strict=True)) if rest else {}
    limit, worst = TOLERANCE[model.dtype], 0.0
    for i, want in enumerate(expected):
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
            )
            return SelfTest(False, reason, worst)
    return SelfTest(True, f"packed and chunked equals eager within {worst:.2g} (limit {limit:g})", worst)
