"""Penalties, bad words, log-probabilities and noise, one by one."""

from __future__ import annotations

import pytest
import torch

from pagefleet.backends.torch_selection import TorchSelection
from pagefleet.kernels.reference import exponential
from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.sampling.logprobs import prompt_logprobs
from pagefleet.runtime.sampling.noise import draw_key
from pagefleet.runtime.sampling.penalties import (
    bad_word_sequences,
    ban_bad_words,
    check_token_ids,
    penalise,
)
from pagefleet.runtime.sampling_params import SamplingParams


def token_logprobs(logits, token_id, k):
    return prompt_logprobs(TorchSelection(), logits[None], [token_id], k)[0]


def test_repetition_covers_prompt_and_output_frequency_and_presence_the_output():
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    penalise(logits, params, prompt=[0, 1, 99], output=[2, 2, 3])
    assert logits.tolist() == [1.0, -4.0, 1.0 - 1.0 - 0.25, -4.0 - 0.5 - 0.25, 2.0]


def test_bad_word_is_banned_only_where_it_would_complete():
    words = ((3, 4), (1,), (9, 9, 9))
    for output, banned in (([], {1}), ([3], {1, 4}), ([3, 5], {1}), ([5, 3], {1, 4})):
        logits = torch.zeros(6)
        ban_bad_words(logits, words, output)
        assert set((logits == float("-inf")).nonzero().flatten().tolist()) == banned


def test_bad_words_are_found_at_the_start_and_after_a_space(byte_level):
    sequences = bad_word_sequences(byte_level, ["fox", "한국어"])
    texts = [byte_level.decode(sequence) for sequence in sequences]
    assert texts == ["fox", " fox", "한국어", " 한국어"]
    assert bad_word_sequences(byte_level, [" fox"]) == sequences[:2]


def test_bad_words_hold_for_pieces_that_carry_their_space(byte_fallback):
    assert [byte_fallback.decode(s) for s in bad_word_sequences(byte_fallback, ["fox"])] == ["fox"]


@pytest.mark.parametrize("params", [{"logit_bias": {7: 1.0}}, {"allowed_token_ids": [1, 7]}, {"stop_token_ids": [7]}])
def test_token_ids_beyond_the_vocabulary_are_refused(params):
    check_token_ids(SamplingParams(**params), vocab_size=8)
    with pytest.raises(RequestError, match="token id 7") as caught:
        check_token_ids(SamplingParams(**params), vocab_size=7)
    assert caught.value.code is ErrorCode.INVALID_TOKEN


def test_ranks_count_strictly_greater_logits_and_ties_are_listed_by_id():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0])
    found = token_logprobs(logits, 4, k=4)
    assert {i: entry.rank for i, entry in found.items()} == {4: 3, 1: 1, 3: 1, 2: 3}
    assert list(found) == [4, 1, 3, 2]
    assert sum(torch.tensor(e.logprob).exp() for e in token_logprobs(logits, 0, k=5).values()) == pytest.approx(1.0)


def test_the_chosen_token_is_always_listed_and_k_may_exceed_the_vocabulary():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert list(token_logprobs(logits, 0, k=1)) == [0, 1]
    assert set(token_logprobs(logits, 0, k=9)) == {0, 1, 2}


def test_prompt_logprobs_equal_log_softmax():
    logits = torch.randn(7, 301, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(7) * 40
    expected = torch.log_softmax(logits.double(), -1)
    for i, entry in enumerate(prompt_logprobs(TorchSelection(), logits, targets, k=2)):
        assert entry[int(targets[i])].logprob == pytest.approx(float(expected[i, targets[i]]), abs=1e-5)
        assert set(expected[i].topk(2).indices.tolist()) <= set(entry)
    with pytest.raises(ValueError, match="one target per row"):
        prompt_logprobs(TorchSelection(), logits, [1, 2], k=0)


def test_noise_is_the_documented_hash_whatever_subset_is_asked_for():
    mask = 2**64 - 1
    key = draw_key(seed=-5, position=9)
    bits = (key + 18 * 0x9E3779B97F4A7C15) & mask  # SplitMix64 in Python integers, token 17
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    uniform = ((bits >> 32) + 0.5) / 2**32
    expected = -torch.log1p(torch.tensor(-uniform, dtype=torch.float64))
    everywhere = exponential(key, torch.arange(49153))
    assert float(everywhere[17]) == pytest.approx(float(expected), rel=1e-5)
    some = torch.tensor([0, 17, 18, 49152])
    assert torch.equal(exponential(key, some), everywhere[some])


def test_noise_of_the_largest_hash_is_finite():
    mask = 2**64 - 1
    bits = mask  # undo SplitMix64, to find the key whose hash for token 0 is all ones
    for constant, shift in ((0x94D049BB133111EB, 27), (0xBF58476D1CE4E5B9, 30)):
        bits = (bits * pow(constant, -1, 2**64)) & mask
        undone = bits
        for _ in range(3):
            undone = bits ^ (undone >> shift)
        bits = undone
    key = (bits - 0x9E3779B97F4A7C15) & mask
    assert 15.0 < float(exponential(key, torch.tensor([0]))) < 30.0


def test_noise_is_exponential_and_never_zero_or_infinite():
    noise = torch.cat([exponential(draw_key(s, 0), torch.arange(100_000)) for s in range(5)]).double()
    assert torch.isfinite(noise).all()
    assert (noise > 0).all()
    ordered = noise.sort().values
    distance = (1 - (-ordered).exp() - torch.arange(1, len(ordered) + 1) / len(ordered)).abs().max()
    assert float(distance) < 1.95 / len(ordered) ** 0.5  # Kolmogorov-Smirnov, 0.1%


def test_keys_of_neighbouring_seeds_and_positions_differ():
    keys = {draw_key(seed, position) for seed in range(-50, 50) for position in range(100)}
    assert len(keys) == 10_000
    first, second = (exponential(draw_key(0, p), torch.arange(50_000)) for p in (0, 1))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.02
