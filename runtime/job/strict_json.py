"""JSON as a batch job reads it: one line, UTF-8, no surprises. Whatever is wrong becomes a typed RequestError."""

from __future__ import annotations

import json
import math
from typing import Any

from pagefleet.runtime.errors import ErrorCode, RequestError


def parse_json(line: bytes) -> Any:
    """Value of one line of JSON.

    Raises:
        RequestError: INVALID_ENCODING (not UTF-8, lone surrogates); INVALID_JSON (not JSON, NaN or Infinity, a key
            given twice, nesting too deep, numbers that no double holds).
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            ErrorCode.INVALID_ENCODING,
            f"the row is not UTF-8 (byte {error.start + 1}: {error.reason}); save it as UTF-8",
        ) from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RequestError(
            ErrorCode.INVALID_JSON, f"the row is not JSON: {error.msg} at character {error.pos + 1}"
        ) from None
    except RecursionError:
        raise RequestError(ErrorCode.INVALID_JSON, "the row is nested too deeply") from None
    except ValueError as error:  # the interpreter's limit on digits of an integer
        raise RequestError(ErrorCode.INVALID_JSON, f"a number in the row is too long: {error}") from None
    if "\\u" in text:
        refuse_lone_surrogates(value)
    return value


def refuse_lone_surrogates(value: Any) -> None:
    """Raise INVALID_ENCODING if any string inside `value` holds half of a surrogate pair: no tokenizer can read it."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise RequestError(
                    ErrorCode.INVALID_ENCODING,
                    "a string in the row holds a lone surrogate (half of a \\ud8xx\\udcxx pair)",
                ) from None
        elif isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)


def dump_json(value: Any) -> bytes:
    """One line of JSON, without the newline. Non-ASCII text stays readable; characters that some readers take for
    line ends, and strings that UTF-8 cannot hold, are escaped.
    """
    text = _ENCODER.encode(value)
    for character in ("\u0085", "\u2028", "\u2029"):
        if character in text:
            text = text.replace(character, f"\\u{ord(character):04x}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RequestError(ErrorCode.INVALID_JSON, f"the key {twice[:80]!r} is given twice in one object")
    return result


def _no_constant(name: str) -> Any:
    raise RequestError(ErrorCode.INVALID_JSON, f"{name} is not JSON; use a finite number or null")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise RequestError(ErrorCode.INVALID_JSON, f"the number {text[:40]} is too large for a double")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
