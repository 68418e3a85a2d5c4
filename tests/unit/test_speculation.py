"""Guesses, when they are run, and what of them stands: no model, no device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet.runtime.compose import leaf_types
from pagefleet.runtime.config import SpeculationConfig
from pagefleet.runtime.request import Request, Sequence
from pagefleet.runtime.sampling.grammar import GrammarFactory
from pagefleet.runtime.sampling.sampler import Sampled
from pagefleet.runtime.sampling_params import SamplingParams, StructuredOutput
from pagefleet.runtime.speculation.lookup import CANDIDATES, Match, NgramIndex, continuation
from pagefleet.runtime.speculation.speculator import Guesser, Speculator
from pagefleet.runtime.speculation.verify import Draw, standing
from pagefleet.runtime.text.tokenizer import Tokenizer

NGRAM = SpeculationConfig("ngram")


def a_sequence(prompt: list[int], **params: Any) -> Sequence:
    request = Request("r", None, prompt, SamplingParams(max_tokens=None, **params), 10_000)
    request.sequences.append(Sequence(request, 0, 0, 0, list(prompt)))
    return request.sequences[0]


def copied(length: int, period: int = 50) -> list[int]:
    """A text of different tokens, then the same again, and again."""
    return [i % period for i in range(length)]


def never_right(length: int) -> list[int]:
    """A text in which every pair of tokens comes again and again, but never with the same token after it."""
    return [token for i in range(length // 3 + 1) for token in (1, 2, 1000 + i)][:length]


# -- looking up ------------------------------------------------------------------------------------------------------


def scan(tokens: list[int], shortest: int, longest: int) -> Match | None:
    """The rule of `NgramIndex.lookup` by comparing everything with everything."""
    end, best = len(tokens), None
    places = [p for p in range(end - 1, shortest - 1, -1) if tokens[p - shortest : p] == tokens[end - shortest : end]]
    for place in places[:CANDIDATES] if end >= shortest else []:
        length = shortest
        while length < min(longest, place) and tokens[place - length - 1] == tokens[end - length - 1]:
            length += 1
        if best is None or length > best.length:
            best = Match(place, length)
    return best


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9),
    st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 7))),
)
@settings(max_examples=300, deadline=None)
def test_the_index_finds_what_a_scan_of_the_whole_text_finds(pieces: list[list[int]], sizes: tuple[int, int]) -> None:
    index, tokens = NgramIndex(*sizes), []
    for piece in pieces:
        tokens += piece
        assert index.lookup(tokens) == scan(tokens, *sizes)


class Watched(list[int]):
    """A list that counts how many of its elements are read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("text", [copied(20_000), never_right(20_000), [7] * 20_000], ids=["copied", "new", "same"])
def test_a_look_up_reads_a_bounded_part_of_a_text_of_any_length(text: list[int]) -> None:
    tokens = Watched(text)
    index = NgramIndex(2, 8)
    index.lookup(tokens)
    for token in (1, 2, 3):
        tokens.append(token)
        tokens.reads = 0
        index.lookup(tokens)
        assert tokens.reads <= 2 * 2 + 2 * 8 * CANDIDATES


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    tokens = [5, 1, 2, 3, 1, 2, 3, 1]
    match = NgramIndex(2, 8).lookup(tokens)
    assert match is not None
    assert continuation(tokens, match, 7) == [2, 3, 1, 2, 3, 1, 2]


# -- when a guess is run ---------------------------------------------------------------------------------------------


def run(speculator: Speculator, text: list[int], start: int, num_running: int = 1) -> list[tuple[int, int]]:
    """Decode `text` from `start` on as an engine would: (drafted, accepted) of every step."""
    sequence, steps = a_sequence(text[:start]), []
    while sequence.num_tokens < len(text):
        at = sequence.num_tokens
        draft = speculator.draft(sequence, len(text) - at - 1, num_running)
        accepted = next((i for i, t in enumerate(draft) if text[at + i] != t), len(draft))
        steps.append((len(draft), accepted))
        sequence.token_ids += text[at : at + accepted + 1]
    return steps


def test_a_text_that_copies_its_prompt_takes_few_steps() -> None:
    steps = run(Speculator(NGRAM, frozenset()), copied(250), 50)
    assert len(steps) < 200 / 6
    assert sum(accepted for _, accepted in steps) == sum(drafted for drafted, _ in steps)


def test_a_text_without_repeats_is_never_guessed() -> None:
    assert run(Speculator(NGRAM, frozenset()), list(range(500)), 50) == [(0, 0)] * 450


