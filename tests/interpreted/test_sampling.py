"""Tokens chosen by the kernels are those of the specification."""

from __future__ import annotations

import math

import pytest
import torch

from pagefleet.kernels import reference
from pagefleet.kernels.triton.sampling import draw, largest, score

VOCAB = 9500  # three programs' worth of columns, the last one not full


def logits_of(rows, dtype=torch.float32, scale=3.0):
    x = torch.full((rows, VOCAB + 3), torch.nan)
    x[:, :VOCAB] = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(4)) * scale
    return x.to(dtype)[:, :VOCAB]


def draw_all(logits, keys, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    n = len(keys)
    rows = torch.arange(n) % len(logits)
    floor = -math.log(min_p) if min_p > 0 else math.inf
    signed = torch.tensor([k - 2**64 if k >= 2**63 else k for k in keys])
    got = draw(
        logits, rows, logits.float().amax(-1)[rows], signed, torch.full((n,), temperature),
        torch.full((n,), top_k), torch.full((n,), top_p), torch.full((n,), floor),
    )  # fmt: skip
    expected = [
        reference.draw_token(logits[r], float(logits[r].float().max()), k, temperature, top_k, top_p, min_p)
        for r, k in zip(rows.tolist(), keys, strict=True)
    ]
    return got.tolist(), expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_logit_is_found_and_the_first_of_equals(dtype):
    x = logits_of(5, dtype)
    x[1, [9300, 7, 4100]] = 50.0
    x[2, VOCAB - 1] = torch.nan
    x[3] = -math.inf
    x[4, 5], x[4, 3:5], x[4, 6:] = 0.0, -0.0, -1.0
    x[4, :3] = -2.0
    ids, values = largest(x)
    assert ids.tolist() == [int(x[0].argmax()), 7, VOCAB - 1, 0, 3]
    expected = [reference.largest_token(row) for row in x]
    assert ids.tolist() == [token for token, _ in expected]
    assert values.tolist() == pytest.approx([value for _, value in expected], abs=0, nan_ok=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 40, "temperature": 1.7},
        {"top_p": 0.9},
        {"top_p": 0.05, "min_p": 0.02},
        {"top_k": 300, "top_p": 0.6, "min_p": 0.001, "temperature": 0.8},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_draws_are_the_specifications(options):
    keys = [3, 2**63 + 11, 2**64 - 1, 98765432123456789]
    got, expected = draw_all(logits_of(2), keys, **options)
    assert got == expected


def test_what_equals_the_last_one_kept_stays_and_forbidden_tokens_are_never_drawn():
    x = torch.full((1, VOCAB), -math.inf)
    x[0, 100:160] = 1.0
    drawn = set()
    for top_k, top_p in ((1, 1.0), (0, 0.01)):
        got, expected = draw_all(x, list(range(40, 52)), top_k=top_k, top_p=top_p)
        assert got == expected
        drawn |= set(got)
    assert len(drawn) > 6  # of sixty equal ones
    assert drawn <= set(range(100, 160))


def test_small_noise_is_exact_where_it_decides():
    """Keys whose smallest noise of all tokens is the smallest: a logarithm of 1 - u would tie or invent them."""
    keys = [k for k in range(400) if float(reference.exponential(k, torch.arange(VOCAB)).min()) < 2e-5][:6]
    assert keys
    got, expected = draw_all(torch.zeros(1, VOCAB), keys)
    assert got == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_ranks_and_totals(dtype):
    x = logits_of(3, dtype)
    rows, ids = torch.tensor([0, 0, 2, 1]), torch.tensor([0, VOCAB - 1, 1234, 77])
    x[1, 77] = x[1].max() + 1
    logprobs, ranks, totals = score(x, rows, ids)
    expected = [reference.score_token(x[r].double(), t) for r, t in zip(rows.tolist(), ids.tolist(), strict=True)]
    assert logprobs.tolist() == pytest.approx([logprob for logprob, _, _ in expected], rel=1e-6, abs=1e-5)
    assert ranks.tolist() == [rank for _, rank, _ in expected]
    assert totals.tolist() == pytest.approx([total for _, _, total in expected], rel=1e-6, abs=1e-6)
    assert int(ranks[3]) == 1


def test_no_rows_are_no_results():
    empty, none = torch.zeros(0, VOCAB), torch.zeros(0).long()
    assert largest(empty)[0].shape == (0,)
    assert draw(empty, none, empty[:, 0], none, empty[:, 0], none, empty[:, 0], empty[:, 0]).shape == (0,)
    assert score(empty, none, none)[0].shape == (0,)
