"""Choosing tokens from logits [L, V] without sorting or copying them: largest, draw, log-probability and rank.

Top-k and top-p find their bound by radix selection over the bits of each token's distance from the most likely one,
four bits a pass: eight passes over a row that stays in the second-level cache, whatever k and p are.

A row belongs to one program. Each of its lanes keeps the best (or the sum) of the columns it has seen, and the lanes
are compared once, after the last column: a reduction on the way would have the whole program wait for each tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 4096  # of one step over a row: sixteen elements a thread
BUCKET_COLUMNS = 1024  # of one step of a selection, which keeps sixteen sums a column
WARPS = 8


@triton.jit
def _values(logits, columns, vocab):
    return tl.load(logits + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _first_of(best, at):
    """The lowest column among the lanes whose best is the best of all."""
    return tl.min(tl.where(best == tl.max(best, 0), at, 0x7FFFFFFF), 0)


@triton.jit
def largest_kernel(ids, values, logits, stride, vocab, COLUMNS: tl.constexpr):
    """One row: the first id of its largest logit; NaN is larger than all else."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    best = tl.full((COLUMNS,), -0x7FFFFFFF, tl.int32)
    at = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, vocab, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x = _values(logits, columns, vocab) + 0.0  # makes -0.0 equal to 0.0
        bits = x.to(tl.int32, bitcast=True)
        order = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        better = (order > best) & (columns < vocab)
        best = tl.where(better, order, best)
        at = tl.where(better, columns, at)
    first = _first_of(best, at)
    tl.store(ids + row, first)
    tl.store(values + row, tl.load(logits + first).to(tl.float32))


@triton.jit
def _distances(logits, columns, vocab, largest, temperature):
    """How far a token's logit over the temperature lies below the largest: 0 for that one, infinite past the end."""
    return tl.div_rn(largest - _values(logits, columns, vocab), temperature + tl.zeros(columns.shape, tl.float32))


@triton.jit
def _bound(logits, vocab, largest, temperature, within, target, BY_MASS: tl.constexpr, COLUMNS: tl.constexpr):
    """The smallest distance D such that those up to D, of all up to `within`, number (or weigh) at least `target`."""
    buckets = tl.arange(0, 16)
    prefix = 0
    below = tl.zeros((1,), tl.float64)
    for step in range(8):
        shift = 28 - 4 * step
        lanes = tl.zeros((16, COLUMNS), tl.float32)
        for start in range(0, vocab, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            distance = _distances(logits, columns, vocab, largest, temperature)
            bits = distance.to(tl.int32, bitcast=True)
            inside = (columns < vocab) & (distance <= within) & (((bits >> shift) >> 4) == prefix)
            amount = tl.exp(-distance) if BY_MASS else tl.full((COLUMNS,), 1.0, tl.float32)
            amount = tl.where(inside, amount, 0.0)
            digit = (bits >> shift) & 15
            lanes += tl.where(digit[None, :] == buckets[:, None], amount[None, :], 0.0)
        sums = tl.sum(lanes.to(tl.float64), 1)
        reached = below + tl.cumsum(sums, 0)
        chosen = tl.sum((reached < target).to(tl.int32), 0)
        chosen = tl.minimum(chosen, tl.max(tl.where(sums > 0.0, buckets, 0), 0))  # rounding may leave it short
        below += tl.sum(tl.where(buckets < chosen, sums, 0.0), 0)
        prefix = prefix * 16 + chosen
    return prefix.to(tl.float32, bitcast=True)


@triton.jit
def _exponential(key, ids):
    """See `kernels.reference.exponential`: SplitMix64 of key and id, made an Exponential(1) number."""
    bits = (ids + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + key.to(tl.uint64)
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    uniform = ((bits >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = tl.minimum(uniform, 0.99999994)
    u = tl.minimum(uniform, 0.0625)  # -log(1 - u) as a series: 1 - u would lose what decides the draw
    series = u * (1 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * (0.2 + u * (0.1666666667 + u * 0.1428571429))))))
    return tl.where(uniform < 0.0625, series, -tl.log(1.0 - uniform))


@triton.jit
def draw_kernel(
    ids,
    logits,
    rows,
    largest,
    keys,
    temperatures,
    top_ks,
    top_ps,
    floors,
    stride,
    vocab,
    COLUMNS: tl.constexpr,
    BUCKET_COLUMNS: tl.constexpr,
):
    """One draw: the largest weight / noise among what min_p (a bound on the distance), top-k and top-p leave."""
    draw = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + draw) * stride
    top, key, temperature = tl.load(largest + draw), tl.load(keys + draw), tl.load(temperatures + draw)
    top_k, top_p, within = tl.load(top_ks + draw), tl.load(top_ps + draw), tl.load(floors + draw)
    if (top_k > 0) & (top_k < vocab):
        among_all = _bound(logits, vocab, top, temperature, float("inf"), top_k.to(tl.float64), False, BUCKET_COLUMNS)
        within = tl.minimum(within, among_all)
    if top_p < 1.0:
        mass = tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, vocab, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            distance = _distances(logits, columns, vocab, top, temperature)
            mass += tl.where(distance <= within, tl.exp(-distance), 0.0)
        target = tl.sum(mass.to(tl.float64), 0) * top_p.to(tl.float64)
        within = tl.minimum(within, _bound(logits, vocab, top, temperature, within, target, True, BUCKET_COLUMNS))
    best = tl.full((COLUMNS,), -1.0, tl.float32)
    at = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, vocab, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        distance = _distances(logits, columns, vocab, top, temperature)
        scores = tl.exp(-distance) / _exponential(key, columns)
        better = (columns < vocab) & (distance <= within) & (scores > best)
        best = tl.where(better, scores, best)
        at = tl.where(better, columns, at)
    tl.store(ids + draw, _first_of(best, at))


