"""Writing files so that a kill or a full disk leaves either the old or the new, never a half."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

_CHUNK = 1 << 20


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, or raise OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` atomically and durably (temporary file, fsync, rename, fsync of the folder)."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    publish(temporary, path)


def publish(temporary: Path, path: Path) -> None:
    """Rename a complete, synced file to its name, durably."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive a power cut, where the file system knows how."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """fsync a closed file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def digest_file(path: Path, limit: int | None = None) -> tuple[int, str]:
    """(bytes, SHA-256 in hex) of a file, or of its first `limit` bytes."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK if limit is None else min(_CHUNK, limit - size)):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
