"""Fields of rows: which exist, which type each has, and how OpenAI's names map to SamplingParams."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.sampling_params import SamplingParams, StructuredOutput

_SAMPLING = frozenset(f.name for f in dataclasses.fields(SamplingParams))
_INTEGERS = frozenset({"n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"})
_NUMBERS = frozenset({"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"})
_FLAGS = frozenset({"include_stop_str_in_output", "ignore_eos", "skip_special_tokens"})
_STRINGS = frozenset({"stop", "bad_words"})
_IDS = frozenset({"stop_token_ids", "allowed_token_ids"})

SIMPLE = frozenset({"id", "prompt", "prompt_token_ids", "messages", "model"}) | _SAMPLING
OPENAI_ROW = frozenset({"custom_id", "method", "url", "body"})
# taken and without effect on the answer: they concern the service, not the model
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
_BODY = _SAMPLING | _IGNORED | {"model", "stream", "stream_options", "response_format", "best_of"}
CHAT_BODY = _BODY | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls"}
COMPLETIONS_BODY = _BODY | {"prompt", "echo", "suffix"}
_MAX_TOKEN_ID = 2**31 - 1


def kind(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def refuse_unknown(value: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise UNKNOWN_FIELD for the first key that is not known, with the closest one that is."""
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(str(key), sorted(known), n=1)
            hint = f"did you mean {close[0]}?" if close else f"known fields: {', '.join(sorted(known))}"
            raise RequestError(ErrorCode.UNKNOWN_FIELD, f"unknown field {str(key)[:80]!r}; {hint}")


def token_ids(name: str, value: Any) -> list[int]:
    """A non-empty list of token ids.

    Raises:
        RequestError: INVALID_TYPE, EMPTY_PROMPT or INVALID_TOKEN.
    """
    if not isinstance(value, list):
        raise RequestError(ErrorCode.INVALID_TYPE, f"{name}: expected text or a list of token ids, got {kind(value)}")
    if not value:
        raise RequestError(ErrorCode.EMPTY_PROMPT, f"{name}: expected at least one token, got an empty list")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            raise RequestError(ErrorCode.INVALID_TYPE, f"{name}: expected integers, got {kind(item)} among them")
        if not 0 <= item <= _MAX_TOKEN_ID:
            raise RequestError(ErrorCode.INVALID_TOKEN, f"{name}: token id out of range: {_brief(item)}")
    return value


def messages(value: Any) -> list[dict[str, Any]]:
    """A conversation of the right shape; whether the template takes it is the engine's to say.

    Raises:
        RequestError: INVALID_TYPE, EMPTY_PROMPT or MISSING_FIELD.
    """
    if not isinstance(value, list):
        raise RequestError(ErrorCode.INVALID_TYPE, f"messages: expected a list, got {kind(value)}")
    if not value:
        raise RequestError(ErrorCode.EMPTY_PROMPT, "messages: expected at least one message, got an empty list")
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise RequestError(ErrorCode.INVALID_TYPE, f"{where}: expected an object, got {kind(message)}")
        for name, types in (("role", (str,)), ("content", (str, list))):
            if message.get(name) is None:
                raise RequestError(ErrorCode.MISSING_FIELD, f"{where}.{name}: expected a value, got none (or null)")
            if not isinstance(message[name], types):
                expected = "a string" if name == "role" else "a string or a list of parts"
                raise RequestError(
                    ErrorCode.INVALID_TYPE, f"{where}.{name}: expected {expected}, got {kind(message[name])}"
                )
    return value


