"""Raw rows to requests. A row that cannot be served becomes a Row with `error` set; nothing is raised."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.job import fields
from pagefleet.runtime.job.ids import IdSet
from pagefleet.runtime.job.readers import MAX_LINE_BYTES, RawRow
from pagefleet.runtime.job.strict_json import parse_json, refuse_lone_surrogates
from pagefleet.runtime.outputs import OutputError
from pagefleet.runtime.sampling_params import SamplingParams

_MESSAGE_LIMIT = 600
_MAX_PROMPTS = 4096

Prompt = dict[str, Any]


class Form(str, Enum):
    """Which of the two input forms a row has."""

    SIMPLE = "simple"
    OPENAI = "openai"


class Endpoint(str, Enum):
    """What an OpenAI row calls."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass
class Row:
    """One input row.

    Attributes:
        index: position among all rows of the job, from 0.
        row_id: the row's own id, or `row-<index>`.
        prompts: one engine request each (several only for /v1/completions with a list of prompts).
        params: sampling parameters, one for each prompt.
        error: why the row cannot be served; prompts and params are then empty.
    """

    index: int
    form: Form
    row_id: str | int
    weight: float = 0.0
    endpoint: Endpoint | None = None
    model: str = ""
    prompts: list[Prompt] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    top_logprobs: int | None = None
    error: OutputError | None = None


def model_names(path: str, served: Iterable[str] = ()) -> tuple[str, ...]:
    """Names a row may give as `model`: the served names, the configured path, its last part (with and without
    `.gguf`). The first is used in results of rows that name none.
    """
    last = os.path.basename(path.rstrip("/"))
    names = [*served, last.removesuffix(".gguf"), last, path]
    return tuple(dict.fromkeys(name for name in names if name))


def detect_form(value: Any) -> Form:
    """The form of a parsed row."""
    if isinstance(value, Mapping) and any(key in value for key in ("custom_id", "url", "body", "method")):
        return Form.OPENAI
    return Form.SIMPLE


class RowParser:
    """Parses rows in order (order matters for duplicate ids).

    Args:
        models: names accepted in a row's `model`.
        defaults: sampling fields for rows that do not set them (`job.defaults`).
        seed: a row without `seed` draws from this seed and its index, so its result does not depend on what ran before.
        unreadable_form: form of error rows for lines that are not even JSON.
    """

    def __init__(self, models: Sequence[str], defaults: Mapping[str, Any], seed: int, unreadable_form: Form) -> None:
        self._models = models
        self._defaults = dict(defaults)
        self._seed = seed
        self._unreadable_form = unreadable_form
        self._seen = IdSet()

    def parse(self, raw: RawRow, index: int, done: bool = False) -> Row:
        """The row, good or with its error. Never raises for what a row holds.

        Args:
            done: the row has its result already; only its id is taken, for the sake of later duplicates.
        """
        row = Row(index, self._unreadable_form, f"row-{index}", raw.weight)
        try:
            self._fill(row, raw, done)
        except RequestError as error:
            row.prompts, row.params = [], []
            row.error = OutputError(error.code, _shortened(f"{error.message} ({raw.where})"))
        except RecursionError:
            row.prompts, row.params = [], []
            row.error = OutputError(ErrorCode.INVALID_JSON, f"the row is nested too deeply ({raw.where})")
        return row

    def _fill(self, row: Row, raw: RawRow, done: bool) -> None:
        try:
            value = _value(raw)
        except RequestError:
            self._seen.add(_key(row.row_id))
            raise
        row.form = detect_form(value) if isinstance(value, Mapping) else row.form
        problem = self._take_id(row, value)
        if not self._seen.add(_key(row.row_id)):
            raise RequestError(
                ErrorCode.DUPLICATE_ID, f"the id {row.row_id!r} was used by an earlier row; give each row its own"
            )
        if done:
            return
        if problem is not None:
            raise problem
        if not isinstance(value, Mapping):
            raise RequestError(ErrorCode.INVALID_TYPE, f"a row is a JSON object, got {fields.kind(value)}")
        if row.form is Form.OPENAI:
            self._openai(row, value)
        else:
            self._simple(row, value)

    @staticmethod
    def _take_id(row: Row, value: Any) -> RequestError | None:
        if not isinstance(value, Mapping):
            return None
        name = "custom_id" if row.form is Form.OPENAI else "id"
        given = value.get(name)
        if given is None:
            return None
        allowed = (str,) if row.form is Form.OPENAI else (str, int)
        if isinstance(given, bool) or not isinstance(given, allowed):
            expected = "a string" if row.form is Form.OPENAI else "a string or an integer"
            return RequestError(ErrorCode.INVALID_TYPE, f"{name}: expected {expected}, got {fields.kind(given)}")
        if given == "":
            return RequestError(ErrorCode.INVALID_VALUE, f"{name}: expected a non-empty string")
        row.row_id = given
        return None

    def _simple(self, row: Row, value: Mapping[str, Any]) -> None:
        fields.refuse_unknown(value, fields.SIMPLE)
        row.model = self._model(value)
        given = [name for name in ("prompt", "prompt_token_ids", "messages") if value.get(name) is not None]
        if len(given) != 1:
            expected = "expected exactly one of prompt, prompt_token_ids, messages"
            code = ErrorCode.MISSING_FIELD if not given else ErrorCode.INVALID_VALUE
            raise RequestError(code, f"{expected}; got {' and '.join(given) or 'none (or null)'}")
        if given[0] == "messages":
            prompts: list[Prompt] = [{"messages": fields.messages(value["messages"])}]
        elif given[0] == "prompt_token_ids":
            prompts = [{"prompt_token_ids": fields.token_ids("prompt_token_ids", value["prompt_token_ids"])}]
        else:
            prompts = [_one_prompt(value["prompt"])]
        self._finish(row, prompts, fields.sampling(value), chat=given[0] == "messages")

    def _openai(self, row: Row, value: Mapping[str, Any]) -> None:
        fields.refuse_unknown(value, fields.OPENAI_ROW)
        method = value.get("method") or "POST"
        url = value.get("url")
        if url is None:
            raise RequestError(ErrorCode.MISSING_FIELD, f"url: expected {_endpoints()}")
        if not isinstance(url, str) or not isinstance(method, str):
            raise RequestError(ErrorCode.INVALID_TYPE, "url, method: expected strings")
        if method.upper() != "POST":
            raise RequestError(ErrorCode.INVALID_VALUE, f"method: expected POST, got {method!r}")
        try:
            row.endpoint = Endpoint(url)
        except ValueError:
            raise RequestError(ErrorCode.UNKNOWN_ENDPOINT, f"url: expected {_endpoints()}, got {url!r}") from None
        body = value.get("body")
        if body is None:
            raise RequestError(ErrorCode.MISSING_FIELD, "body: expected the request's fields, got none")
        if not isinstance(body, Mapping):
            raise RequestError(ErrorCode.INVALID_TYPE, f"body: expected an object, got {fields.kind(body)}")
        chat = row.endpoint is Endpoint.CHAT
        fields.refuse_unknown(body, fields.CHAT_BODY if chat else fields.COMPLETIONS_BODY)
        row.model = self._model(body)
        name = "messages" if chat else "prompt"
        if body.get(name) is None:
            raise RequestError(ErrorCode.MISSING_FIELD, f"{name}: expected in body, got none")
        prompts = [{"messages": fields.messages(body[name])}] if chat else _prompts(body[name])
        params = fields.openai_sampling(body, chat=chat)
        row.top_logprobs = params.get("logprobs")
        self._finish(row, prompts, params, chat=chat)

    def _model(self, value: Mapping[str, Any]) -> str:
        name = value.get("model")
        if name is None:
            return self._models[0] if self._models else ""
        if not isinstance(name, str):
            raise RequestError(ErrorCode.INVALID_TYPE, f"model: expected a string, got {fields.kind(name)}")
        if name not in self._models:
            raise RequestError(
                ErrorCode.UNKNOWN_MODEL, f"model: this job runs {' = '.join(map(repr, self._models))}, got {name!r}"
            )
        return name

    def _finish(self, row: Row, prompts: list[Prompt], given: Mapping[str, Any], chat: bool) -> None:
        values = {**({"max_tokens": None} if chat else {}), **self._defaults, **given}
        for part in range(len(prompts)):
            seed = values.get("seed")
            seed = _row_seed(self._seed, row.index, part) if seed is None else seed
            row.params.append(fields.build({**values, "seed": seed}))
        row.prompts = prompts


