"""Chat messages become one prompt, or an error that says why not."""

from __future__ import annotations

import copy

import pytest
from tokenizers.processors import TemplateProcessing

from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.text.chat import render_chat
from pagefleet.runtime.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hey 한국어"}
NO_BOS = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def refused(code, tokenizer, messages, **options):
    with pytest.raises(RequestError) as caught:
        render_chat(tokenizer, messages, **options)
    assert caught.value.code is code
    return caught.value.message


def test_template_is_applied_and_special_tokens_are_single_ids(tokenizer):
    text, ids = render_chat(tokenizer, [USER])
    assert text.endswith("<|im_start|>user\nHey 한국어<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(tokenizer.backend.token_to_id("<|im_start|>")) == 2


def test_generation_prompt_can_be_left_out(byte_level):
    assert render_chat(byte_level, [USER], add_generation_prompt=False)[0].endswith("<|im_end|>\n")


@pytest.mark.parametrize("template", [None, NO_BOS, "{{ bos_token }}{{ bos_token }}" + NO_BOS])
def test_exactly_one_bos_whatever_the_template_writes(tokenizer, template):
    _, ids = render_chat(tokenizer, [USER], chat_template=template)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_an_end_token_that_plain_encoding_adds_is_not_in_a_chat(byte_level):
    hf = copy.deepcopy(byte_level.hf)
    bos, eos = (hf.bos_token, hf.bos_token_id), (hf.eos_token, hf.eos_token_id)
    hf.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A {eos[0]}", special_tokens=[bos, eos])
    tokenizer = Tokenizer(hf)
    assert tokenizer.encode("x")[-1] == tokenizer.hf.eos_token_id
    assert render_chat(tokenizer, [USER])[1] == render_chat(byte_level, [USER])[1]


def test_text_parts_are_joined(byte_level):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in render_chat(byte_level, [{"role": "user", "content": parts}])[0]


def test_a_template_that_refuses_a_role_is_a_row_error_with_its_own_words(byte_level):
    message = refused(ErrorCode.CHAT_TEMPLATE, byte_level, [USER, {"role": "system", "content": "x"}])
    assert "a system message comes first" in message


def test_a_template_that_breaks_is_a_row_error(byte_level):
    assert "failed" in refused(ErrorCode.CHAT_TEMPLATE, byte_level, [USER], chat_template="{{ 1 + 'a' }}")
    refused(ErrorCode.CHAT_TEMPLATE, byte_level, [USER], chat_template="{% if %}")


def test_a_model_without_template_says_to_use_prompt(byte_level, monkeypatch):
    monkeypatch.setattr(byte_level.hf, "chat_template", None)
    assert "`prompt`" in refused(ErrorCode.CHAT_TEMPLATE, byte_level, [USER])


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ("Hey", ErrorCode.INVALID_TYPE),
        (USER, ErrorCode.INVALID_TYPE),
        (None, ErrorCode.INVALID_TYPE),
        ([], ErrorCode.EMPTY_PROMPT),
        (["Hey"], ErrorCode.INVALID_TYPE),
        ([{"content": "x"}], ErrorCode.MISSING_FIELD),
        ([{"role": "user"}], ErrorCode.MISSING_FIELD),
        ([{"role": 1, "content": "x"}], ErrorCode.INVALID_TYPE),
        ([{"role": "user", "content": None}], ErrorCode.INVALID_TYPE),
        ([{"role": "user", "content": 5}], ErrorCode.INVALID_TYPE),
        ([{"role": "user", "content": ["x"]}], ErrorCode.INVALID_TYPE),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], ErrorCode.INVALID_TYPE),
        ([{"role": "user", "content": "\ud83c"}], ErrorCode.INVALID_ENCODING),
        ([{"role": "assistant", "content": None, "tool_calls": [5]}], ErrorCode.INVALID_TYPE),
        ([{"role": "assistant", "content": None, "tool_calls": 5}], ErrorCode.INVALID_TYPE),
    ],
)
def test_malformed_messages_are_refused_by_kind(byte_level, messages, code):
    refused(code, byte_level, messages)


def test_arguments_of_tool_calls_reach_the_template_as_objects(byte_level):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    template = "{{ messages[1].tool_calls[0].function.arguments.a + 1 }}|{{ tools[0].function.name }}"
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render_chat(byte_level, messages, tools=tools, chat_template=template)[0] == "2|add"
