"""One job per output: an advisory lock that the kernel releases whatever way the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from pagefleet.runtime.errors import ConfigError


class OutputLock:
    """Holds `<output>.lock` while the job runs.

    Raises (on acquire):
        ConfigError: another job holds it (its pid and host are named), or the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise at once."""
        while self._fd is None:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise ConfigError(
                    f"job.output: cannot write beside it ({self.path}: {error.strerror}); choose a folder that can be "
                    "written"
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 200, 0).decode("utf-8", "replace").strip() or "unknown"
                os.close(fd)
                raise ConfigError(
                    f"job.output: another job is writing it ({holder}); wait for it, stop it, or choose another output"
                ) from None
            except OSError as error:
                os.close(fd)
                raise ConfigError(
                    f"job.output: its file system cannot lock files ({error.strerror}); choose another folder"
                ) from error
            if self._is_current(fd):
                self._fd = fd
            else:  # the holder we waited behind removed the file: lock the new one
                os.close(fd)
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise ConfigError(f"job.output: cannot write {self.path}: {error.strerror}") from error

    def release(self) -> None:
        """Give the lock back and remove its file."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):  # someone removed it; the lock itself goes with the descriptor
            os.unlink(self.path)
        os.close(self._fd)
        self._fd = None

    def _is_current(self, fd: int) -> bool:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        ours = os.fstat(fd)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
