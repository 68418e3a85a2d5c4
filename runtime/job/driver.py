"""Rows through the engine into the journal, never more in flight than allowed."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pagefleet.runtime.errors import ErrorCode, PagefleetError
from pagefleet.runtime.job.journal import OK, Journal
from pagefleet.runtime.job.progress import Counts, Progress
from pagefleet.runtime.job.readers import InputError
from pagefleet.runtime.job.results import error_result, good_result
from pagefleet.runtime.job.rows import Row
from pagefleet.runtime.job.signals import Interrupts
from pagefleet.runtime.outputs import OutputError, RequestOutput
from pagefleet.runtime.sampling_params import SamplingParams

_log = logging.getLogger(__name__)
_IDLE_STEPS = 3


class JobEngine(Protocol):
    """What a batch job needs of an engine; `runtime.llm.LLM` is one."""

    @property
    def has_unfinished(self) -> bool:
        """Requests are waiting or running."""

    @property
    def num_unfinished(self) -> int:
        """How many."""

    def submit(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        """Queue a request; a bad prompt raises nothing and comes back from step() with `.error`."""

    def step(self) -> list[RequestOutput]:
        """One step; the requests that finished in it."""

    def abort(self, request_id: str) -> bool:
        """Drop a request; False if there is none of that id."""

    def metrics(self) -> Mapping[str, Any]:
        """Measures under the names of architecture.md."""

    def close(self) -> None:
        """Free what the engine holds."""


class EngineFailure(PagefleetError):
    """The engine broke in a way that no single row explains; the cause is chained."""


class StartFailure(PagefleetError):
    """The engine could not be made. `refused`: on purpose (model, configuration), not by accident."""

    def __init__(self, message: str, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class LazyEngine:
    """Makes the engine when the first row needs it: a job with nothing left to compute loads no model."""

    def __init__(self, factory: Callable[[], JobEngine]) -> None:
        self._factory = factory
        self.engine: JobEngine | None = None

    def get(self) -> JobEngine:
        """The engine.

        Raises:
            StartFailure: it could not be made.
        """
        if self.engine is None:
            try:
                self.engine = self._factory()
            except PagefleetError as error:
                raise StartFailure(str(error), refused=True) from error
            except Exception as error:
                raise StartFailure(f"{type(error).__name__}: {error}", refused=False) from error
        return self.engine

    def metrics(self) -> Mapping[str, Any]:
        """The engine's measures; empty if none was needed."""
        return {} if self.engine is None else self.engine.metrics()

    def close(self) -> None:
        """Close the engine if there is one; what goes wrong is logged, results are safe already."""
        if self.engine is None:
            return
        try:
            self.engine.close()
        except Exception:
            _log.exception("closing the engine failed")
        self.engine = None


@dataclass
class _Pending:
    """A row in the engine; `parts` holds the outputs of its prompts as they finish."""

    row: Row
    parts: list[RequestOutput | None]
    failed: bool = False


