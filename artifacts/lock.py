"""One writer a folder: an advisory lock that the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hybridspec.artifacts.atomic import make_folder
from hybridspec.errors import EnvironmentMissing

LOCK_NAME = ".lock"


class FolderLock:
    """Exclusive lock of a folder, as a context manager.

    Args:
        folder: created when missing.
        wait: wait for the other writer; otherwise refuse at once.
    """

    def __init__(self, folder: Path, *, wait: bool) -> None:
        make_folder(folder)
        path = folder / LOCK_NAME
        try:
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
        except OSError as error:
            raise EnvironmentMissing(
                f"could not open {path}: {error.strerror or error}; writing needs a lock file "
                "there: choose a folder that this user may write to"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(self._descriptor)
            self._descriptor = -1
            if isinstance(error, BlockingIOError):
                raise EnvironmentMissing(
                    f"{folder} is being written by another process; one writer a folder is "
                    "allowed: wait for it to end or choose another folder"
                ) from error
            raise EnvironmentMissing(
                f"could not lock {path}: {error.strerror or error}; the file system must support "
                "locks: choose a folder on a local disk"
            ) from error

    def release(self) -> None:
        """Let the next writer in. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
