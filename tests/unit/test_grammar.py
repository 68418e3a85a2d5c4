"""Structured output allows exactly what the grammar allows."""

from __future__ import annotations

import pytest
import torch

from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.sampling.grammar import GrammarFactory
from pagefleet.runtime.sampling_params import StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def factory(byte_level):
    return GrammarFactory(byte_level, byte_level.eos_token_ids)


def allowed(grammar, size):
    logits = torch.zeros(size)
    grammar.mask(logits)
    return set((logits == 0).nonzero().flatten().tolist())


def accepts(byte_level, grammar, text):
    """Feed a text token by token; True if every token was allowed and the text may end there."""
    grammar = grammar.fork()
    for token_id in byte_level.encode(text, add_special_tokens=False):
        if token_id not in allowed(grammar, byte_level.vocab_size):
            return False
        grammar.accept(token_id)
    return byte_level.hf.eos_token_id in allowed(grammar, byte_level.vocab_size)


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (StructuredOutput(choice=("yes", 'n"o', "네")), ["yes", 'n"o', "네"], ["ye", "no", "yes yes", "maybe"]),
        (StructuredOutput(regex="[0-9]{3}-[a-z]+"), ["123-abc", "000-x"], ["12-a", "123-", "123-A"]),
        (
            StructuredOutput(json_schema=SCHEMA),
            ['{"name":"Ada","age":36}', '{\n  "name": "한 🍕",\n  "age": -1\n}'],
            ['{"name":"Ada"}', '{"name":1,"age":2}', '{"name":"Ada","age":36,"x":1}', "[]"],
        ),
    ],
)
def test_only_texts_of_the_grammar_are_possible(factory, byte_level, structured, good, bad):
    grammar = factory.compile(structured)
    assert [accepts(byte_level, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(byte_level, grammar, text) for text in bad] == [False] * len(bad)


def test_json_white_space_is_bounded_so_that_a_model_cannot_write_it_for_ever(factory, byte_level):
    grammar = factory.compile(StructuredOutput(json_schema=SCHEMA))
    assert accepts(byte_level, grammar, '{"name": "Ada",' + " " * 30 + '"age":1}')
    assert not accepts(byte_level, grammar, '{"name": "Ada",' + " " * 40 + '"age":1}')


def test_schema_may_be_json_text(factory, byte_level):
    grammar = factory.compile(StructuredOutput(json_schema='{"type": "integer"}'))
    assert accepts(byte_level, grammar, "42")
    assert not accepts(byte_level, grammar, '"42"')


def test_grammar_is_finished_when_only_the_end_can_follow(factory, byte_level):
    grammar = factory.compile(StructuredOutput(choice=("x",)))
    assert not grammar.finished
    grammar.accept(byte_level.encode("x", add_special_tokens=False)[0])
    assert grammar.finished
    assert allowed(grammar, byte_level.vocab_size) == {byte_level.hf.eos_token_id}


def test_a_text_that_may_go_on_is_complete_but_not_finished(factory, byte_level):
    grammar = factory.compile(StructuredOutput(regex="[0-9]+"))
    grammar.accept(byte_level.encode("1", add_special_tokens=False)[0])
    assert grammar.accepting
    assert not grammar.finished


def test_every_end_token_may_end_the_text(byte_level):
    im_end = byte_level.backend.token_to_id("<|im_end|>")
    grammar = GrammarFactory(byte_level, {im_end, byte_level.hf.eos_token_id}).compile(StructuredOutput(choice=("x",)))
    grammar.accept(byte_level.encode("x", add_special_tokens=False)[0])
    assert allowed(grammar, byte_level.vocab_size) == {im_end, byte_level.hf.eos_token_id}


def test_logits_wider_than_the_vocabulary_are_banned_beyond_it(factory, byte_level):
    grammar = factory.compile(StructuredOutput(regex=".*"))
    assert max(allowed(grammar, byte_level.vocab_size + 100)) < byte_level.vocab_size


def test_a_fork_goes_its_own_way(factory, byte_level):
    grammar = factory.compile(StructuredOutput(choice=("ax", "by")))
    fork = grammar.fork()
    a, b = (byte_level.encode(c, add_special_tokens=False)[0] for c in "ab")
    grammar.accept(a)
    fork.accept(b)
    assert byte_level.encode("x", add_special_tokens=False)[0] in allowed(grammar, byte_level.vocab_size)
    assert byte_level.encode("y", add_special_tokens=False)[0] in allowed(fork, byte_level.vocab_size)


def test_a_compiled_grammar_starts_afresh_each_time(factory, byte_level):
    structured = StructuredOutput(choice=("x",))
    factory.compile(structured).accept(byte_level.encode("x", add_special_tokens=False)[0])
    assert not factory.compile(structured).finished


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(regex="(unclosed"),
        StructuredOutput(regex="(?=look)ahead"),
        StructuredOutput(json_schema="{not json"),
        StructuredOutput(json_schema="[1]"),
        StructuredOutput(json_schema={"type": "nope"}),
        StructuredOutput(json_schema={"type": "string", "pattern": "("}),
        StructuredOutput(json_schema={"not": {"type": "string"}}),
        StructuredOutput(json_schema={"enum": [{1, 2}]}),
        StructuredOutput(choice=("\ud83c",)),
        StructuredOutput(regex="a\ud83c"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_reason(factory, structured):
    with pytest.raises(RequestError) as caught:
        factory.compile(structured)
    assert caught.value.code is ErrorCode.GRAMMAR
    assert len(caught.value.message) > 30


def test_a_forbidden_token_is_an_error_of_this_request(factory, byte_level):
    grammar = factory.compile(StructuredOutput(choice=("x",)))
    with pytest.raises(RequestError) as caught:
        grammar.accept(byte_level.encode("y", add_special_tokens=False)[0])
    assert caught.value.code is ErrorCode.GRAMMAR
    assert "<state>" not in caught.value.message
