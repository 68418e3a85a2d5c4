"""run_job: a batch job from its configuration to its exit code."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from pagefleet.runtime.config import Config
from pagefleet.runtime.config import result_shaping as config_shaping
from pagefleet.runtime.errors import ConfigError, PagefleetError, RequestError
from pagefleet.runtime.job import fields
from pagefleet.runtime.job.assemble import write_output
from pagefleet.runtime.job.driver import Driver, JobEngine, LazyEngine, StartFailure
from pagefleet.runtime.job.files import publish
from pagefleet.runtime.job.fingerprint import fingerprint
from pagefleet.runtime.job.journal import OK, Journal
from pagefleet.runtime.job.lock import OutputLock
from pagefleet.runtime.job.opening import JobPaths, is_our_output, open_job, prepare_output, remove_journal
from pagefleet.runtime.job.progress import Counts, make_progress, say
from pagefleet.runtime.job.readers import InputError, InputFile, RawRow, find_inputs, inspect, read_rows
from pagefleet.runtime.job.report import make_summary, summary_text, write_summary
from pagefleet.runtime.job.rows import Form, Row, RowParser, detect_form, model_names
from pagefleet.runtime.job.signals import EXIT_INTERRUPTED, Interrupts
from pagefleet.runtime.job.strict_json import parse_json

__all__ = ["JobEngine", "run_job"]

EXIT_GOOD, EXIT_FAILED, EXIT_REFUSED, EXIT_SOME_ERRORS = 0, 1, 2, 3
_FORM_PROBE_ROWS = 1000
_RESUME = "run the same command again to resume"
_log = logging.getLogger(__name__)


def run_job(
    config: Config,
    llm_factory: Callable[[], JobEngine],
    *,
    result_shaping: Mapping[str, Any] | None = None,
    served_names: Sequence[str] = (),
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> int:
    """Run, resume or recognise as finished the batch job of `config.job`.

    Args:
        llm_factory: makes the engine; called only when a row is left to compute.
        result_shaping: JSON-able values that results depend on; a resume with other values is refused. Default:
            `config.result_shaping`.
        served_names: further names that rows may give as `model`.
        stdout, stderr: where the summary, and everything else, is shown.

    Returns:
        The exit code: 0 all rows good, 3 some rows are errors, 2 refused before start, 130 interrupted, 1 stopped by
        anything else. After 130 and 1 every finished row is in the journal and the same command resumes.
    """
    stderr = stderr or sys.stderr
    shaping = config_shaping(config) if result_shaping is None else result_shaping
    with Interrupts() as interrupts:
        job = _Job(config, llm_factory, shaping, served_names, interrupts, stdout or sys.stdout, stderr)
        try:
            return job.run()
        except (ConfigError, InputError) as error:
            say(f"refused: {error}", stderr)
            return EXIT_REFUSED
        except KeyboardInterrupt:
            say(f"interrupted before any row was computed; {_RESUME}", stderr)
            return EXIT_INTERRUPTED


class _Job:
    def __init__(
        self,
        config: Config,
        llm_factory: Callable[[], JobEngine],
        shaping: Mapping[str, Any],
        served_names: Sequence[str],
        interrupts: Interrupts,
        stdout: TextIO,
        stderr: TextIO,
    ) -> None:
        self._config = config
        self._job = config.job
        self._engine = LazyEngine(llm_factory)
        self._shaping = shaping
        self._models = model_names(config.model.path, served_names)
        self._interrupts = interrupts
        self._stdout = stdout
        self._stderr = stderr
        self._started = time.monotonic()
        self._tokens: Counter[str] = Counter()
        self._say: Callable[[str], None] = lambda text: say(text, stderr)

    def run(self) -> int:
        _check(self._config)
        found = find_inputs(self._job.input)
        paths = prepare_output(self._job.input, self._job.output, found)
        lock = OutputLock(paths.lock)
        lock.acquire()
        try:
            files = [inspect(path) for path in found]
            opening = open_job(
                paths, fingerprint(files, self._shaping), self._job.on_mismatch, self._job.fsync_interval_s
            )
            if opening.summary is not None:
                return self._already_finished(paths, opening.summary)
            assert opening.journal is not None
            with contextlib.closing(opening.journal) as journal, self._interrupts.deferred():
                return self._run_open(paths, files, journal)
        finally:
            self._engine.close()
            lock.release()

    def _already_finished(self, paths: JobPaths, summary: Mapping[str, Any]) -> int:
        self._say(f"{paths.output} is finished already: same input, same settings; nothing to compute")
        return EXIT_SOME_ERRORS if summary["rows"]["error"] else EXIT_GOOD

    def _run_open(self, paths: JobPaths, files: Sequence[InputFile], journal: Journal) -> int:
        """Compute what is missing, then finish; turns whatever goes wrong into an exit code and a message."""
        resumed = len(journal)
        if journal.repaired_bytes:
            self._say(f"repaired the journal: a torn last line of {journal.repaired_bytes} bytes was removed")
        if resumed:
            self._say(f"resuming: {resumed} rows are done already")
        try:
            if journal.notes.get("rows") is None:
                self._compute(files, journal)
            return self._finish(paths, journal, resumed)
        except KeyboardInterrupt:
            return self._stopped(journal, "interrupted", EXIT_INTERRUPTED)
        except StartFailure as error:
            _log.debug("the engine could not be made", exc_info=True)
            if error.refused:
                if resumed == 0:
                    remove_journal(paths)
                self._say(f"refused: {error}")
                return EXIT_REFUSED
            return self._failed(paths, journal, f"the engine could not be started: {error}")
        except OSError as error:
            return self._stopped(journal, f"cannot write ({error.strerror or error})", EXIT_FAILED)
        except InputError as error:
            return self._stopped(journal, str(error), EXIT_FAILED)
        except Exception as error:
            text = str(error) if isinstance(error, PagefleetError) else f"{type(error).__name__}: {error}"
            return self._failed(paths, journal, text)

    def _compute(self, files: Sequence[InputFile], journal: Journal) -> None:
        counts = _counts(files, journal)
        progress = make_progress(self._job.progress, self._stderr, counts, self._engine.metrics)
        rows = self._rows(files, journal)
        driver = Driver(rows, journal, self._engine, counts, progress, self._interrupts, self._job.max_in_flight)
        progress.start()
        try:
            driver.run()
        finally:
            progress.stop()
        self._tokens = driver.tokens
        self._interrupts.check()
        if driver.input_error is not None:
            raise driver.input_error
        _refuse_changed(files, journal)
        if len(journal) != driver.num_rows:
            raise PagefleetError(f"{driver.num_rows} rows were read but {len(journal)} have results")
        journal.note(rows=driver.num_rows)

    def _rows(self, files: Sequence[InputFile], journal: Journal) -> Iterator[Row]:
        parser = RowParser(self._models, _defaults(self._config), self._config.seed, _first_form(files))
        return (parser.parse(raw, index, index in journal) for index, raw in enumerate(_raw_rows(files)))

    def _finish(self, paths: JobPaths, journal: Journal, resumed: int) -> int:
        """Ordered output, summary, and only then the end of the journal."""
        if is_our_output(paths, journal):
            made = tuple(journal.notes["assembled"])
        else:
            made = write_output(paths.temporary, paths.output.name, self._ordered(journal))
            journal.note(assembled=list(made))
            publish(paths.temporary, paths.output)
        wall_time = time.monotonic() - self._started
        summary = make_summary(journal, paths.output, made, resumed, wall_time, self._tokens, self._engine.metrics())
        write_summary(paths.summary, summary)
        remove_journal(paths)
        say(summary_text(summary, paths.output), self._stdout)
        return EXIT_GOOD if journal.codes[OK] == len(journal) else EXIT_SOME_ERRORS

    def _ordered(self, journal: Journal) -> Iterator[bytes]:
        for index in range(journal.notes["rows"]):
            self._interrupts.check()
            yield journal.result(index)

    def _stopped(self, journal: Journal, why: str, code: int) -> int:
        with contextlib.suppress(OSError):
            journal.sync()
        self._say(f"stopped: {why}. {len(journal)} finished rows are safe in {journal.path}; {_RESUME}")
        return code

    def _failed(self, paths: JobPaths, journal: Journal, why: str) -> int:
        """A failure nobody planned: the traceback goes to a file, the person gets a sentence."""
        with contextlib.suppress(OSError):
            paths.log.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
            why = f"{why} (details: {paths.log})"
        return self._stopped(journal, why, EXIT_FAILED)


def _check(config: Config) -> None:
    """Values that the job itself depends on, before anything is touched."""
    config.job.__post_init__()  # again: fields may have been set since
    _defaults(config)


def _defaults(config: Config) -> dict[str, Any]:
    try:
        given = dict(config.job.defaults)
        fields.refuse_unknown(given, fields.SIMPLE - {"id", "prompt", "prompt_token_ids", "messages", "model"})
        values = fields.sampling(given)
        fields.build(values)
    except RequestError as error:
        raise ConfigError(f"job.defaults: {error.message}") from error
    return values


def _refuse_changed(files: Sequence[InputFile], journal: Journal) -> None:
    for file in files:
        if file.unchanged():
            continue
        if not file.only_grew():
            journal.note(mixed=file.path.name)
            raise InputError(f"{file.path} changed while the job ran, so results may be of two versions of it")
        raise InputError(f"{file.path} got more lines while the job ran; cut it back to {file.size} bytes")


def _raw_rows(files: Sequence[InputFile]) -> Iterator[RawRow]:
    return itertools.chain.from_iterable(read_rows(file) for file in files)


def _first_form(files: Sequence[InputFile]) -> Form:
    """Form of the first row that is an object: error rows of unreadable lines take it."""
    with contextlib.suppress(InputError):
        for raw in itertools.islice(_raw_rows(files), _FORM_PROBE_ROWS):
            with contextlib.suppress(RequestError):
                value = parse_json(raw.data) if isinstance(raw.data, bytes) else raw.data
                if isinstance(value, Mapping):
                    return detect_form(value)
    return Form.SIMPLE


def _counts(files: Sequence[InputFile], journal: Journal) -> Counts:
    done = len(journal)
    return Counts(
        rows_total=sum(file.rows for file in files),
        work_total=sum(file.weight for file in files),
        rows=done,
        rows_before=done,
        errors=done - journal.codes[OK],
    )
