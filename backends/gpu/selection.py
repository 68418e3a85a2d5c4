"""`Selection` by the Triton kernels: logits stay on the device, and a few numbers a row come back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pagefleet.kernels.triton import sampling

from ..selection import Draw, Score


class GpuSelection:
    """See `backends.selection.Selection`."""

    def largest(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """See `Selection.largest`."""
        ids, values = sampling.largest(logits)
        return ids.tolist(), values.tolist()

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """See `Selection.draw`."""

        def column(values: list[int] | list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(logits.device, non_blocking=True)

        keys = [d.key - 2**64 if d.key >= 2**63 else d.key for d in draws]
        floors = [-math.log(d.min_p) if d.min_p > 0.0 else math.inf for d in draws]
        drawn = sampling.draw(
            logits,
            column([d.row for d in draws], torch.int64),
            column([d.largest for d in draws], torch.float32),
            column(keys, torch.int64),
            column([d.temperature for d in draws], torch.float32),
            column([d.top_k for d in draws], torch.int64),
            column([d.top_p for d in draws], torch.float32),
            column(floors, torch.float32),
        )
        return drawn.tolist()

    def score(self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> list[Score]:
        """See `Selection.score`."""
        places = (torch.tensor(list(x), dtype=torch.int64, device=logits.device) for x in (rows, token_ids))
        columns = [x.tolist() for x in sampling.score(logits, *places)]
        return [Score(*item) for item in zip(*columns, strict=True)]
