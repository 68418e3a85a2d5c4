"""Encoding, decoding and what the tokenizer says about itself."""

from __future__ import annotations

import json

import pytest

from pagefleet.runtime.errors import ErrorCode, ModelError, RequestError
from pagefleet.runtime.text.tokenizer import Tokenizer


def test_encode_starts_with_bos_only_if_special_tokens_are_wanted(byte_level):
    assert byte_level.encode("Hey")[0] == byte_level.bos_token_id
    assert byte_level.bos_token_id not in byte_level.encode("Hey", add_special_tokens=False)
    assert byte_level.adds_bos


def test_round_trip_keeps_spaces_and_every_script(tokenizer):
    text = " Hey  there,  한국어 🍕 .  do n't"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocab_size_is_the_largest_id_plus_one(tokenizer):
    assert tokenizer.vocab_size == max(tokenizer.hf.get_vocab().values()) + 1
    assert tokenizer.has_token(tokenizer.vocab_size - 1)
    assert not tokenizer.has_token(tokenizer.vocab_size)


def test_text_of_one_token_keeps_its_space_and_shows_special_tokens(tokenizer):
    first_word_token = tokenizer.encode("x y", add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, first_word_token)).endswith("x y")
    assert tokenizer.token_text(tokenizer.hf.eos_token_id) == tokenizer.hf.eos_token


@pytest.mark.parametrize("text", ["\ud83c", "abc \udf36 def"])
def test_lone_surrogates_are_refused_as_encoding(byte_level, text):
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        byte_level.encode(text)
    assert caught.value.code is ErrorCode.INVALID_ENCODING


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
def test_what_is_no_string_is_refused_as_type(byte_level, text):
    with pytest.raises(RequestError, match="expected a string") as caught:
        byte_level.encode(text)
    assert caught.value.code is ErrorCode.INVALID_TYPE


def test_loading_takes_end_tokens_of_the_generation_config_too(byte_level, tmp_path):
    byte_level.hf.save_pretrained(tmp_path)
    im_end = byte_level.backend.token_to_id("<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [im_end]}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_token_ids == {im_end, byte_level.hf.eos_token_id}
    assert loaded.encode("Hey 한") == byte_level.encode("Hey 한")


def test_a_folder_without_tokenizer_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="expected a checkpoint folder"):
        Tokenizer.load(tmp_path)