@triton.jit
def score_kernel(logprobs, ranks, totals, logits, rows, ids, stride, vocab, COLUMNS: tl.constexpr):
    """One token: its log-probability, how many logits are larger, and the row's log-sum-exp."""
    item = tl.program_id(0).to(tl.int64)
    logits += tl.load(rows + item) * stride
    chosen = tl.load(logits + tl.load(ids + item)).to(tl.float32)
    highest = tl.full((COLUMNS,), float("-inf"), tl.float32)
    sums = tl.zeros((COLUMNS,), tl.float32)
    larger = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, vocab, COLUMNS):
        x = _values(logits, start + tl.arange(0, COLUMNS), vocab)
        raised = tl.maximum(highest, x)
        reference = tl.where(raised == float("-inf"), 0.0, raised)  # a lane that has seen nothing yet
        sums = sums * tl.exp(highest - reference) + tl.exp(x - reference)
        highest = raised
        larger += (x > chosen).to(tl.int32)
    overall = tl.max(highest, 0)
    reference = tl.where(overall == float("-inf"), 0.0, overall)
    total = reference + tl.log(tl.sum(sums * tl.exp(highest - reference), 0))
    tl.store(logprobs + item, chosen - total)
    tl.store(ranks + item, tl.sum(larger, 0) + 1)
    tl.store(totals + item, total)


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of logits [L, V] the lowest id (int64) with the largest logit, and that logit (float32)."""
    count, vocab = logits.shape
    ids = torch.empty(count, dtype=torch.int64, device=logits.device)
    values = torch.empty(count, dtype=torch.float32, device=logits.device)
    if count:
        largest_kernel[(count,)](ids, values, logits, logits.stride(0), vocab, COLUMNS=COLUMNS, num_warps=WARPS)
    return ids, values


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    largest: torch.Tensor,
    keys: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    floors: torch.Tensor,
) -> torch.Tensor:
    """A token for each of n draws, int64 [n]; see `kernels.reference.draw_token`.

    Args:
        rows, keys, top_k: int64 [n]; the keys' 64 bits are taken as unsigned.
        largest, temperatures, top_p: float32 [n].
        floors: float32 [n], -log(min_p): how far below the most likely token one may lie; infinity for min_p 0.
    """
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if len(rows):
        draw_kernel[(len(rows),)](
            ids, logits, rows, largest, keys, temperatures, top_k, top_p, floors, logits.stride(0), logits.shape[1],
            COLUMNS=COLUMNS, BUCKET_COLUMNS=BUCKET_COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return ids


def score(
    logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probability float32, rank int64, log-sum-exp float32), [n] each, of token ids[i] in row rows[i]."""
    logprobs, totals = (torch.empty(len(rows), dtype=torch.float32, device=logits.device) for _ in range(2))
    ranks = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if len(rows):
        score_kernel[(len(rows),)](
            logprobs, ranks, totals, logits, rows, ids, logits.stride(0), logits.shape[1],
            COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return logprobs, ranks, totals
