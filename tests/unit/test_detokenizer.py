"""Incremental text equals the full decode, and stop strings are cut exactly."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from pagefleet.runtime.text.detokenizer import Detokenizer

MIXED = "Hey 안녕하세요 🌶👩‍👩‍👧 naïve\ncafé 한국어 뷁쉚 🍕🦜"


def full_text(tokenizer, prompt, output, skip_special_tokens=True):
    """The definition: what decoding everything adds to decoding the prompt."""
    before = tokenizer.decode(prompt, skip_special_tokens)
    everything = tokenizer.decode([*prompt, *output], skip_special_tokens)
    common = next(
        (i for i, (a, b) in enumerate(zip(before, everything, strict=False)) if a != b),
        min(len(before), len(everything)),
    )
    return everything[common:]


def run(detokenizer, ids):
    """Push until a stop; check at every step that what was emitted stays."""
    previous = ""
    for token_id in ids:
        found = detokenizer.push(token_id)
        assert detokenizer.emitted.startswith(previous)
        assert detokenizer.text.startswith(detokenizer.emitted)
        previous = detokenizer.emitted
        if found:
            break
    detokenizer.finish()
    assert detokenizer.emitted == detokenizer.text
    assert detokenizer.text.startswith(previous)
    return detokenizer.text


def test_hangul_and_emoji_token_by_token_equal_the_full_decode(tokenizer):
    prompt, output = tokenizer.encode("Say it:"), tokenizer.encode(MIXED, add_special_tokens=False)
    assert run(Detokenizer(tokenizer, prompt), output) == full_text(tokenizer, prompt, output)
    assert "안녕하세요 🌶👩‍👩‍👧" in run(Detokenizer(tokenizer, prompt), output)


def test_incomplete_characters_are_never_emitted(tokenizer):
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("Say:"))
    for token_id in tokenizer.encode("🍕뷁🌶 x", add_special_tokens=False):
        detokenizer.push(token_id)
        assert "\ufffd" not in detokenizer.emitted


def test_leading_space_survives_the_round_trip(tokenizer):
    prompt = tokenizer.encode("Oh.")
    output = tokenizer.encode("Oh. Hey")[len(prompt) :]
    assert run(Detokenizer(tokenizer, prompt), output) == " Hey"


def test_text_does_not_depend_on_what_the_prompt_says(byte_level):
    output = byte_level.encode(" Hey 한국어", add_special_tokens=False)
    prompts = [[], byte_level.encode("x"), byte_level.encode("🌶" * 50), byte_level.encode("<|im_end|>" * 20)]
    assert {run(Detokenizer(byte_level, prompt), output) for prompt in prompts} == {" Hey 한국어"}


def test_prompt_that_ends_inside_a_character_is_not_repeated(byte_level):
    ids = byte_level.encode("Hello world 🍕!", add_special_tokens=False)
    inside = [n for n in range(1, len(ids)) if byte_level.decode(ids[:n]).endswith("\ufffd")]
    assert len(inside) >= 2
    for n in inside:
        assert run(Detokenizer(byte_level, ids[:n]), ids[n:]) == "🍕!"


def test_a_long_run_of_byte_tokens_that_turns_out_broken_is_as_in_the_full_decode(byte_fallback):
    words, run_of_bytes = (byte_fallback.encode(t, add_special_tokens=False) for t in ("a b " * 6, "뷁쉚뷁쉚뷁쉚"))
    assert set(run_of_bytes[1:]) <= byte_fallback.byte_ids
    broken = [byte_fallback.backend.token_to_id("<0xF0>"), *words]
    for prompt, output in ((words + run_of_bytes, broken), (words, words + run_of_bytes + broken)):
        assert run(Detokenizer(byte_fallback, prompt), output) == full_text(byte_fallback, prompt, output)


def test_incomplete_character_at_the_end_becomes_what_the_full_decode_gives(tokenizer):
    output = tokenizer.encode("abc 뷁", add_special_tokens=False)[:-1]
    text = run(Detokenizer(tokenizer, tokenizer.encode("x")), output)
    assert text.endswith("\ufffd")
    assert text == full_text(tokenizer, tokenizer.encode("x"), output)


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_left_out_only_if_asked(tokenizer, skip):
    output = tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    text = run(Detokenizer(tokenizer, [], skip_special_tokens=skip), output)
    assert ("<|im_end|>" in text) is not skip


def test_well_formed_text_comes_as_decode_stream_gives_it(tokenizer):
    prompt, output = tokenizer.encode("Say it:"), tokenizer.encode(MIXED + " end", add_special_tokens=False)
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    assert run(Detokenizer(tokenizer, prompt), output) == "".join(
        stream.step(tokenizer.backend, token_id) or "" for token_id in output
    )


def test_a_long_output_is_decoded_in_a_short_window(byte_level):
    output = byte_level.encode(MIXED * 100, add_special_tokens=False)
    decoded = []
    detokenizer = Detokenizer(byte_level, output)
    inner = detokenizer._decode
    detokenizer._decode = lambda ids: decoded.append(len(ids)) or inner(ids)
    assert run(detokenizer, output) == MIXED * 100
    assert max(decoded) <= 40


def test_without_stop_strings_tokens_are_decoded_together_and_give_the_same_text(byte_level):
    output = byte_level.encode(MIXED * 100, add_special_tokens=False)
    decodes = []
    detokenizer = Detokenizer(byte_level, output)
    inner = detokenizer._decode
    detokenizer._decode = lambda ids: decodes.append(len(ids)) or inner(ids)
    for token_id in output:
        detokenizer.push(token_id)
    assert len(decodes) < len(output) / 50
    detokenizer.finish()
    assert detokenizer.text == MIXED * 100


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ids_give_the_full_decode_and_emitted_text_stays(tokenizer, data):
    bytes_only = [tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in (0x0A, 0x41, 0xED, 0x95, 0x9C, 0xF0)]
    common = [i for i in bytes_only if i is not None] or list(range(140, 256))
    ids = st.lists(st.one_of(st.integers(0, tokenizer.vocab_size + 5), st.sampled_from(common)), max_size=60)
    prompt, output, skip = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    text = run(Detokenizer(tokenizer, prompt, skip_special_tokens=skip), output)
    assert text == full_text(tokenizer, prompt, output, skip)
    seldom = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    for token_id in output:
        seldom.push(token_id)
        if data.draw(st.booleans()):
            assert text.startswith(seldom.emitted)
    seldom.finish()
    assert seldom.text == text, "when the text is read changed it"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_stop_strings_cut_and_nothing_of_them_is_emitted(tokenizer, data):
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)
    prompt, output = data.draw(ids), data.draw(ids)
    whole = full_text(tokenizer, prompt, output)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, max(0, len(whole) - 1)))
        stops.append(whole[start : start + data.draw(st.integers(1, 8))] or "zq")
    detokenizer = Detokenizer(tokenizer, prompt, stop=stops)
    text = run(detokenizer, output)
    assert whole.startswith(text) or "\ufffd" in text
    assert not any(stop in text for stop in stops)
    if any(stop in whole for stop in stops) and "\ufffd" not in whole:
        assert any(whole.startswith(text + stop) for stop in stops)


def one_token_each(byte_level, text):
    return [i for c in text for i in byte_level.encode(c, add_special_tokens=False)]


class WholeWords:
    """A tokenizer whose tokens are the given strings."""

    special_ids = byte_ids = frozenset()

    def __init__(self, *words):
        self.words = words

    def has_token(self, token_id):
        return True

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.words[i] for i in ids)


def test_stop_inside_one_token_cuts_inside_it():
    detokenizer = Detokenizer(WholeWords("ABCDEF"), [], stop=["DE"])
    assert detokenizer.push(0) == "DE"
    assert detokenizer.text == detokenizer.emitted == "ABC"


def test_long_stop_string_is_never_partly_emitted(byte_level):
    detokenizer = Detokenizer(byte_level, [], stop=["DEFGHIJ"])
    emitted = []
    for token_id in one_token_each(byte_level, "ABCDEFGHIJK"):
        found = detokenizer.push(token_id)
        emitted.append(detokenizer.emitted)
        if found:
            break
    assert found == "DEFGHIJ"
    assert not any("D" in text for text in emitted)
    assert emitted[-1] == detokenizer.text == "ABC"


def test_a_stop_string_that_does_not_complete_is_given_at_the_end(byte_level):
    assert run(Detokenizer(byte_level, [], stop=["DEFGHIJ"]), one_token_each(byte_level, "ABCDEFGX")) == "ABCDEFGX"


def test_the_prompt_is_not_searched_for_stop_strings(byte_level):
    detokenizer = Detokenizer(byte_level, byte_level.encode("STOP ST"), stop=["STOP"])
    assert run(detokenizer, one_token_each(byte_level, "OP it")) == "OP it"


@pytest.mark.parametrize(("stops", "found"), [(["EF", "CD"], "CD"), (["CDE", "CD"], "CD"), (["BCDE", "CD"], "BCDE")])
def test_the_match_that_starts_first_counts_then_the_shortest(stops, found):
    detokenizer = Detokenizer(WholeWords("ABCDEF"), [], stop=stops)
    assert detokenizer.push(0) == found
    assert detokenizer.text == "ABCDEF".partition(found)[0]


def test_included_stop_string_ends_the_text():
    detokenizer = Detokenizer(WholeWords("ABCDEF"), [], stop=["DE"], include_stop=True)
    assert detokenizer.push(0) == "DE"
    assert detokenizer.text == detokenizer.emitted == "ABCDE"


def test_stop_strings_do_not_count_within_min_tokens():
    detokenizer = Detokenizer(WholeWords("xx"), [], stop=["xx"], min_tokens=2)
    assert [detokenizer.push(0), detokenizer.push(0), detokenizer.push(0)] == [None, None, "xx"]


def test_newline_byte_token_is_found_as_stop_at_once(byte_fallback):
    detokenizer = Detokenizer(byte_fallback, byte_fallback.encode("Hi"), stop=["\n"])
    newline = byte_fallback.backend.token_to_id("<0x0A>")
    assert detokenizer.push(byte_fallback.encode("a", add_special_tokens=False)[-1]) is None
    assert detokenizer.push(newline) == "\n"
    assert detokenizer.text == "a"