def sampling(value: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a row under SamplingParams' names; null means not given.

    Raises:
        RequestError: INVALID_TYPE or INVALID_VALUE.
    """
    given = {name: value[name] for name in value if name in _SAMPLING and value[name] is not None}
    for name, item in given.items():
        _check_type(name, item)
    if "structured" in given:
        given["structured"] = _structured(given["structured"])
    return given


def openai_sampling(body: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """The sampling fields of an OpenAI body under SamplingParams' names.

    Raises:
        RequestError: INVALID_TYPE, INVALID_VALUE, or a feature of the service that a batch does not have.
    """
    _refuse_service_features(body)
    rest = dict(body)
    if chat:
        _chat_logprobs(rest)
        limit = rest.pop("max_completion_tokens", None)
        if limit is not None:
            if rest.get("max_tokens") not in (None, limit):
                raise RequestError(ErrorCode.INVALID_VALUE, "max_tokens and max_completion_tokens differ; give one")
            rest["max_tokens"] = limit
    params = sampling(rest)
    constraint = _response_format(body.get("response_format"))
    if constraint is not None:
        if "structured" in params:
            raise RequestError(ErrorCode.INVALID_VALUE, "response_format and structured are both given; give one")
        params["structured"] = constraint
    return params


def build(values: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of checked types.

    Raises:
        RequestError: INVALID_VALUE.
    """
    try:
        return SamplingParams(**values)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(ErrorCode.INVALID_VALUE, str(error)) from None


def _check_type(name: str, value: Any) -> None:
    boolean = isinstance(value, bool)
    if name in _INTEGERS:
        good, expected = isinstance(value, int) and not boolean, "an integer"
    elif name in _NUMBERS:
        good, expected = isinstance(value, (int, float)) and not boolean, "a number"
    elif name in _FLAGS:
        good, expected = boolean, "true or false"
    elif name in _STRINGS:
        single = name == "stop" and isinstance(value, str)
        good = single or (isinstance(value, list) and all(isinstance(v, str) for v in value))
        expected = "a list of strings"
    elif name in _IDS:
        good = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        expected = "a list of token ids"
    else:
        good, expected = isinstance(value, dict), "an object"
    if not good:
        raise RequestError(ErrorCode.INVALID_TYPE, f"{name}: expected {expected}, got {kind(value)}")


def _structured(value: Mapping[str, Any]) -> StructuredOutput:
    refuse_unknown(value, frozenset({"json_schema", "regex", "choice"}))
    try:
        return StructuredOutput(**value)
    except (ValueError, TypeError) as error:
        raise RequestError(ErrorCode.INVALID_VALUE, f"structured: {error}") from None


def _refuse_service_features(body: Mapping[str, Any]) -> None:
    for name in ("stream", "echo"):
        value = body.get(name)
        if value is not None and not isinstance(value, bool):
            raise RequestError(ErrorCode.INVALID_TYPE, f"{name}: expected true or false, got {kind(value)}")
        if value:
            raise RequestError(ErrorCode.INVALID_VALUE, f"{name}: a batch job cannot do that; leave it out")
    if body.get("tools") or body.get("suffix"):
        name = "tools" if body.get("tools") else "suffix"
        raise RequestError(ErrorCode.INVALID_VALUE, f"{name}: not supported; leave it out")
    if body.get("tool_choice") not in (None, "none", "auto"):
        raise RequestError(ErrorCode.INVALID_VALUE, "tool_choice: tools are not supported; leave it out")
    if body.get("best_of") not in (None, body.get("n") or 1):
        raise RequestError(ErrorCode.INVALID_VALUE, "best_of: expected the same as n; leave it out")


def _chat_logprobs(body: dict[str, Any]) -> None:
    """Chat's pair `logprobs: bool, top_logprobs: int` becomes one number."""
    flag, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if flag is not None and not isinstance(flag, bool):
        raise RequestError(
            ErrorCode.INVALID_TYPE, f"logprobs: expected true or false (the number is top_logprobs), got {kind(flag)}"
        )
    if top is not None:
        if isinstance(top, bool) or not isinstance(top, int):
            raise RequestError(ErrorCode.INVALID_TYPE, f"top_logprobs: expected an integer, got {kind(top)}")
        if not flag:
            raise RequestError(ErrorCode.INVALID_VALUE, "top_logprobs: expected logprobs=true beside it")
    if flag:
        body["logprobs"] = top or 0


def _response_format(value: Any) -> StructuredOutput | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(ErrorCode.INVALID_TYPE, f"response_format: expected an object, got {kind(value)}")
    name = value.get("type")
    if name == "text":
        return None
    if name == "json_object":
        return StructuredOutput(json_schema={"type": "object"})
    if name != "json_schema":
        raise RequestError(
            ErrorCode.INVALID_VALUE,
            f"response_format.type: expected text, json_object, json_schema; got {_brief(name)}",
        )
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(ErrorCode.INVALID_TYPE, "response_format.json_schema.schema: expected an object")
    return StructuredOutput(json_schema=schema)


def _brief(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]
