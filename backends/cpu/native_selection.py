"""Choosing tokens by the compiled kernels: straight from the model's logits, several rows at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pagefleet.kernels.cpu import FLOAT_TYPES, NativeKernels

from ..selection import Draw, Score
from ..torch_selection import TorchSelection


class NativeSelection(TorchSelection):
    """`Selection` with compiled kernels. A dtype or a layout that they do not have goes to plain torch."""

    def __init__(self, native: NativeKernels) -> None:
        self._native = native

    def largest(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """See `Selection.largest`."""
        where = _arguments(logits)
        if where is None:
            return super().largest(logits)
        ids, values = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        self._native.largest(*where, len(logits), ids.data_ptr(), values.data_ptr())
        return ids.tolist(), values.tolist()

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """See `Selection.draw`."""
        where = _arguments(logits)
        if where is None or not draws:
            return super().draw(logits, draws)
        integers = torch.tensor([(_within(logits, d.row, 0), _signed(d.key), d.top_k) for d in draws])
        reals = torch.tensor([(d.largest, d.temperature, d.top_p, _log(d.min_p)) for d in draws], dtype=torch.float64)
        ids = torch.empty(len(draws), dtype=torch.int64)
        self._native.draw(*where, len(draws), integers.data_ptr(), reals.data_ptr(), ids.data_ptr())
        return ids.tolist()

    def score(self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> list[Score]:
        """See `Selection.score`."""
        where, count = _arguments(logits), len(rows)
        if where is None or not count:
            return super().score(logits, rows, token_ids)
        row = torch.tensor([_within(logits, r, 0) for r in rows])
        ids = torch.tensor([_within(logits, i, 1) for i in token_ids])
        logprobs, totals = torch.empty(2, count, dtype=torch.float64)
        ranks = torch.empty(count, dtype=torch.int64)
        self._native.score(*where, count, *(x.data_ptr() for x in (row, ids, logprobs, ranks, totals)))
        return [Score(*values) for values in zip(logprobs.tolist(), ranks.tolist(), totals.tolist(), strict=True)]


def _arguments(logits: torch.Tensor) -> tuple[int, int, int, int] | None:
    """(type, address, stride, V) of logits [L, V]; None for what the kernels cannot read."""
    number = FLOAT_TYPES.get(logits.dtype)
    if number is None or logits.shape[1] == 0 or logits.stride(1) != 1:
        return None
    return number, logits.data_ptr(), logits.stride(0), logits.shape[1]


def _within(logits: torch.Tensor, index: int, dimension: int) -> int:
    if not 0 <= index < logits.shape[dimension]:
        what = ("row", "token id")[dimension]
        raise IndexError(f"{what} {index} is outside of the logits, which are {tuple(logits.shape)}")
    return index


def _log(min_p: float) -> float:
    return math.log(min_p) if min_p > 0.0 else -math.inf


def _signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key
