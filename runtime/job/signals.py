"""Ctrl-C and SIGTERM: the first ends the job cleanly, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Handlers for the length of a `with` block (in the main thread; elsewhere signals are left alone).

    Attributes:
        requested: a signal came inside a `deferred` block; whoever runs there ends at the next safe point.

    Outside a `deferred` block a signal raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self, yes: bool = True) -> Iterator[None]:
        """Signals are remembered (or, with `yes` false, raise again) inside the block."""
        before, self._deferred = self._deferred, yes
        try:
            yield
        finally:
            self._deferred = before

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came."""
        if self.requested:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._deferred:
            raise KeyboardInterrupt
        if self.requested:
            os._exit(EXIT_INTERRUPTED)  # the journal is whole at every instant
        self.requested = True
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this step; once more to stop at once\n")
