"""The sampler: order of processors, draws that follow the softmax, rows that do not know their neighbours."""

from __future__ import annotations

import pytest
import torch

from pagefleet.backends import host
from pagefleet.backends.cpu.native_selection import NativeSelection
from pagefleet.kernels.cpu import load_native, why_not_native
from pagefleet.runtime.errors import ErrorCode
from pagefleet.runtime.sampling import sampler
from pagefleet.runtime.sampling.grammar import GrammarFactory
from pagefleet.runtime.sampling.sampler import Sampler, SamplingRow
from pagefleet.runtime.sampling_params import SamplingParams, StructuredOutput

V = 50


@pytest.fixture(params=["torch", "compiled"], autouse=True)
def _selection(request, monkeypatch):
    """Every promise holds with plain torch and with the compiled kernels of the best instruction set here."""
    if request.param == "compiled":
        native = load_native(host.isa())
        if native is None:
            pytest.skip(why_not_native(host.isa()))
        monkeypatch.setattr(sampler, "TorchSelection", lambda: NativeSelection(native))


EOS = frozenset({2})


def row(seed=0, prompt=(1,), output=(), bad_words=(), grammar=None, **params):
    return SamplingRow(SamplingParams(**params), list(prompt), list(output), seed, EOS, bad_words, grammar)


def ids(logits, *rows):
    return [s.token_id for s in Sampler(logits.shape[1]).sample(logits, list(rows))]


def draws(logits, count, **params):
    """Frequencies of `count` draws at successive positions of one seed."""
    output, sampler = [], Sampler(logits.shape[1])
    for position in range(count):
        output.append(sampler.sample(logits, [row(output=[0] * position, seed=7, **params)])[0].token_id)
    return torch.bincount(torch.tensor(output), minlength=logits.shape[1])


def random_logits(rows, vocab=V, scale=3.0, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def logits_of(**values):
    logits = torch.zeros(1, V)
    for name, value in values.items():
        logits[0, int(name[1:])] = value
    return logits


def test_greedy_takes_the_largest_and_of_equal_ones_the_lowest_id():
    assert ids(logits_of(t7=5.0, t3=5.0, t9=4.0), row(temperature=0.0)) == [3]


def test_top_k_of_one_equals_temperature_zero():
    logits = random_logits(20)
    for greedy in ({"temperature": 0.0}, {"top_k": 1}, {"top_k": 1, "temperature": 5.0, "top_p": 0.3}):
        assert ids(logits, *[row(seed=i, **greedy) for i in range(20)]) == logits.argmax(-1).tolist()


def test_same_seed_repeats_and_draws_vary_by_step_and_seed():
    logits = torch.zeros(1, 1000)
    first = [ids(logits, row(seed=3, output=[0] * n))[0] for n in range(30)]
    assert first == [ids(logits, row(seed=3, output=[0] * n))[0] for n in range(30)]
    assert len(set(first)) > 25
    assert first != [ids(logits, row(seed=4, output=[0] * n))[0] for n in range(30)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits = random_logits(1, vocab=12, scale=1.0)
    count = 4000
    expected = torch.softmax(logits[0] / temperature, 0) * count
    chi_square = float(((draws(logits, count, temperature=temperature) - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 0.1% of the chi-square distribution with 11 degrees of freedom


def test_frequencies_within_the_nucleus_follow_the_softmax():
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]])
    seen = draws(probabilities.log(), 3000, top_p=0.85)
    expected = torch.tensor([0.4, 0.3, 0.2]) / 0.9 * 3000
    assert seen[3:].sum() == 0
    assert float(((seen[:3] - expected) ** 2 / expected).sum()) < 13.8  # 0.1%, 2 degrees of freedom


PROBABILITIES = torch.tensor([[0.05, 0.5, 0.1, 0.3, 0.05]])


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {1, 2, 3}),
        ({"top_k": 4}, {0, 1, 2, 3, 4}),  # what equals the k-th stays
        ({"top_k": 50}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.49}, {1}),
        ({"top_p": 0.51}, {1, 3}),
        ({"top_p": 0.85}, {1, 2, 3}),
        ({"top_p": 1e-6}, {1}),
        ({"min_p": 0.5}, {1, 3}),
        ({"min_p": 0.15}, {1, 2, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # 0.5 of 0.8 reaches 0.6: the mass is that of what top-k left
        ({"min_p": 0.5, "top_p": 0.6}, {1}),
        ({"temperature": 0.01}, {1}),
        ({"temperature": 100.0, "min_p": 0.99}, {1, 3}),  # temperature comes before min_p
    ],
)
def test_filters_leave_exactly_what_they_should(params, possible):
    assert set(draws(PROBABILITIES.log(), 400, **params).nonzero().flatten().tolist()) == possible


def test_nucleus_of_a_large_vocabulary_equals_the_sorted_definition():
    logits = random_logits(1, vocab=20000, scale=4.0)
    probabilities, order = torch.softmax(logits[0].double(), 0).sort(descending=True)
    nucleus = set(order[: int((probabilities.cumsum(0) < 0.9).sum()) + 1].tolist())
    seen = {ids(logits, row(seed=s, top_p=0.9))[0] for s in range(300)}
    assert seen <= nucleus
    assert len(seen) > 20


