"""SamplingParams: how the tokens of a request are chosen, and when it stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class StructuredOutput:
    """A constraint on the text; exactly one field is set.

    Attributes:
        json_schema: a JSON schema, as a mapping or as JSON text.
        regex: a regular expression the whole output matches.
        choice: the output is one of these strings.
    """

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.choice is not None:
            if isinstance(self.choice, str) or not all(isinstance(c, str) and c for c in self.choice):
                raise ValueError("choice: expected a list of non-empty strings")
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice:
                raise ValueError("choice: expected at least one string, got none")
        if self.regex is not None and not isinstance(self.regex, str):
            raise ValueError(f"regex: expected a string, got {self.regex!r}")
        if self.json_schema is not None and not isinstance(self.json_schema, (str, Mapping)):
            raise ValueError("json_schema: expected a mapping or JSON text")
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"structured output takes exactly one of json_schema, regex, choice; got {given or 'none'}"
            )


@dataclass(frozen=True)
class SamplingParams:
    """Validated sampling parameters; names and meanings follow vLLM's.

    Attributes:
        n: continuations per prompt.
        max_tokens: most tokens to generate; None means up to the model's length limit.
        min_tokens: end-of-sequence and stop tokens are banned before this many tokens.
        temperature: 0 is greedy.
        top_p, top_k, min_p: nucleus mass; most candidates (0 or -1 keeps all); probability floor relative to the best.
        seed: makes the draws repeatable; None takes one from the engine's seed and the request's number.
        presence_penalty, frequency_penalty: subtracted from logits of tokens already generated.
        repetition_penalty: divides (multiplies, if negative) logits of tokens in prompt or output.
        stop: strings that end the output; stop_token_ids: ids that do.
        include_stop_str_in_output: keep the matched stop string in the text.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: how many most likely tokens to report per position (0: only the chosen one; None: nothing).
        prompt_logprobs: likewise for prompt tokens; such requests do not read the prefix cache.
        logit_bias: token id -> value added to its logit, -100 to 100.
        allowed_token_ids: only these may be chosen.
        bad_words: strings that may not be generated.
        skip_special_tokens: leave special tokens out of the text.
        structured: a constraint on the text.

    Raises:
        ValueError: a value is impossible; TypeError: a name is unknown.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._int("n", low=1, high=1024)
        self._int("max_tokens", low=1, optional=True)
        self._int("min_tokens", low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: expected at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        self._real("temperature", low=0.0, high=100.0)
        self._real("top_p", low=0.0, high=1.0, open_low=True)
        self._int("top_k", low=-1)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._real("min_p", low=0.0, high=1.0)
        self._int("seed", low=-_MAX_SEED - 1, high=_MAX_SEED, optional=True)
        self._real("presence_penalty", low=-2.0, high=2.0)
        self._real("frequency_penalty", low=-2.0, high=2.0)
        self._real("repetition_penalty", low=0.0, high=100.0, open_low=True)
        self._int("logprobs", low=0, high=100, optional=True)
        self._int("prompt_logprobs", low=0, high=100, optional=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected true or false, got {getattr(self, name)!r}")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._strings("stop")
        self._strings("bad_words")
        self._token_ids("stop_token_ids")
        if self.allowed_token_ids is not None:
            self._token_ids("allowed_token_ids")
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids: expected at least one id, or None for all")
        self._bias()
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise ValueError(f"structured: expected a StructuredOutput, got {type(self.structured).__name__}")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    def _int(self, name: str, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise ValueError(f"{name}: expected {allowed}{' or None' if optional else ''}, got {value!r}")

    def _real(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        bad = isinstance(value, bool) or not isinstance(value, (int, float)) or value != value
        if bad or value > high or value < low or (open_low and value == low):
            raise ValueError(f"{name}: expected a number in {'(' if open_low else '['}{low}, {high}], got {value!r}")

    def _strings(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise ValueError(f"{name}: expected a list of strings, got {value!r}")
        if not all(isinstance(s, str) and s for s in value):
            raise ValueError(f"{name}: expected non-empty strings, got {list(value)!r}")
        object.__setattr__(self, name, tuple(value))

    def _token_ids(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise ValueError(f"{name}: expected a list of token ids, got {value!r}")
        if not all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in value):
            raise ValueError(f"{name}: expected token ids (integers >= 0), got {list(value)!r}")
        object.__setattr__(self, name, tuple(value))

    def _bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias: expected a mapping of token id to number, got {self.logit_bias!r}")
        clean: dict[int, float] = {}
        for token, value in self.logit_bias.items():
            try:
                token_id = int(token)
            except (TypeError, ValueError):
                raise ValueError(f"logit_bias: expected token ids as keys, got {token!r}") from None
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if token_id < 0 or not number or not -100 <= value <= 100:
                raise ValueError(
                    f"logit_bias: expected id >= 0 and a number from -100 to 100, got {token!r}: {value!r}"
                )
            clean[token_id] = float(value)
        object.__setattr__(self, "logit_bias", clean)