def test_wrong_guesses_stop_drafting_and_right_ones_that_were_not_run_resume_it() -> None:
    wrong, right = never_right(600), copied(100, period=20)
    speculator = Speculator(NGRAM, frozenset())
    alone = run(speculator, wrong, 30)
    assert sum(accepted for _, accepted in alone) == 0
    assert sum(drafted for drafted, _ in alone) <= 30, "misses keep costing rows"
    assert all(drafted == 0 for drafted, _ in alone[100:])
    both = run(speculator, wrong + right, 30)[len(alone) :]
    assert sum(accepted for _, accepted in both) > 40


def test_the_more_sequences_run_the_surer_a_guess_must_be_and_from_four_times_the_break_even_none_is_run() -> None:
    speculator = Speculator(SpeculationConfig("ngram", num_tokens=16, first_chance=0.9), frozenset())
    text = copied(80)
    lengths = [len(speculator.draft(a_sequence(text), 100, running)) for running in (1, 4, 16, 40, 64, 500)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 16
    assert 0 < lengths[2] < lengths[1]
    assert lengths[-2:] == [0, 0]
    assert [speculator.price(n) for n in (1, 16, 64)] == pytest.approx([1.25 / 17, 0.625, 1.0])


def test_readme_names_the_rule_that_runs() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (paragraph,) = (p for p in readme.split("\n\n") if p.startswith("`speculation=ngram`"))
    assert "four times `speculation.break_even_rows`" in " ".join(paragraph.split())
    keys = re.findall(r"`((?:speculation|precision)\.\w+)", paragraph)
    assert len(keys) == 2
    assert set(keys) <= set(leaf_types())
    rows = NGRAM.break_even_rows
    assert Speculator(NGRAM, frozenset()).price(4 * rows) >= 1.0 > Speculator(NGRAM, frozenset()).price(4 * rows - 1)


def test_chance_counts_each_guess_up_to_its_first_wrong_token_and_only_what_has_come() -> None:
    guesser = Guesser(SpeculationConfig("ngram", first_chance=0.5))
    text = copied(60)
    assert guesser.guess(text, 4) == [10, 11, 12, 13]
    guesser.learn(text)
    assert guesser.chance == 0.5, "nothing has come yet: a step that is tried again must not count twice"
    guesser.guess(text, 4)
    guesser.learn([*text, 10, 99, 12, 13])
    assert guesser.chance == pytest.approx(((1.0 * 0.9 + 1) * 0.9) / ((2.0 * 0.9 + 1) * 0.9 + 1))


def test_a_draft_never_reaches_past_what_would_end_the_sequence() -> None:
    text = copied(60)
    assert Speculator(NGRAM, frozenset({13})).draft(a_sequence(text), 100, 1) == (10, 11, 12)
    assert Speculator(NGRAM, frozenset()).draft(a_sequence(text, stop_token_ids=[11]), 100, 1) == (10,)
    assert Speculator(NGRAM, frozenset()).draft(a_sequence(text), 2, 1) == (10, 11)
    assert Speculator(NGRAM, frozenset()).draft(a_sequence(text), 0, 1) == ()


def test_a_draft_never_holds_what_the_grammar_forbids_or_needs_nothing_after(byte_level: Tokenizer) -> None:
    factory = GrammarFactory(byte_level, byte_level.eos_token_ids)
    digits = byte_level.encode("1212121212", add_special_tokens=False)
    assert len(digits) > 6
    for expression, most in (("[0-9]+x", len(digits)), ("[0-9]{4}", 3), ("[a-z]+", 0)):
        sequence = a_sequence(digits)
        sequence.grammar = factory.compile(StructuredOutput(regex=expression))
        draft = Speculator(NGRAM, frozenset()).draft(sequence, 100, 1)
        assert len(draft) <= most
        assert bool(draft) == bool(most)
        ahead = sequence.grammar.after(draft)
        assert not ahead.finished
        assert (ahead is sequence.grammar) == (not draft)


# -- what stands -----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.data()), max_size=4))
@settings(max_examples=150, deadline=None)
def test_what_stands_is_the_longest_agreement_and_one_more(drafts: list[tuple[list[int], Any]]) -> None:
    draws, choices, expected = [], [], []
    for draft, data in drafts:
        sequence = a_sequence([1])
        chosen = [data.draw(st.integers(0, 1)) for _ in range(len(draft) + 1)]
        agree = next((i for i, (a, b) in enumerate(zip(draft, chosen, strict=False)) if a != b), len(draft))
        for known in range(len(draft) + 1):
            draws.append(Draw(sequence, len(draws), tuple(draft[:known])))
            choices.append(Sampled(chosen[known]))
        expected += [(sequence, token) for token in chosen[: agree + 1]]
    assert [(draw.sequence, choice.token_id) for draw, choice in standing(draws, choices)] == expected
