"""StepPlan -> Batch: flat arrays, one token after another, no padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagefleet.backends.base import AttentionBatch, GroupTables
from pagefleet.runtime.scheduler import Scheduled, StepPlan


@dataclass(frozen=True)
class Batch:
    """A step as the model sees it.

    token_ids, positions: int64 [T]; attention: where the tokens' KV lives.
    sample_rows: int64 [L], rows of [T] whose logits choose a next token; sampling: the entries they belong to, each
        with one row for its last token and one for every token of its draft.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    sample_rows: torch.Tensor
    sampling: list[Scheduled]


def build_batch(plan: StepPlan, block_size: int, device: str = "cpu") -> Batch:
    """Flatten a plan with at least one scheduled sequence."""
    entries = plan.scheduled
    new = np.array([e.num_new for e in entries], dtype=np.int64)
    starts = np.zeros(len(entries) + 1, dtype=np.int64)
    np.cumsum(new, out=starts[1:])
    token_ids = np.array([token for e in entries for token in e.token_ids], dtype=np.int64)
    first = np.array([e.start for e in entries], dtype=np.int64)
    row_of = np.repeat(np.arange(len(entries)), new)
    positions = np.arange(starts[-1]) - starts[row_of] + first[row_of]

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    groups = []
    for group in range(len(entries[0].sequence.tables)):
        tables = [e.sequence.tables[group] for e in entries]
        block_tables = np.zeros((len(entries), max(len(t) for t in tables)), dtype=np.int32)
        for row, table in enumerate(tables):
            block_tables[row, : len(table)] = np.frombuffer(table, dtype=np.int32)
        slots = block_tables[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
        groups.append(GroupTables(on_device(slots), on_device(block_tables)))
    sampling = [e for e in entries if e.samples]
    ends = starts[1:].tolist()
    rows = [
        row for e, end in zip(entries, ends, strict=True) if e.samples for row in range(end - 1 - len(e.draft), end)
    ]
    attention = AttentionBatch(
        query_starts=on_device(starts.astype(np.int32)),
        kv_lengths=on_device((first + new).astype(np.int32)),
        groups=tuple(groups),
    )
    sample_rows = on_device(np.array(rows, dtype=np.int64))
    return Batch(on_device(token_ids), on_device(positions), attention, sample_rows, sampling)
