"""Chat messages to a prompt, through the model's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.text.tokenizer import Tokenizer, check_text


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
) -> tuple[str, list[int]]:
    """Prompt text and token ids of a conversation.

    The template writes the special tokens; the ids begin with exactly one BOS if the tokenizer starts texts with one,
    whether the template writes it or not.

    Args:
        messages: each with `role`, and `content` that is a string or a list of `{"type": "text", "text": ...}`.
        chat_template: a Jinja template instead of the model's.

    Raises:
        RequestError: INVALID_TYPE, MISSING_FIELD, EMPTY_PROMPT, INVALID_ENCODING for the messages; CHAT_TEMPLATE if
            the model has no template or the template refuses them.
    """
    conversation = _checked(messages)
    if chat_template is None and not tokenizer.hf.chat_template:
        raise RequestError(
            ErrorCode.CHAT_TEMPLATE,
            "messages: this model has no chat template (it is probably a base model); use `prompt`, or give a template",
        )
    try:
        text = tokenizer.hf.apply_chat_template(
            conversation,
            tools=list(tools) if tools else None,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except TemplateError as error:
        raise RequestError(
            ErrorCode.CHAT_TEMPLATE, f"the model's chat template refuses these messages: {error}"
        ) from error
    except Exception as error:  # a template is a program of the model's author: whatever it raises is its refusal
        raise RequestError(
            ErrorCode.CHAT_TEMPLATE, f"the model's chat template failed: {type(error).__name__}: {error}"
        ) from error
    return text, _with_one_bos(tokenizer, tokenizer.encode(text, add_special_tokens=False))


def _with_one_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    extra = 0
    while ids[extra : extra + 2] == [bos, bos]:
        extra += 1
    ids = ids[extra:]
    return [bos, *ids] if tokenizer.adds_bos and ids[:1] != [bos] else ids


def _checked(messages: object) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            ErrorCode.INVALID_TYPE, f"messages: expected a list of messages, got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError(ErrorCode.EMPTY_PROMPT, "messages: expected at least one message, got an empty list")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            ErrorCode.INVALID_TYPE, f"{name}: expected an object with role and content, got {type(message).__name__}"
        )
    if "role" not in message:
        raise RequestError(ErrorCode.MISSING_FIELD, f"{name}.role: missing; expected system, user, assistant or tool")
    check_text(message["role"], f"{name}.role")
    clean = dict(message)
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RequestError(
                ErrorCode.INVALID_TYPE, f"{name}.tool_calls: expected a list, got {type(calls).__name__}"
            )
        clean["tool_calls"] = [_checked_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if message.get("content") is None and calls:
        clean["content"] = ""
        return clean
    if "content" not in message:
        raise RequestError(ErrorCode.MISSING_FIELD, f"{name}.content: missing; expected a string")
    clean["content"] = _content_text(message["content"], f"{name}.content")
    return clean


def _content_text(content: object, name: str) -> str:
    if not isinstance(content, list):
        check_text(content, name)
        assert isinstance(content, str)
        return content
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(
                ErrorCode.INVALID_TYPE,
                f"{name}[{i}]: expected a part of type 'text', got {kind!r}; this runtime takes text only",
            )
        check_text(part.get("text"), f"{name}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _checked_call(call: object, name: str) -> dict[str, Any]:
    """Templates want a call's arguments as an object; the OpenAI format carries them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(ErrorCode.INVALID_TYPE, f"{name}: expected an object with a `function` object")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise RequestError(
                ErrorCode.INVALID_VALUE, f"{name}.function.arguments: expected JSON text: {error}"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}
