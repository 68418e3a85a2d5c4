"""The operations of `backends/selection.py` in plain torch, one row at a time but for the first argmax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagefleet.kernels import reference

from .selection import Draw, Score


class TorchSelection:
    """`Selection` on any device that torch knows."""

    def largest(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """See `Selection.largest`."""
        if logits.is_cpu:  # numpy's argmax is eight times as fast as torch's; it has no bfloat16
            array = logits.detach().float().numpy()
            best = array.argmax(axis=1)
            return best.tolist(), array[np.arange(len(best)), best].tolist()
        ids = logits.argmax(dim=-1)
        return ids.tolist(), logits.gather(1, ids[:, None]).flatten().tolist()

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """See `Selection.draw`."""
        return [
            reference.draw_token(logits[d.row], d.largest, d.key, d.temperature, d.top_k, d.top_p, d.min_p)
            for d in draws
        ]

    def score(self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> list[Score]:
        """See `Selection.score`."""
        scores = []
        for row, token_id in zip(rows, token_ids, strict=True):
            scores.append(Score(*reference.score_token(logits[row], token_id)))
        return scores
