"""Structured output: a grammar says which tokens may come next. Built on llguidance."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pagefleet.runtime.errors import ErrorCode, RequestError
from pagefleet.runtime.sampling_params import StructuredOutput
from pagefleet.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_CACHED = 256
# JSON allows any amount of white space between tokens, and small models then write nothing else until max_tokens.
_JSON_WHITESPACE = r"[ \n\t]{0,32}"


class Grammar:
    """State of one sequence in a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """True when nothing but end-of-sequence can follow."""
        return self._matcher.is_stopped()

    @property
    def accepting(self) -> bool:
        """True when the text so far is complete (more may follow)."""
        return self._matcher.is_accepting()

    def mask(self, logits: Tensor) -> None:
        """Ban in logits [V], in place, every token that cannot come next; end-of-sequence where the text may end.

        Raises:
            RequestError: GRAMMAR, if the grammar's limits were exceeded or a token it forbids was accepted.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))
        known = min(len(allowed), logits.shape[0])
        logits[:known].masked_fill_(~allowed[:known].to(logits.device), float("-inf"))
        logits[known:] = float("-inf")

    def accept(self, token_id: int) -> None:
        """Advance by one token.

        Raises:
            RequestError: GRAMMAR, if the grammar forbids the token here.
        """
        if not self._matcher.consume_token(token_id):
            self._check()
            raise RequestError(ErrorCode.GRAMMAR, f"the grammar does not allow token {token_id} here")

    def foresee(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids` could follow one another from here with something left to follow them."""
        if not token_ids:
            return 0
        ahead, count = self.fork(), 0
        for token_id in token_ids:
            if not ahead._matcher.consume_token(token_id) or ahead.finished:
                break
            count += 1
        return count

    def after(self, token_ids: Sequence[int]) -> Grammar:
        """The state after more tokens: itself if there are none, else an independent copy.

        Raises:
            RequestError: GRAMMAR, if the grammar forbids one of them.
        """
        ahead = self.fork() if token_ids else self
        for token_id in token_ids:
            ahead.accept(token_id)
        return ahead

    def fork(self) -> Grammar:
        """An independent copy at the same state."""
        return Grammar(self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(ErrorCode.GRAMMAR, f"structured output failed: {self._matcher.get_error()}")


class GrammarFactory:
    """Compiles grammars for one tokenizer; the last few hundred are kept.

    Args:
        eos_token_id: the id, or all ids, that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int | Iterable[int]) -> None:
        ids = [eos_token_id] if isinstance(eos_token_id, int) else sorted(eos_token_id)
        if not ids:
            raise RequestError(
                ErrorCode.GRAMMAR, "structured output needs an end-of-sequence token; this model's tokenizer has none"
            )
        self._tokenizer = tokenizer
        self._eos = ids
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, structured: StructuredOutput) -> Grammar:
        """A grammar at its start.

        Raises:
            RequestError: GRAMMAR, with what is wrong in the schema, expression or choices.
        """
        text = _grammar_text(structured)
        with self._lock:
            start = self._compiled.get(text)
            if start is None:
                start = self._compiled[text] = self._compile(text)
                if len(self._compiled) > _CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(text)
            return start.fork()

    def _compile(self, text: str) -> Grammar:
        if self._vocabulary is None:  # about a second for large vocabularies
            self._vocabulary = _vocabulary(self._tokenizer, self._eos)
        limits = _library().LLParserLimits(verbose_errors=False)  # verbose ones print the parser's state
        matcher = _library().LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(ErrorCode.GRAMMAR, f"structured output: {matcher.get_error()}")
        return Grammar(matcher)


def _library() -> Any:
    """llguidance, which only grammars need. Raises RequestError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        message = "structured output needs the package llguidance: pip install llguidance"
        raise RequestError(ErrorCode.GRAMMAR, message) from error
    return llguidance


def _vocabulary(tokenizer: Tokenizer, eos: list[int]) -> llguidance.LLTokenizer:
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())  # a copy: the next two lines change it
    backend.no_padding()
    backend.no_truncation()
    return _library().LLTokenizer(backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=eos)


def _grammar_text(structured: StructuredOutput) -> str:
    matcher = _library().LLMatcher
    try:
        if structured.regex is not None:
            return matcher.grammar_from_regex(structured.regex)
        if structured.choice is not None:
            alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.choice)
            return matcher.grammar_from_lark(f"start: {alternatives}")
        schema = structured.json_schema
        schema = json.loads(schema) if isinstance(schema, str) else dict(schema or {})
        return matcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _JSON_WHITESPACE})
    except UnicodeEncodeError as error:
        raise RequestError(ErrorCode.GRAMMAR, f"structured output: lone surrogate in its text: {error}") from error
    except (ValueError, TypeError) as error:
        raise RequestError(ErrorCode.GRAMMAR, f"json_schema: expected a JSON schema: {error}") from error
