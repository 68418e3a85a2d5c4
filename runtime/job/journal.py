"""The journal: finished rows in completion order, readable again after a kill at any instant.

One JSON object a line, `{"crc":"xxxxxxxx",...}`: crc is the CRC-32 of the bytes after the comma, up to the newline.
The first line is the header; then rows `{"crc","row","code","result"}` and notes `{"crc","note"}`.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagefleet.runtime.errors import ConfigError
from pagefleet.runtime.job.files import replace_file, write_all
from pagefleet.runtime.job.strict_json import dump_json

OK = "ok"
_PREFIX = re.compile(rb'\{"crc":"([0-9a-f]{8})",')
_PREFIX_LEN = len(b'{"crc":"00000000",')
_ROW = re.compile(rb'"row":(\d+),"code":"([a-z_]+)","result":')


class JournalError(ConfigError):
    """The journal cannot be used as it is; the message says what to do."""


def seal(body: bytes) -> bytes:
    """A journal line from the inside of its JSON object (without braces)."""
    rest = body + b"}"
    return b'{"crc":"%08x",' % zlib.crc32(rest) + rest + b"\n"


def unseal(line: bytes) -> bytes | None:
    """The inside of a journal line; None if the line is torn or damaged."""
    head = _PREFIX.match(line)
    if head is None or not line.endswith(b"}\n"):
        return None
    rest = line[_PREFIX_LEN:-1]
    return rest[:-1] if zlib.crc32(rest) == int(head.group(1), 16) else None


class Journal:
    """An open journal.

    Attributes:
        header: what the job was started with.
        codes: finished rows by result code ("ok" or an error code).
        notes: what was noted beside the rows (later notes win).
        repaired_bytes: length of the torn tail that opening removed.
    """

    def __init__(self, path: Path, fd: int, header: dict[str, Any], fsync_interval_s: float) -> None:
        self.path = path
        self.header = header
        self.codes: Counter[str] = Counter()
        self.notes: dict[str, Any] = {}
        self.repaired_bytes = 0
        self._fd = fd
        self._offsets = array("Q")
        self._end = 0
        self._interval = fsync_interval_s
        self._synced_at = time.monotonic()
        self._dirty = False
        self._reader: Any = None

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any], fsync_interval_s: float) -> Journal:
        """A new journal, its header on disk before it has its name, so a header is never torn."""
        line = seal(dump_json({"journal": dict(header)})[1:-1])
        replace_file(path, line)
        journal = cls(path, os.open(path, os.O_RDWR | os.O_APPEND), dict(header), fsync_interval_s)
        journal._end = len(line)
        return journal

    @classmethod
    def open(cls, path: Path, fsync_interval_s: float) -> Journal:
        """An existing journal; a torn tail is cut off.

        Raises:
            JournalError: it is not a journal, or is damaged before its tail.
        """
        with path.open("rb") as file:
            inside = unseal(file.readline())
            header = _json_object(inside).get("journal") if inside is not None else None
            if not isinstance(header, dict):
                raise JournalError(
                    f"{path} is not a journal of this version; move it away, or start over with job.on_mismatch=restart"
                )
            journal = cls(path, os.open(path, os.O_RDWR | os.O_APPEND), header, fsync_interval_s)
            try:
                journal._scan(file)
            except BaseException:
                journal.close()
                raise
        return journal

    def __len__(self) -> int:
        return sum(self.codes.values())

    def __contains__(self, row: int) -> bool:
        return row < len(self._offsets) and self._offsets[row] != 0

    def append(self, row: int, code: str, result: bytes) -> None:
        """Commit one finished row (`result` is one line of JSON). The row is safe from a kill when this returns.

        Raises:
            OSError: it could not be written; the journal is then as it was before.
        """
        self._write(seal(b'"row":%d,"code":"%s","result":%s' % (row, code.encode(), result)))
        self._mark(row, self._end, code)
        self._end = self._written
        self.tick()

    def note(self, **values: Any) -> None:
        """Write down a fact about the job, synced at once."""
        self._write(seal(dump_json({"note": values})[1:-1]))
        self._end = self._written
        self.notes.update(values)
        self.sync()

    def tick(self) -> None:
        """Sync if the interval has passed."""
        if self._dirty and time.monotonic() - self._synced_at >= self._interval:
            self.sync()

    def sync(self) -> None:
        """Make everything written so far survive a power cut."""
        os.fsync(self._fd)
        self._dirty = False
        self._synced_at = time.monotonic()

    def result(self, row: int) -> bytes:
        """The result of a finished row, as it was given to `append`."""
        if self._reader is None:
            self._reader = self.path.open("rb")
        self._reader.seek(self._offsets[row] - 1)
        inside = unseal(self._reader.readline())
        head = _ROW.match(inside) if inside is not None else None
        if inside is None or head is None or int(head.group(1)) != row:
            raise JournalError(f"{self.path}: row {row} can no longer be read back; is the disk failing?")
        return inside[head.end() :]

    def close(self) -> None:
        """Close the files; nothing is removed."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, line: bytes) -> None:
        try:
            write_all(self._fd, line)
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._written = self._end + len(line)
        self._dirty = True

    def _mark(self, row: int, offset: int, code: str) -> None:
        if row in self:
            return
        missing = row + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.frombytes(bytes(8 * missing))
        self._offsets[row] = offset + 1
        self.codes[code] += 1

    def _scan(self, file: Any) -> None:
        offset = file.tell()
        bad_line = bad_offset = 0
        for number, line in enumerate(iter(file.readline, b""), start=2):
            inside = unseal(line)
            if inside is None:
                bad_line, bad_offset = (bad_line, bad_offset) if bad_line else (number, offset)
            elif bad_line:
                raise JournalError(
                    f"{self.path} is damaged at line {bad_line}, before its end. Rows are independent lines: copy the "
                    f"file, delete line {bad_line} (its row is computed again) and run again, or start over with "
                    "job.on_mismatch=restart"
                )
            else:
                self._take(inside, offset)
            offset += len(line)
        self._end = offset
        if bad_line:
            self.repaired_bytes = offset - bad_offset
            os.ftruncate(self._fd, bad_offset)
            os.fsync(self._fd)
            self._end = bad_offset

    def _take(self, inside: bytes, offset: int) -> None:
        row = _ROW.match(inside)
        if row is not None:
            self._mark(int(row.group(1)), offset, row.group(2).decode())
            return
        note = _json_object(inside).get("note")
        if isinstance(note, dict):
            self.notes.update(note)


def _json_object(inside: bytes) -> dict[str, Any]:
    value = json.loads(b"{" + inside + b"}")
    return value if isinstance(value, dict) else {}
