"""Where a job stands when it is started: new, to be resumed, finished, or refused."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagefleet.runtime.errors import ConfigError
from pagefleet.runtime.job.assemble import check_name
from pagefleet.runtime.job.files import digest_file, sync_folder
from pagefleet.runtime.job.fingerprint import differences
from pagefleet.runtime.job.journal import Journal, JournalError


@dataclass(frozen=True)
class JobPaths:
    """The files of a job; all lie beside the output."""

    output: Path

    def _beside(self, suffix: str) -> Path:
        return self.output.with_name(self.output.name + suffix)

    @property
    def journal(self) -> Path:
        """Finished rows, while the job is not."""
        return self._beside(".journal")

    @property
    def lock(self) -> Path:
        """Held while a job runs."""
        return self._beside(".lock")

    @property
    def summary(self) -> Path:
        """What the finished job measured."""
        return self._beside(".summary.json")

    @property
    def temporary(self) -> Path:
        """The output before it has its name."""
        return self._beside(".tmp")

    @property
    def log(self) -> Path:
        """Traceback of an unexpected failure."""
        return self._beside(".error.log")


@dataclass
class Opening:
    """Exactly one is set: `journal` of a job to run (new or resumed), or the `summary` of a finished one."""

    journal: Journal | None = None
    summary: dict[str, Any] | None = None


def prepare_output(pattern: str, output: str, inputs: Sequence[Path]) -> JobPaths:
    """Check job.output against the inputs and make its folder.

    Raises:
        ConfigError: no name, a folder, one of the inputs, where the next run would read it, or not writable.
    """
    if not output:
        raise ConfigError("job.output: expected a file, got nothing; set job.output=FILE")
    paths = JobPaths(Path(output))
    if paths.output.is_dir():
        raise ConfigError(f"job.output: {output} is a folder; give a file name")
    check_name(paths.output)
    ours = {os.path.realpath(p) for p in (paths.output, paths.journal, paths.summary, paths.temporary)}
    for path in inputs:
        if os.path.realpath(path) in ours or (paths.output.exists() and os.path.samefile(path, paths.output)):
            raise ConfigError(f"job.output: {output} is also an input; choose another file")
    if _would_be_read(pattern, paths.output):
        raise ConfigError(f"job.output: {output} lies where job.input={pattern} looks for rows; choose another folder")
    try:
        paths.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"job.output: cannot make the folder {paths.output.parent}: {error.strerror}") from error
    return paths


def open_job(paths: JobPaths, fingerprint: Mapping[str, Any], on_mismatch: str, fsync_interval_s: float) -> Opening:
    """Decide from what lies beside the output; the lock is held.

    Raises:
        ConfigError: what is there belongs to something else, and job.on_mismatch is not "restart".
    """
    restart = on_mismatch == "restart"
    if paths.journal.exists():
        opening = _from_journal(paths, fingerprint, restart, fsync_interval_s)
        if opening is not None:
            return opening
    summary = _read_summary(paths.summary)
    if paths.output.exists():
        reason = _foreign(paths, summary, fingerprint)
        if reason is None:
            return Opening(summary=summary)
        if not restart:
            raise ConfigError(
                f"job.output: {paths.output} exists and {reason}; choose another output, move it away, or replace it "
                "with job.on_mismatch=restart"
            )
    header = {
        "job": secrets.token_hex(8),
        "created": int(time.time()),
        "replaces": paths.output.exists(),
        "fingerprint": dict(fingerprint),
    }
    try:
        return Opening(journal=Journal.create(paths.journal, header, fsync_interval_s))
    except OSError as error:
        raise ConfigError(f"job.output: cannot write {paths.journal}: {error.strerror}") from error


def remove_journal(paths: JobPaths) -> None:
    """The last act of a job."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.journal)
    sync_folder(paths.journal.parent)


def is_our_output(paths: JobPaths, journal: Journal) -> bool:
    """True if the output at its place is the one this journal was assembled into."""
    made = journal.notes.get("assembled")
    return made is not None and paths.output.exists() and list(digest_file(paths.output)) == made


def _from_journal(
    paths: JobPaths, fingerprint: Mapping[str, Any], restart: bool, fsync_interval_s: float
) -> Opening | None:
    """The opening that the journal asks for; None if it is set aside for a restart."""
    try:
        journal = Journal.open(paths.journal, fsync_interval_s)
    except JournalError:
        if restart:
            remove_journal(paths)
            return None
        raise
    except OSError as error:
        raise ConfigError(f"job.output: cannot open {paths.journal}: {error.strerror}") from error
    changes = differences(journal.header.get("fingerprint"), fingerprint)
    if "mixed" in journal.notes:
        changes.append(f"{journal.notes['mixed']} changed while the unfinished job read it")
    if not changes and paths.output.exists() and not journal.header.get("replaces"):
        if not is_our_output(paths, journal):
            changes = [f"{paths.output} appeared, and this job did not write it"]
        else:
            summary = _read_summary(paths.summary)
            if summary is not None and summary.get("job") == journal.header.get("job"):
                journal.close()
                remove_journal(paths)
                return Opening(summary=summary)
    if not changes:
        return Opening(journal=journal)
    journal.close()
    if restart:
        remove_journal(paths)
        return None
    raise ConfigError(
        f"an unfinished job lies at {paths.journal} ({len(journal)} rows done) and this one differs: "
        f"{'; '.join(changes)}. "
        "Run it as it was to resume, choose another output, or start over with job.on_mismatch=restart"
    )


def _foreign(paths: JobPaths, summary: dict[str, Any] | None, fingerprint: Mapping[str, Any]) -> str | None:
    """Why the output is not the finished result of this very job; None if it is."""
    if summary is None:
        return "no job summary says what it is"
    changes = differences(summary.get("fingerprint"), fingerprint)
    if changes:
        return f"is the result of another job: {'; '.join(changes)}"
    made = summary.get("output") or {}
    if digest_file(paths.output) != (made.get("bytes"), made.get("sha256")):
        return "was changed since the job wrote it"
    return None


def _read_summary(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and "fingerprint" in value else None


def _would_be_read(pattern: str, output: Path) -> bool:
    place = os.path.realpath(output)
    if os.path.isdir(pattern):
        return os.path.dirname(place) == os.path.realpath(pattern)
    if os.path.exists(pattern):
        return False
    flat = os.path.abspath(pattern).replace("**/", "*")
    same_depth = "**" in pattern or os.path.abspath(pattern).count(os.sep) == os.path.abspath(output).count(os.sep)
    return same_depth and fnmatch.fnmatch(os.path.abspath(output), flat)
