"""Detokenizer: the text of a growing list of tokens, cut at stop strings.

The text is what a full decode of prompt and output adds to a decode of the prompt: after any token sequence, with no
stop string, `text == decode(prompt + output)` without the prefix it has in common with `decode(prompt)`.

It is computed as `tokenizers.decoders.DecodeStream` does, by decoding a short window that begins with prompt tokens
(so that the first word keeps its space) and waiting while a character is incomplete. DecodeStream itself is not used,
because it cannot keep the promise above: it repeats the whole prompt if that ends inside a character (vllm#48853), and
stops with an error on byte-fallback tokens that form no character (vllm#17448), since it takes text as final that the
next byte token changes.

Without stop strings nothing needs the text token by token: tokens are then kept until the text is read, and decoded
together.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet.runtime.text.tokenizer import Tokenizer

_CONTEXT = 8  # tokens kept before new ones: more than the 4 bytes of a character, so its start is always inside
_WINDOW = 32  # the window is cut back to its context when it is longer
_MOST_QUEUED = 256  # tokens that wait to be decoded together
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental text of one sequence.

    Args:
        prompt_ids: tokens before the output; their text is never part of the result.
        stop: strings that end the text. The match that starts first counts; of several at one place the shortest,
            which is the one that is complete first when text comes character by character.
        include_stop: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: stop strings complete within the first so many tokens do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._bytes = tokenizer.byte_ids
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest_stop = max((len(s) for s in self._stop), default=1)
        self._min_tokens = min_tokens
        self._num_pushed = 0
        self._queued: list[int] = []
        self._window = self._last_context(prompt_ids)
        text = self._decode(self._window)
        self._settled_chars = self._settled(text)  # of the window's text: final, and counted
        self._prompt_rest = text[self._settled_chars :]  # end of the prompt's text that output tokens may change
        self._final = ""  # output text that no later token changes
        self._pending = ""  # output text that a later token may change
        self._ended = False
        self._stopped: str | None = None

    @property
    def text(self) -> str:
        """All text so far, cut at the stop string."""
        self._decode_queued()
        return self._final + self._pending

    @property
    def emitted(self) -> str:
        """The part of `text` that is safe to stream: final, and without any part of a stop string."""
        self._decode_queued()
        if self._ended:
            return self._final
        held = 0 if self._include_stop else self._longest_stop - 1
        return self._final[: max(0, len(self._final) - held)]

    def push(self, token_id: int) -> str | None:
        """Add one output token; return the stop string that is now complete, if any. Nothing changes after that."""
        if self._ended:
            return self._stopped
        self._num_pushed += 1
        if token_id in self._skipped or not self._tokenizer.has_token(token_id):
            return None
        self._queued.append(token_id)
        if self._stop or len(self._queued) >= _MOST_QUEUED:
            searched = len(self._final)
            self._decode_queued()
            if self._stop and self._num_pushed > self._min_tokens:
                complete = self._final + self._pending
                if token_id not in self._bytes or self._pending.endswith(_REPLACEMENT):
                    complete = self._final
                self._cut(complete, searched)
        return self._stopped

    def finish(self) -> str | None:
        """No token follows: everything held back becomes text, an incomplete character as U+FFFD.

        Returns the stop string that this completes, if any.
        """
        if not self._ended:
            self._decode_queued()
            searched = len(self._final)
            self._final, self._pending = self._final + self._pending, ""
            if self._stop and self._num_pushed > self._min_tokens:
                self._cut(self._final, searched)
            self._ended = True
        return self._stopped

    def _decode_queued(self) -> None:
        if not self._queued:
            return
        self._window += self._queued
        self._queued = []
        self._settle(self._decode(self._window))
        if len(self._window) > _WINDOW:
            self._shorten()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _settled(self, text: str) -> int:
        """How many characters of the window's text no later token can change."""
        if self._window and self._window[-1] in self._bytes:
            return len(self._decode(self._window[: self._byte_run_start()]))
        return len(text) - text.endswith(_REPLACEMENT)

    def _byte_run_start(self) -> int:
        start = len(self._window)
        while start and self._window[start - 1] in self._bytes:
            start -= 1
        return start

    def _settle(self, text: str) -> None:
        settled = self._settled(text)
        fresh, rest = text[self._settled_chars : settled], text[self._settled_chars :]
        if not fresh:
            self._pending = _without_common_prefix(rest, self._prompt_rest)
            return
        self._final += _without_common_prefix(fresh, self._prompt_rest)
        self._prompt_rest = ""
        self._pending = text[settled:]
        self._settled_chars = settled

    def _cut(self, text: str, searched: int) -> None:
        """Look for a stop string that ends after the `searched` characters; cut there and end."""
        starts = {s: text.find(s, max(0, searched - len(s) + 1)) for s in self._stop}
        found = [(at, len(s), s) for s, at in starts.items() if at >= 0]
        if found:
            at, length, self._stopped = min(found)
            self._final, self._pending = text[: at + length if self._include_stop else at], ""
            self._ended = True

    def _shorten(self) -> None:
        kept = self._last_context(self._window)
        if len(kept) < len(self._window):
            undecided = len(self._decode(self._window)) - self._settled_chars
            self._window = kept
            self._settled_chars = len(self._decode(kept)) - undecided

    def _last_context(self, ids: Sequence[int]) -> list[int]:
        """The last tokens with text, beginning with one that is no byte token, so that no run of bytes is split."""
        kept: list[int] = []
        for token_id in reversed(ids):
            if token_id in self._skipped or not self._tokenizer.has_token(token_id):
                continue
            kept.append(token_id)
            if len(kept) >= _CONTEXT and token_id not in self._bytes:
                break
        return kept[::-1]


def _without_common_prefix(text: str, other: str) -> str:
    length = 0
    while text[length : length + 1] == other[length : length + 1] != "":
        length += 1
    return text[length:]