ALL_KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"top_p": 0.9},
    {"top_k": 20, "temperature": 1.3},
    {"min_p": 0.02, "top_p": 0.95},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {5: 10.0}},
    {"logprobs": 3},
]


def test_a_row_is_bitwise_the_same_alone_and_among_any_neighbours():
    vocab = 49153  # no multiple of a vector width
    logits = random_logits(len(ALL_KINDS), vocab=vocab)
    rows = [row(seed=11 * i, output=[7, 8, i], **kind) for i, kind in enumerate(ALL_KINDS)]
    sampler = Sampler(vocab)
    together = sampler.sample(logits, rows)
    alone = [sampler.sample(logits[i : i + 1].clone(), [r])[0] for i, r in enumerate(rows)]
    backwards = sampler.sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_logits_are_left_as_they_are():
    logits = random_logits(len(ALL_KINDS))
    before = logits.clone()
    Sampler(V).sample(logits, [row(output=[3], **kind) for kind in ALL_KINDS])
    assert torch.equal(logits, before)


def test_end_and_stop_tokens_are_banned_until_min_tokens():
    logits = logits_of(t2=9.0, t4=8.0, t5=7.0)
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [4]}
    assert [ids(logits, row(output=[0] * n, **params))[0] for n in range(3)] == [5, 5, 2]


def test_logit_bias_and_allowed_tokens():
    logits = logits_of(t3=5.0)
    assert ids(logits, row(temperature=0.0, logit_bias={8: 6.0})) == [8]
    assert ids(logits, row(temperature=0.0, allowed_token_ids=[10, 9])) == [9]
    assert set(draws(logits, 50, allowed_token_ids=[10, 9]).nonzero().flatten().tolist()) == {9, 10}


def test_penalties_and_bad_words_change_what_is_chosen():
    logits = logits_of(t3=5.0, t4=4.0)
    assert ids(logits, row(temperature=0.0, output=[3], presence_penalty=1.5)) == [4]
    assert ids(logits, row(temperature=0.0, prompt=[3], repetition_penalty=1.5)) == [4]
    assert ids(logits, row(temperature=0.0, output=[9], bad_words=((9, 3),))) == [4]
    assert ids(logits, row(temperature=0.0, output=[8], bad_words=((9, 3),))) == [3]


def test_grammar_decides_what_may_come(byte_level):
    grammar = GrammarFactory(byte_level, byte_level.eos_token_ids).compile(StructuredOutput(choice=("7",)))
    seven = byte_level.encode("7", add_special_tokens=False)[0]
    logits = random_logits(1, vocab=byte_level.vocab_size)
    assert ids(logits, row(grammar=grammar)) == ids(logits, row(grammar=grammar, temperature=0.0)) == [seven]


def test_a_bad_row_is_its_own_error_and_the_others_are_unchanged():
    logits = random_logits(5)
    logits[1, 4] = float("nan")
    logits[2] = float("-inf")
    logits[3, 9] = float("inf")
    good = row(seed=1)
    results = Sampler(V).sample(logits, [good, row(temperature=0.0), row(), row(top_p=0.5), good])
    assert [r.token_id == -1 for r in results] == [False, True, True, True, False]
    assert all("logits" in r.error and r.error_code is ErrorCode.INTERNAL for r in results[1:4])
    assert results[0] == Sampler(V).sample(logits[:1], [good])[0]


def test_a_row_where_nothing_is_allowed_says_so():
    result = Sampler(V).sample(random_logits(1), [row(allowed_token_ids=[2], min_tokens=1)])[0]
    assert result.token_id == -1
    assert result.error_code is ErrorCode.INVALID_VALUE
    assert "min_tokens" in result.error


def test_an_unknown_token_id_is_an_error_of_its_row():
    results = Sampler(V).sample(random_logits(2), [row(logit_bias={V: 1.0}), row(temperature=0.0)])
    assert results[0].error_code is ErrorCode.INVALID_TOKEN
    assert results[1].error is None


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected shape"):
        Sampler(V).sample(random_logits(2), [row()])


def test_logprobs_are_raw_and_only_there_if_asked_for():
    logits = logits_of(t3=2.0, t5=1.0)
    expected = torch.log_softmax(logits[0], 0)
    params = {"temperature": 0.0, "logit_bias": {5: 50.0}, "presence_penalty": 2.0}
    plain, chosen, listed = Sampler(V).sample(
        logits.repeat(3, 1), [row(**params), row(logprobs=0, **params), row(logprobs=1, **params)]
    )
    assert plain.logprob is None
    assert plain.logprobs is None
    assert list(chosen.logprobs) == [5]
    assert chosen.logprob == pytest.approx(float(expected[5]))
    assert chosen.logprobs[5].rank == 2
    assert list(listed.logprobs) == [5, 3]
    assert listed.logprobs[3].rank == 1
    assert listed.logprobs[3].logprob == pytest.approx(float(expected[3]))


def test_no_rows_give_no_tokens():
    assert Sampler(V).sample(torch.empty(0, V), []) == []
