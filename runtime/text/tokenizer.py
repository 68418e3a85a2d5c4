"""Tokenizer: what the engine needs of a transformers tokenizer, with request errors instead of library ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pagefleet.runtime.errors import ErrorCode, ModelError, RequestError


class Tokenizer:
    """Text to ids and back.

    Decoding goes through the `tokenizers` backend, without the clean-up of spaces that older configurations ask
    for: clean-up changes text that is already out, so it cannot be streamed.

    Attributes:
        hf: the transformers tokenizer.
        bos_token_id: id that starts a text, None if the model has none.
        eos_token_ids: ids that end a generation: the tokenizer's, and those of `generation_config.json`.
        vocab_size: largest id + 1 (the model's logits may be wider).
    """

    def __init__(self, hf: Any, eos_token_ids: Iterable[int] = ()) -> None:
        if not isinstance(getattr(hf, "backend_tokenizer", None), tokenizers.Tokenizer):
            raise ModelError(
                f"tokenizer {type(hf).__name__}: expected one backed by the `tokenizers` library (tokenizer.json), "
                "found a Python-only one; convert it to tokenizer.json"
            )
        self.hf = hf
        self.bos_token_id: int | None = hf.bos_token_id
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.eos_token_ids: frozenset[int] = frozenset(own) | frozenset(int(i) for i in eos_token_ids)
        vocab = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self._texts: dict[int, str] = {}
        self._ids: frozenset[int] = frozenset(vocab.values())

    @classmethod
    def load(cls, path: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
        """Load from a checkpoint folder or a hub id.

        Raises:
            ModelError: there is no usable tokenizer there.
        """
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise ModelError(
                f"cannot load a tokenizer from {str(path)!r}: {error}; expected a checkpoint folder with "
                "tokenizer.json or tokenizer.model, or a hub id that can be reached"
            ) from error
        return cls(hf, _generation_eos(Path(path)))

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The Rust tokenizer."""
        return self.hf.backend_tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens (BOS) are added as the model expects unless told otherwise.

        Raises:
            RequestError: INVALID_TYPE if it is not a string, INVALID_ENCODING if it holds lone surrogates.
        """
        check_text(text, "text")
        return list(self.hf(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; broken UTF-8 becomes U+FFFD, ids without a token are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token as it reads inside a text (its leading space is kept); U+FFFD for part of a character."""
        if token_id not in self._texts:
            context = self._context_ids
            before = self.backend.decode(context, skip_special_tokens=False)
            after = self.backend.decode([*context, token_id], skip_special_tokens=False)
            self._texts[token_id] = after[len(before) :]
        return self._texts[token_id]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens: what `skip_special_tokens` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of byte-fallback tokens (`<0x0A>`), whose text depends on their neighbours; empty for most models."""
        decoder = json.loads(self.backend.decoder.__getstate__()) if self.backend.decoder else {}
        steps = [decoder, *decoder.get("decoders", ())]
        if not any(step.get("type") == "ByteFallback" for step in steps):
            return frozenset()
        names = (f"<0x{byte:02X}>" for byte in range(256))
        return frozenset(i for i in map(self.backend.token_to_id, names) if i is not None)

    @cached_property
    def adds_bos(self) -> bool:
        """True if plain encoding starts a text with BOS."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    def has_token(self, token_id: int) -> bool:
        """True if the id stands for a token (vocabularies may have holes)."""
        return token_id in self._ids

    @cached_property
    def _context_ids(self) -> list[int]:
        return self.encode("a", add_special_tokens=False)[-1:]


def check_text(text: object, name: str) -> None:
    """Refuse what is not a string of Unicode text.

    Raises:
        RequestError: INVALID_TYPE, or INVALID_ENCODING for lone surrogates.
    """
    if not isinstance(text, str):
        raise RequestError(ErrorCode.INVALID_TYPE, f"{name}: expected a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            ErrorCode.INVALID_ENCODING,
            f"{name}: character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), which is no "
            "Unicode text; expected surrogates in pairs, or the text re-encoded as UTF-8",
        ) from None


def _generation_eos(folder: Path) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return ()
    eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