def _value(raw: RawRow) -> Any:
    if raw.data is None:
        raise RequestError(ErrorCode.INVALID_VALUE, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    if isinstance(raw.data, bytes):
        return parse_json(raw.data)
    row = dict(raw.data)
    for name in ("body", "messages"):  # nested fields of a Parquet file may be columns of JSON text
        if isinstance(row.get(name), str):
            row[name] = parse_json(row[name].encode("utf-8", "surrogatepass"))
    refuse_lone_surrogates(row)
    return row


def _one_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise RequestError(ErrorCode.EMPTY_PROMPT, "prompt: expected some text, got an empty string")
        return {"prompt": value}
    if isinstance(value, list) and any(isinstance(item, (str, list)) for item in value):
        raise RequestError(
            ErrorCode.INVALID_TYPE, "prompt: expected one string or one list of token ids; write a row for each prompt"
        )
    return {"prompt_token_ids": fields.token_ids("prompt", value)}


def _prompts(value: Any) -> list[Prompt]:
    """OpenAI's four kinds of prompt: text, texts, token ids, lists of token ids."""
    if not isinstance(value, list) or not value or not isinstance(value[0], (str, list)):
        return [_one_prompt(value)]
    if not all(isinstance(item, type(value[0])) for item in value):
        raise RequestError(
            ErrorCode.INVALID_TYPE, "prompt: expected all strings or all lists of token ids, got a mixture"
        )
    if len(value) > _MAX_PROMPTS:
        raise RequestError(
            ErrorCode.INVALID_VALUE, f"prompt: expected at most {_MAX_PROMPTS} prompts in a row, got {len(value)}"
        )
    return [_one_prompt(item) for item in value]


def _endpoints() -> str:
    return " or ".join(e.value for e in Endpoint)


def _key(row_id: str | int) -> str:
    return f"{type(row_id).__name__}:{row_id}"


def _row_seed(seed: int, index: int, part: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{index}:{part}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _shortened(text: str) -> str:
    return text if len(text) <= _MESSAGE_LIMIT else text[: _MESSAGE_LIMIT - 20] + " ... (shortened)"
