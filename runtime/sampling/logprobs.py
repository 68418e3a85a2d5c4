"""Raw log-probabilities: of the logits as the model gave them, before penalties, masks and temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagefleet.backends.selection import Score, Selection
from pagefleet.runtime.outputs import Logprob


def token_logprobs(logits: Tensor, token_id: int, score: Score, k: int) -> dict[int, Logprob]:
    """Log-probability and rank of a token and of the `k` most likely ones.

    Args:
        logits: [V], raw.
        score: of the token.

    Returns:
        The token first, then the most likely by rank (equal ones by id). A rank is 1 + the number of tokens with a
        strictly greater logit. `decoded_token` is left None.
    """
    result = {token_id: Logprob(score.logprob, score.rank)}
    ids, values = most_likely(logits, k)
    rank, previous = 0, None
    for place, (i, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1):
        rank = rank if value == previous else place
        previous = value
        result.setdefault(i, Logprob(value - score.total, rank))
    return result


def most_likely(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the k largest of logits [V], largest first, equal ones by id."""
    k = min(k, logits.shape[0])
    if k == 0:
        return logits.new_empty(0, dtype=torch.int64), logits.new_empty(0)
    smallest = torch.topk(logits, k).values[-1]
    ids = (logits >= smallest).nonzero().flatten()
    values, order = torch.sort(logits[ids], descending=True, stable=True)
    return ids[order[:k]], values[:k]


def prompt_logprobs(
    selection: Selection, logits: Tensor, targets: Sequence[int] | Tensor, k: int
) -> list[dict[int, Logprob]]:
    """Log-probabilities of prompt tokens.

    Args:
        logits: [L, V], raw; row i predicts `targets[i]`.
        targets: the L prompt tokens that follow.
        k: most likely tokens to list beside each target.
    """
    ids = targets.tolist() if isinstance(targets, Tensor) else list(targets)
    if len(ids) != logits.shape[0]:
        raise ValueError(f"prompt_logprobs: expected one target per row, got {len(ids)} for {logits.shape[0]} rows")
    scores = selection.score(logits, range(len(ids)), ids)
    return [token_logprobs(row, token_id, score, k) for row, token_id, score in zip(logits, ids, scores, strict=True)]
