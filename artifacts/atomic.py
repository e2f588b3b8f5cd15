"""Write a file completely or not at all: temporary file in the same folder, fsync, rename."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridspec.errors import EnvironmentMissing

TEMPORARY_SUFFIX = ".hybridspec-tmp"
_FULL = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit is reached",
}


@contextmanager
def _refusals(path: Path, num_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise EnvironmentMissing(
                f"could not write {path} ({num_bytes} bytes): {_FULL[error.errno]}; nothing was "
                "replaced, files that were complete are kept: free some space (or raise the limit) "
                "and run the same command again"
            ) from error
        raise EnvironmentMissing(
            f"could not write {path}: {error.strerror or error}; it needs a folder that this user "
            "may write to: choose another folder or change its permissions"
        ) from error


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, or refuse with `EnvironmentMissing`."""
    with _refusals(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` atomically; a crash leaves the old file or the new one.

    Raises:
        EnvironmentMissing: full disk, quota, file size limit, or a folder that cannot be written.
    """
    # The random part keeps two writers of the same path apart; the last rename wins.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}")
    with _refusals(path, len(data)):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON (sorted keys, no NaN) atomically."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=True, allow_nan=False)
    write_bytes(path, text.encode() + b"\n")


def parquet_bytes(table: pa.Table) -> bytes:
    """Encode a table as Parquet with page checksums, so that damage is seen on reading."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet atomically."""
    write_bytes(path, parquet_bytes(table))


def remove_leftovers(folder: Path) -> list[str]:
    """Delete temporary files that killed writers left; call it only while holding `folder`'s lock.

    Returns:
        the names removed.
    """
    removed = []
    for path in sorted(folder.glob(f".*{TEMPORARY_SUFFIX}")):
        path.unlink(missing_ok=True)
        removed.append(path.name)
    return removed


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