class Driver:
    """Runs rows to their results.

    Attributes:
        tokens: prompt, completion and cached tokens of this run.
        num_rows: rows read from the input so far.
        input_error: why reading stopped early, if it did; the rows before it were finished.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        journal: Journal,
        engine: LazyEngine,
        counts: Counts,
        progress: Progress,
        interrupts: Interrupts,
        max_in_flight: int,
    ) -> None:
        self.tokens: Counter[str] = Counter()
        self.num_rows = 0
        self.input_error: InputError | None = None
        self._journal = journal
        self._engine = engine
        self._counts = counts
        self._progress = progress
        self._interrupts = interrupts
        self._max_in_flight = max_in_flight
        self._created = int(journal.header.get("created", 0))
        self._in_flight: dict[str, tuple[_Pending, int]] = {}
        self._requests = self._needed(rows)
        self._exhausted = False
        self._idle = 0

    def run(self) -> None:
        """Until every row has its result, or an interrupt is requested (what runs is then dropped).

        Raises:
            StartFailure, EngineFailure: see there; OSError: the journal could not be written.
        """
        try:
            while not self._interrupts.requested:
                self._feed()
                if self._in_flight and not self._interrupts.requested:
                    self._step()
                elif self._exhausted:
                    return
                self._progress.tick()
                self._journal.tick()
        finally:
            self._drop_rest()

    def _needed(self, rows: Iterable[Row]) -> Iterator[tuple[_Pending, int]]:
        """(row, number of its prompt) for all that the engine has to compute; bad rows are committed on the way."""
        try:
            for row in rows:
                if self._interrupts.requested:
                    return
                self.num_rows = row.index + 1
                self._progress.tick()
                if row.index in self._journal:
                    self._counts.work += row.weight
                    self._counts.work_before += row.weight
                elif row.error is not None:
                    self._commit_error(row, row.error)
                else:
                    pending = _Pending(row, [None] * len(row.prompts))
                    for part in range(len(row.prompts)):
                        if not pending.failed:
                            yield pending, part
        except InputError as error:
            self.input_error = error

    def _feed(self) -> None:
        while len(self._in_flight) < self._max_in_flight and not self._exhausted and not self._interrupts.requested:
            request = next(self._requests, None)
            if request is None:
                self._exhausted = True
                return
            pending, part = request
            row = pending.row
            name = str(row.index) if len(row.prompts) == 1 else f"{row.index}.{part}"
            with self._interrupts.deferred(False):
                engine = self._engine.get()
            try:
                engine.submit(name, row.prompts[part], row.params[part])
            except Exception as error:
                raise EngineFailure(f"the engine failed to take row {row.index}: {_brief(error)}") from error
            row.prompts[part] = {}
            self._in_flight[name] = (pending, part)

    def _step(self) -> None:
        engine = self._engine.get()
        try:
            outputs = engine.step()
        except Exception as error:
            raise EngineFailure(f"the engine failed in a step: {_brief(error)}") from error
        for output in outputs:
            self._take(output)
        self._idle = 0 if outputs or engine.has_unfinished else self._idle + 1
        if self._idle > _IDLE_STEPS and self._in_flight:
            raise EngineFailure(
                f"the engine has nothing left to do but never answered {len(self._in_flight)} requests "
                f"(first: row {next(iter(self._in_flight))})"
            )

    def _take(self, output: RequestOutput) -> None:
        if not output.finished or output.request_id not in self._in_flight:
            return
        pending, part = self._in_flight.pop(output.request_id)
        error = _failure(output)
        if error is not None:
            pending.failed = True
            self._drop(pending)
            self._commit_error(pending.row, error)
            return
        pending.parts[part] = output
        parts = [p for p in pending.parts if p is not None]
        if len(parts) == len(pending.parts):
            self._commit_good(pending.row, parts)

    def _commit_good(self, row: Row, parts: list[RequestOutput]) -> None:
        try:
            result = good_result(row, parts, self._created)
        except Exception as error:
            _log.exception("row %d: the result could not be written down", row.index)
            self._commit_error(row, OutputError(ErrorCode.INTERNAL, f"the result could not be written down: {error}"))
            return
        self._journal.append(row.index, OK, result)
        for part in parts:
            completion = sum(len(o.token_ids) for o in part.outputs)
            self.tokens.update(prompt=len(part.prompt_token_ids), completion=completion, cached=part.num_cached_tokens)
            self._counts.output_tokens += completion
        self._count(row)

    def _commit_error(self, row: Row, error: OutputError) -> None:
        self._journal.append(row.index, ErrorCode(error.code).value, error_result(row, error))
        self._counts.errors += 1
        self._count(row)

    def _count(self, row: Row) -> None:
        self._counts.rows += 1
        self._counts.work += row.weight

    def _drop(self, pending: _Pending) -> None:
        """Abort the other prompts of a row that failed."""
        engine = self._engine.get()
        for name in [n for n, (owner, _) in self._in_flight.items() if owner is pending]:
            engine.abort(name)
            del self._in_flight[name]

    def _drop_rest(self) -> None:
        if self._engine.engine is not None:
            for name in self._in_flight:
                with contextlib.suppress(Exception):
                    self._engine.engine.abort(name)
        self._in_flight.clear()


def _failure(output: RequestOutput) -> OutputError | None:
    if output.error is not None:
        return output.error
    if not output.outputs:
        return OutputError(ErrorCode.INTERNAL, "the engine gave no output and no error for this row")
    if any(o.finish_reason in ("abort", "error") for o in output.outputs):
        return OutputError(ErrorCode.ABORTED, "the engine dropped this row before it was done")
    return None


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"
