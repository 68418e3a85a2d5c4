"""Engine outputs to result rows, in the form of the input row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet.runtime.errors import ErrorCode
from pagefleet.runtime.job.rows import Endpoint, Form, Row
from pagefleet.runtime.job.strict_json import dump_json
from pagefleet.runtime.outputs import CompletionOutput, Logprob, OutputError, RequestOutput

_OUR_FAULT = (ErrorCode.INTERNAL, ErrorCode.OUT_OF_MEMORY, ErrorCode.ABORTED)
_LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


def error_result(row: Row, error: OutputError) -> bytes:
    """The result line of a row without an answer."""
    code = ErrorCode(error.code).value
    brief = {"code": code, "message": error.message}
    if row.form is Form.SIMPLE:
        return dump_json({"id": row.row_id, "index": row.index, "outputs": [], "usage": None, "error": brief})
    ours = error.code in _OUR_FAULT
    body = {
        "error": {
            "message": error.message,
            "type": "server_error" if ours else "invalid_request_error",
            "param": None,
            "code": code,
        }
    }
    return dump_json(_openai(row, 500 if ours else 400, body, brief))


def good_result(row: Row, parts: Sequence[RequestOutput], created: int) -> bytes:
    """The result line of a finished row.

    Args:
        parts: the outputs of the row's prompts, in order.
        created: Unix time that OpenAI bodies carry.
    """
    if row.form is Form.SIMPLE:
        return dump_json(_simple(row, parts[0]))
    chat = row.endpoint is Endpoint.CHAT
    choices: list[dict[str, Any]] = []
    for part in parts:
        for output in part.outputs:
            choices.append(_choice(row, output, len(choices), chat=chat))
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{row.index}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": row.model,
        "choices": choices,
        "usage": usage(parts),
    }
    return dump_json(_openai(row, 200, body, None))


def usage(parts: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts of a row in OpenAI's words."""
    prompt = sum(len(p.prompt_token_ids) for p in parts)
    completion = sum(len(o.token_ids) for p in parts for o in p.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(p.num_cached_tokens for p in parts)},
    }


def _openai(row: Row, status: int, body: Mapping[str, Any], error: Mapping[str, Any] | None) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req-{row.index}", "body": body}
    return {"id": f"batch_req-{row.index}", "custom_id": row.row_id, "response": response, "error": error}


def _simple(row: Row, part: RequestOutput) -> dict[str, Any]:
    outputs: list[dict[str, Any]] = []
    for output in part.outputs:
        item: dict[str, Any] = {
            "index": output.index,
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if output.logprobs is not None:
            item["cumulative_logprob"] = _number(output.cumulative_logprob)
            item["logprobs"] = [_position(position) for position in output.logprobs]
        outputs.append(item)
    result: dict[str, Any] = {
        "id": row.row_id,
        "index": row.index,
        "outputs": outputs,
        "usage": usage([part]),
        "error": None,
    }
    if part.prompt_logprobs is not None:
        result["prompt_logprobs"] = [p if p is None else _position(p) for p in part.prompt_logprobs]
    return result


def _position(position: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "logprob": _number(lp.logprob), "rank": lp.rank, "token": lp.decoded_token}
        for token, lp in position.items()
    ]


def _choice(row: Row, output: CompletionOutput, index: int, *, chat: bool) -> dict[str, Any]:
    content: dict[str, Any]
    if chat:
        content = {"message": {"role": "assistant", "content": output.text, "refusal": None}}
    else:
        content = {"text": output.text}
    logprobs = None
    if output.logprobs is not None:
        logprobs = _chat_logprobs(row, output) if chat else _completion_logprobs(row, output)
    return {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


def _chat_logprobs(row: Row, output: CompletionOutput) -> dict[str, Any]:
    content = []
    for token, position in zip(output.token_ids, output.logprobs or [], strict=False):
        top = [_token(lp) for lp in _best(position, row.top_logprobs or 0)]
        content.append({**_token(position.get(token)), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(lp: Logprob | None) -> dict[str, Any]:
    text = (lp.decoded_token if lp is not None else None) or ""
    number = _number(lp.logprob) if lp is not None else _LOWEST_LOGPROB
    return {"token": text, "logprob": number, "bytes": list(text.encode("utf-8", "surrogatepass"))}


def _completion_logprobs(row: Row, output: CompletionOutput) -> dict[str, Any]:
    tokens, numbers, tops, offsets = [], [], [], []
    offset = 0
    for token, position in zip(output.token_ids, output.logprobs or [], strict=False):
        chosen = _token(position.get(token))
        tokens.append(chosen["token"])
        numbers.append(chosen["logprob"])
        best = _best(position, row.top_logprobs or 0)
        tops.append({lp.decoded_token or "": _number(lp.logprob) for lp in best})
        offsets.append(offset)
        offset += len(chosen["token"])
    return {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": tops, "text_offset": offsets}


def _best(position: Mapping[int, Logprob], count: int) -> list[Logprob]:
    return sorted(position.values(), key=lambda lp: lp.rank)[:count]


def _number(value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    return max(value, _LOWEST_LOGPROB) if math.isfinite(value) or value < 0 else None
