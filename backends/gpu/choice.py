"""Several ways to do one operation, best first; one that does not compile here gives way to the next, aloud."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from triton.errors import TritonError

from ..base import BackendError

logger = logging.getLogger(__name__)


class Choice:
    """Calls the first way that works. `name` is its name, for the doctor, the log and the summary."""

    def __init__(self, operation: str, arch: str, ways: Sequence[tuple[str, Callable[..., Any]]]) -> None:
        self._operation, self._arch, self._ways = operation, arch, list(ways)

    @property
    def name(self) -> str:
        """Of the way that is taken."""
        return self._ways[0][0]

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Do it.

        Raises:
            BackendError: not even the last way compiles.
        """
        while True:
            try:
                return self._ways[0][1](*args, **options)
            except TritonError as error:
                self._give_up(error)

    def _give_up(self, error: TritonError) -> None:
        failed = self._ways.pop(0)[0]
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = f"{self._operation}: {failed} does not compile on {self._arch} ({lines[-1] if lines else type(error)})"
        if not self._ways:
            raise BackendError(f"{what}, and there is no other way; please report this") from error
        logger.warning("%s; %s runs instead", what, self._ways[0][0])
