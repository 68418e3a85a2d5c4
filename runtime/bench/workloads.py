"""Workloads: how many prompts of which lengths, and how many new tokens. Their tokens come from a text, by seed.

W1 to W4 are the four shapes that CPU engines are compared on: many prompts of mixed lengths, a single short chat, many
questions about one shared text, and one long document.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pagefleet.runtime.config import BenchConfig
from pagefleet.runtime.errors import ConfigError

_BETWEEN_SAMPLES = "\n\n"


@dataclass(frozen=True)
class Workload:
    """Prompts that arrive together.

    Attributes:
        own_lengths: tokens of each prompt that are its own, in order of arrival.
        shared: tokens that all prompts begin with, before their own.
        new: tokens generated for each prompt; the end of sequence is ignored.
    """

    name: str
    own_lengths: tuple[int, ...]
    new: int
    shared: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(self.shared + own for own in self.own_lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence at its end."""
        return max(self.lengths) + self.new

    def describe(self) -> str:
        """The shape in a few words."""
        low, high = min(self.lengths), max(self.lengths)
        each = f"{low}" if low == high else f"{low} to {high}"
        prefix = f", {self.shared} of them shared" if self.shared else ""
        return f"{len(self.lengths)} x {each} tokens{prefix}, {self.new} new each"


def _spread(low: int, high: int, count: int, seed: int) -> tuple[int, ...]:
    """Evenly spaced lengths from `low` to `high`, in a shuffled order that `seed` fixes."""
    lengths = [low + round(i * (high - low) / max(count - 1, 1)) for i in range(count)]
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)


WORKLOADS = {
    "w1": Workload("w1", _spread(32, 512, 64, seed=1), new=128),
    "w2": Workload("w2", (128,), new=128),
    "w3": Workload("w3", (32,) * 64, new=32, shared=512),
    "w4": Workload("w4", (6000,), new=64),
}
SMALL_WORKLOADS = {  # the same shapes, for tests: seconds on a tiny model
    "w1": Workload("w1", _spread(2, 32, 8, seed=1), new=8),
    "w2": Workload("w2", (8,), new=8),
    "w3": Workload("w3", (4,) * 8, new=4, shared=32),
    "w4": Workload("w4", (100,), new=4),
}


def custom(settings: BenchConfig, seed: int) -> Workload:
    """The workload that the keys of `bench` describe.

    Raises:
        ConfigError: the shared prefix is longer than the shortest prompt.
    """
    low = max(1, round(settings.input_len * (1 - settings.input_len_spread)))
    high = max(low, round(settings.input_len * (1 + settings.input_len_spread)))
    shared = settings.shared_prefix_len
    if shared >= low and (shared > low or settings.num_prompts > 1):
        raise ConfigError(
            f"bench.shared_prefix_len: expected less than {low}, the shortest prompt, got {shared}; "
            "every prompt needs a token of its own"
        )
    draw = random.Random(seed)
    own = tuple(draw.randint(low, high) - shared for _ in range(settings.num_prompts))
    return Workload("custom", own, settings.output_len, shared)


def chosen(settings: BenchConfig, seed: int) -> list[Workload]:
    """The workloads that a configuration asks for."""
    table = SMALL_WORKLOADS if settings.small else WORKLOADS
    if settings.workload == "custom":
        return [custom(settings, seed)]
    if settings.workload == "all":
        return list(table.values())
    return [table[settings.workload]]


def warmup(workload: Workload, requests: int) -> Workload:
    """A short run of the same kind: at most `requests` prompts, at most 64 tokens of each, and 8 new ones."""
    own = tuple(min(length, 64) for length in workload.own_lengths[:requests])
    return replace(workload, own_lengths=own, new=min(workload.new, 8), shared=min(workload.shared, 64))


class TokenSource:
    """Token ids of a text, from which prompts are cut at places that a seed chooses.

    Args:
        token_ids: of the whole text; it is read in a circle.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ConfigError("bench.text: the text has no tokens; expected some text")
        self._ids = list(token_ids)

    def prompts(self, workload: Workload, seed: int, run: int = 0) -> list[list[int]]:
        """One prompt for each length of the workload. Another `run` gives other texts of the same lengths, so that
        nothing which an earlier run left in a prefix cache helps."""
        draw = random.Random(f"{seed}:{run}:{workload.name}")
        shared = self._cut(draw, workload.shared)
        return [shared + self._cut(draw, own) for own in workload.own_lengths]

    def _cut(self, draw: random.Random, count: int) -> list[int]:
        start = draw.randrange(len(self._ids))
        return [self._ids[(start + i) % len(self._ids)] for i in range(count)]


def read_text(file: str | None) -> str:
    """The text of a file, or, without one, the language reference that Python's standard library carries.

    Raises:
        ConfigError: the file cannot be read, or this Python has no such reference.
    """
    if file is not None:
        try:
            return Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"bench.text: cannot read {file!r} as UTF-8 text: {error}") from error
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("bench.text: this Python carries no documentation; name a text file") from error
    return _BETWEEN_SAMPLES.join(topics.values())


def fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """Twelve hexadecimal digits that tell whether two runs had the same prompts."""
    return hashlib.sha256(repr([list(p) for p in prompts]).encode()).hexdigest()[:12]
