"""Input files to raw rows, streaming: JSONL (plain, gzip, zstd) and Parquet, a file, a folder or a glob."""

from __future__ import annotations

import glob
import gzip
import io
import math
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pagefleet.runtime.errors import ConfigError, PagefleetError
from pagefleet.runtime.job.files import digest_file

JSONL_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = (*(s + c for s in JSONL_SUFFIXES for c in ("", ".gz", ".zst")), ".parquet")
MAX_LINE_BYTES = 64 << 20
_CHUNK = 1 << 20


class InputError(PagefleetError):
    """An input file cannot be read to its end."""


@dataclass(frozen=True)
class RawRow:
    """One row as it lies in its file.

    Attributes:
        data: the line (stripped; a line over MAX_LINE_BYTES is None), or the row of a Parquet file without nulls.
        where: file name and line (Parquet: row), from 1.
        weight: bytes of the row, the measure of work remaining.
    """

    data: bytes | Mapping[str, Any] | None
    where: str
    weight: float


@dataclass(frozen=True)
class InputFile:
    """A file as it was when the job started: identity for the fingerprint, totals for the progress bar."""

    path: Path
    size: int
    sha256: str
    mtime_ns: int
    rows: int
    weight: float

    def unchanged(self) -> bool:
        """False if the file's content is another one since."""
        try:
            now = self.path.stat()
            return (now.st_size, now.st_mtime_ns) == (self.size, self.mtime_ns) or digest_file(self.path) == (
                self.size,
                self.sha256,
            )
        except OSError:
            return False

    def only_grew(self) -> bool:
        """True if lines were added at the end and nothing else; `read_rows` leaves those out."""
        try:
            return _is_plain(self.path) and digest_file(self.path, self.size) == (self.size, self.sha256)
        except OSError:
            return False


def find_inputs(pattern: str) -> list[Path]:
    """Files that `job.input` names, sorted: one file, the rows files of a folder (not below it), or a glob.

    Raises:
        ConfigError: nothing is there, or a file is of no known kind.
    """
    kinds = ", ".join(SUFFIXES)
    if not pattern:
        raise ConfigError("job.input: expected a file, a folder or a glob, got nothing; set job.input=FILE")
    path = Path(pattern)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file() and _known(p))
        if not found:
            raise ConfigError(f"job.input: the folder {path} holds no file of a known kind ({kinds})")
        return found
    if path.exists():
        found = [path]
    else:
        found = sorted(Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
    if not found:
        raise ConfigError(f"job.input: {pattern} does not exist (from {os.getcwd()})")
    for file in found:
        if not _known(file):
            raise ConfigError(f"job.input: {file} is of no known kind; expected a name that ends in {kinds}")
    return found


def inspect(path: Path) -> InputFile:
    """Read a file once from end to end: digest, totals, and whether it can be read at all.

    Raises:
        InputError: it is truncated or damaged, or cannot be opened.
    """
    try:
        before = path.stat()
        size, sha256 = digest_file(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    rows, weight = _parquet_totals(path) if path.suffix == ".parquet" else _jsonl_totals(path)
    return InputFile(path, size, sha256, before.st_mtime_ns, rows, weight)


def read_rows(file: InputFile) -> Iterator[RawRow]:
    """Rows of one file in order; blank lines are skipped, and so is what was added to a plain file since `inspect`.

    Raises:
        InputError: the file cannot be read further; the rows before were good.
    """
    if file.path.suffix == ".parquet":
        return _read_parquet(file.path)
    return _read_jsonl(file.path, file.size if _is_plain(file.path) else None)


def _known(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and not path.name.startswith(".")


def _is_plain(path: Path) -> bool:
    return path.suffix in JSONL_SUFFIXES


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"), _CHUNK)  # type: ignore[type-var, return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdStream(path), _CHUNK)
    return path.open("rb", buffering=_CHUNK)


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of a .zst file of one or more frames; unlike the library's reader it notices a missing end."""

    def __init__(self, path: Path) -> None:
        import zstandard

        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._file = path.open("rb")
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = data or self._file.read(1 << 14)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the compressed data ends before its end marker")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._decompressor.decompressobj()
            self._ready = self._frame.decompress(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _decode_errors() -> tuple[type[BaseException], ...]:
    errors: tuple[type[BaseException], ...] = (OSError, EOFError, zlib.error)
    try:
        import zstandard
    except ImportError:
        return errors
    return (*errors, zstandard.ZstdError)


def _unreadable(path: Path, error: BaseException, where: str) -> InputError:
    return InputError(f"{path} is truncated or damaged {where}: {error}; repair or replace the file")


def _jsonl_totals(path: Path) -> tuple[int, float]:
    if path.suffix not in (".gz", ".zst") and path.stat().st_size == 0:
        return 0, 0.0
    rows, size, last = 0, 0, b"\n"
    try:
        with _open(path) as file:
            while chunk := file.read(_CHUNK):
                rows += chunk.count(b"\n")
                size += len(chunk)
                last = chunk[-1:]
    except _decode_errors() as error:
        raise _unreadable(path, error, f"after {size} bytes of rows") from error
    return rows + (last != b"\n"), float(size)


def _read_jsonl(path: Path, size: int | None) -> Iterator[RawRow]:
    number = 0
    left = size if size is not None else sys.maxsize
    try:
        with _open(path) as file:
            while line := file.readline(min(MAX_LINE_BYTES + 1, left)):
                number += 1
                weight = len(line)
                whole: bytes | None = line
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line, whole = file.readline(min(MAX_LINE_BYTES + 1, left - weight)), None
                    weight += len(line)
                left -= weight
                if number == 1 and whole is not None:
                    whole = whole.removeprefix(b"\xef\xbb\xbf")
                if whole is not None:
                    whole = whole.strip(b" \t\r\n")
                    if not whole:
                        continue
                yield RawRow(whole, f"{path.name} line {number}", weight)
    except _decode_errors() as error:
        raise _unreadable(path, error, f"after line {number}") from error


def _parquet_totals(path: Path) -> tuple[int, float]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            meta = file.metadata
            weight = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            return meta.num_rows, float(weight)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error, "(its footer)") from error


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, weight = _parquet_totals(path)
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(_without_nulls(row), f"{path.name} row {number}", weight / max(rows, 1))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error, f"after row {number}") from error


def _without_nulls(value: Any) -> Any:
    """Parquet has every column in every row: null and NaN mean absent; a map column becomes a mapping."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if not _is_null(v)}
    if isinstance(value, list):
        if value and all(isinstance(v, tuple) and len(v) == 2 for v in value):
            return {k: _without_nulls(v) for k, v in value if not _is_null(v)}
        return [_without_nulls(v) for v in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)  # a column of integers with gaps arrives as doubles
    return value


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
