"""Compiled selection equals its reference twin on every instruction set, bit for bit where bits decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagefleet.backends.cpu.native_selection import NativeSelection
from pagefleet.backends.selection import Draw
from pagefleet.backends.torch_selection import TorchSelection

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABS = [1, 5, 16, 33, 1023, 49153]  # around a register and a block, and no multiple of either
TWIN = TorchSelection()


@pytest.fixture
def selection(native: Any) -> NativeSelection:
    return NativeSelection(native)


def make_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32, scale: float = 4.0) -> torch.Tensor:
    """Random logits in a buffer whose other elements are NaN."""
    generator = torch.Generator().manual_seed(vocab)
    view = torch.full((rows + 2, vocab + 7), torch.nan, dtype=dtype)[1:-1, 3 : vocab + 3]
    return view.copy_(torch.randn(rows, vocab, generator=generator) * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_largest_is_the_first_of_the_largest(selection: NativeSelection, dtype: torch.dtype, vocab: int) -> None:
    logits = make_logits(6, vocab, dtype)  # of bfloat16 many are equal
    logits[1, vocab // 2 :] = 100.0
    logits[2] = float("-inf")
    logits[3, -1] = float("inf")
    assert selection.largest(logits) == TWIN.largest(logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_nan_anywhere_is_the_largest(selection: NativeSelection, dtype: torch.dtype, vocab: int) -> None:
    for place in {0, vocab // 2, vocab - 1}:
        logits = make_logits(2, vocab, dtype)
        logits[1, place:] = float("inf")
        logits[1, place] = float("nan")
        ids, values = selection.largest(logits)
        assert ids[1] == place
        assert values[1] != values[1]
        assert values[0] == float(logits[0].max())


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1e-3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 2.5},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 0.01, "top_k": 50, "top_p": 0.8, "temperature": 1.4},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_are_those_of_the_twin(selection: NativeSelection, dtype: torch.dtype, vocab: int) -> None:
    logits = make_logits(3, vocab, dtype)
    _, largest = TWIN.largest(logits)
    draws = [
        Draw(row, largest[row], (0x9E3779B97F4A7C15 * (7 * i + row + 1)) % 2**64, **filters)
        for i, filters in enumerate(FILTERS)
        for row in range(3)
    ]
    assert selection.draw(logits, draws) == TWIN.draw(logits, draws)


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_k": 2000}, {"top_p": 0.9}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("kind", ["few values", "all equal", "mostly banned", "a cliff"])
def test_draws_are_those_of_the_twin_where_logits_are_equal_or_banned(
    selection: NativeSelection, filters: dict[str, Any], kind: str
) -> None:
    logits = make_logits(1, 5000)
    if kind == "few values":
        logits.round_()
    elif kind == "all equal":
        logits.fill_(-3.25)
    elif kind == "mostly banned":
        logits[0, torch.arange(5000) % 613 != 7] = float("-inf")
    else:
        logits[0, 100:] -= 1e6
    largest = TWIN.largest(logits)[1][0]
    draws = [Draw(0, largest, 977 * key, **filters) for key in range(20)]
    assert selection.draw(logits, draws) == TWIN.draw(logits, draws)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_scores(selection: NativeSelection, dtype: torch.dtype, vocab: int) -> None:
    logits = make_logits(4, vocab, dtype)
    if vocab > 5:
        logits[2, 1:5] = float("-inf")
    rows, ids = [3, 0, 2, 2], [vocab - 1, 0, vocab // 2, vocab // 3]
    wide = torch.log_softmax(logits.double(), -1)
    totals = torch.logsumexp(logits.double(), -1)
    for row, i, score in zip(rows, ids, selection.score(logits, rows, ids), strict=True):
        assert score.logprob == pytest.approx(float(wide[row, i]), abs=2e-6)
        assert score.total == pytest.approx(float(totals[row]), abs=2e-6)
        assert score.rank == 1 + int((logits[row] > logits[row, i]).sum())


def test_a_row_gives_the_same_alone_and_among_others_and_on_any_number_of_threads(selection: NativeSelection) -> None:
    logits, threads = make_logits(9, 49153), torch.get_num_threads()
    largest = TWIN.largest(logits)[1]

    def all_of(rows: list[int], base: int) -> list[Any]:
        part = logits[base : base + 1] if len(rows) == 1 else logits
        local = [r - base for r in rows] if len(rows) == 1 else rows
        draws = [Draw(i, largest[r], r, top_p=0.95) for i, r in zip(local, rows, strict=True)]
        return list(
            zip(selection.draw(part, draws), selection.score(part, local, [r * 1000 for r in rows]), strict=True)
        )

    try:
        torch.set_num_threads(1)
        alone = [all_of([r], r)[0] for r in range(9)]
        for count in (1, 2):
            torch.set_num_threads(count)
            assert all_of(list(range(9)), 0) == alone
    finally:
        torch.set_num_threads(threads)


def test_what_does_not_exist_is_refused(selection: NativeSelection) -> None:
    logits = make_logits(2, 10)
    with pytest.raises(IndexError, match="row 2 is outside"):
        selection.draw(logits, [Draw(2, 0.0, 1)])
    with pytest.raises(IndexError, match="token id 10 is outside"):
        selection.score(logits, [0], [10])


def test_a_dtype_or_layout_that_the_kernels_lack_goes_to_torch(selection: NativeSelection) -> None:
    logits = make_logits(3, 40)
    for other in (logits.double(), logits.T.contiguous().T):
        assert selection.largest(other)[0] == TWIN.largest(logits)[0]
        draws = [Draw(i, float(logits[i].max()), i) for i in range(3)]
        assert selection.draw(other, draws) == TWIN.draw(logits, draws)
        assert selection.score(other, [1], [4])[0].rank == TWIN.score(logits, [1], [4])[0].rank
