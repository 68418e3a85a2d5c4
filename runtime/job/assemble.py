"""The ordered output file from the results, in the format its name asks for."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from pagefleet.runtime.errors import ConfigError
from pagefleet.runtime.job.files import digest_file, sync_file
from pagefleet.runtime.job.readers import SUFFIXES

_PARQUET_BATCH = 1000


def check_name(path: Path) -> None:
    """Raise ConfigError unless the output's name ends in a known suffix."""
    if not path.name.endswith(SUFFIXES):
        raise ConfigError(f"job.output: expected a name that ends in {', '.join(SUFFIXES)}, got {path.name!r}")


def write_output(temporary: Path, name: str, results: Iterable[bytes]) -> tuple[int, str]:
    """Write every result to `temporary` in the format of `name`, synced; returns its (bytes, SHA-256).

    Raises:
        OSError: it could not be written; `temporary` is then removed.
    """
    write: Callable[[Path, Iterable[bytes]], None] = _write_lines(name)
    if name.endswith(".parquet"):
        write = _write_parquet
    try:
        write(temporary, results)
        sync_file(temporary)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return digest_file(temporary)


def _write_lines(name: str) -> Callable[[Path, Iterable[bytes]], None]:
    def write(temporary: Path, results: Iterable[bytes]) -> None:
        with temporary.open("wb") as raw, _compressor(name, raw) as file:
            for line in results:
                file.write(line)
                file.write(b"\n")

    return write


@contextlib.contextmanager
def _compressor(name: str, raw: IO[bytes]) -> Iterator[Any]:
    if name.endswith(".gz"):
        with (
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as packed,
            io.BufferedWriter(packed, 1 << 16) as file,  # type: ignore[arg-type]
        ):
            yield file
    elif name.endswith(".zst"):
        import zstandard

        with zstandard.ZstdCompressor(level=6, write_checksum=True).stream_writer(raw, closefd=False) as file:
            yield file
    else:
        yield raw


def _write_parquet(temporary: Path, results: Iterable[bytes]) -> None:
    """Columns of both forms, null where a row has the other form; parts without a fixed shape are JSON text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(pa)
    batch: list[dict[str, Any]] = []
    with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for line in results:
            batch.append(_flat(json.loads(line)))
            if len(batch) == _PARQUET_BATCH:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                batch.clear()
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))


def _schema(pa: Any) -> Any:
    details = pa.struct({"cached_tokens": pa.int64()})
    usage = {name: pa.int64() for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    output = {
        "index": pa.int64(),
        "text": pa.string(),
        "token_ids": pa.list_(pa.int64()),
        "finish_reason": pa.string(),
        "stop_reason": pa.string(),
        "cumulative_logprob": pa.float64(),
        "logprobs": pa.string(),
    }
    response = {"status_code": pa.int64(), "request_id": pa.string(), "body": pa.string()}
    return pa.schema(
        {
            "id": pa.string(),
            "custom_id": pa.string(),
            "index": pa.int64(),
            "outputs": pa.list_(pa.struct(output)),
            "usage": pa.struct({**usage, "prompt_tokens_details": details}),
            "prompt_logprobs": pa.string(),
            "response": pa.struct(response),
            "error": pa.struct({"code": pa.string(), "message": pa.string()}),
        }
    )


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    row["id"] = str(row["id"])
    for output in row.get("outputs") or ():
        output["stop_reason"] = None if output["stop_reason"] is None else str(output["stop_reason"])
        if output.get("logprobs") is not None:
            output["logprobs"] = json.dumps(output["logprobs"])
    if row.get("prompt_logprobs") is not None:
        row["prompt_logprobs"] = json.dumps(row["prompt_logprobs"])
    if row.get("response") is not None:
        row["response"]["body"] = json.dumps(row["response"]["body"], ensure_ascii=False)
    return row
