"""Errors of Pagefleet, each with a typed code that batch results and exit codes are made from."""

from __future__ import annotations

from enum import Enum


class ErrorCode(str, Enum):
    """Why a request or a row did not get an answer; the value is what result rows carry."""

    INVALID_JSON = "invalid_json"
    INVALID_ENCODING = "invalid_encoding"
    INVALID_TYPE = "invalid_type"
    MISSING_FIELD = "missing_field"
    UNKNOWN_FIELD = "unknown_field"
    INVALID_VALUE = "invalid_value"
    UNKNOWN_ENDPOINT = "unknown_endpoint"
    UNKNOWN_MODEL = "unknown_model"
    DUPLICATE_ID = "duplicate_id"
    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    NEVER_FITS = "never_fits"
    INVALID_TOKEN = "invalid_token"
    CHAT_TEMPLATE = "chat_template"
    GRAMMAR = "grammar"
    ABORTED = "aborted"
    OUT_OF_MEMORY = "out_of_memory"
    INTERNAL = "internal"


class PagefleetError(Exception):
    """Base of every error this project raises on purpose."""


class RequestError(PagefleetError):
    """One request cannot be served; the others are unaffected.

    Attributes:
        code: machine-readable reason.
        message: what was wrong, what was expected, what to do.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ConfigError(PagefleetError, ValueError):
    """A configuration value is wrong; raised before anything is loaded (exit code 2)."""


class ModelError(PagefleetError):
    """A model cannot be loaded or is refused by name; raised before weights are read where possible."""
