"""Files of a bundle folder: encode, replace under a lock, read back with every digest checked."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hybridspec.artifacts.atomic import (
    make_folder,
    parquet_bytes,
    remove_leftovers,
    write_bytes,
    write_json,
)
from hybridspec.artifacts.digest import bytes_digest, table_digest
from hybridspec.artifacts.lock import FolderLock
from hybridspec.artifacts.manifest import PART_NAMES, FileEntry, Manifest, parse_manifest
from hybridspec.artifacts.schemas import check_table, schema_id
from hybridspec.errors import BundleError, EnvironmentMissing

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
MAX_TABLE_BYTES = 1 << 30


@dataclass(frozen=True)
class Payload:
    """A file to be written: its manifest entry and its bytes."""

    entry: FileEntry
    data: bytes


def encode(part: str, name: str, table: pa.Table) -> Payload:
    """Encode a checked table as the file `name` of `part`.

    The digest of the bytes is part of the file's name: a new version never overwrites a file that
    the manifest in place refers to.
    """
    data = parquet_bytes(table)
    sha256 = bytes_digest(data)
    entry = FileEntry(
        name=name,
        path=f"{part}/{name}-{sha256[:16]}.parquet",
        sha256=sha256,
        digest=table_digest(table),
        num_bytes=len(data),
        rows=table.num_rows,
        schema_id=schema_id(table.schema),
    )
    return Payload(entry, data)


def read_file(path: Path, *, max_bytes: int, remedy: str = "check the path") -> bytes:
    """Read a regular file of limited size without following a link.

    Args:
        path: the file.
        max_bytes: largest size allowed.
        remedy: what to do when it is missing.

    Raises:
        BundleError: missing, a link or another special file, unreadable, or too large.
    """
    try:
        # O_NONBLOCK: opening a pipe that stands in for the file must not wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BundleError(f"{path} is not a regular file: copy it again")
            if status.st_size > max_bytes:
                raise BundleError(
                    f"{path} has {status.st_size} bytes; at most {max_bytes} are allowed: "
                    "it is damaged; fetch or make it again"
                )
            return file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise BundleError(f"{path} does not exist, but is needed: {remedy}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BundleError(
            f"{path} cannot be read ({reason}); it must be a regular file, no link: copy it again"
        ) from error


def read_manifest(folder: Path) -> bytes:
    """The manifest's bytes."""
    remedy = (
        "check the path, or make a bundle with `hybridspec calibrate` and `hybridspec "
        "profile-latency`"
    )
    try:
        return read_file(folder / MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES, remedy=remedy)
    except BundleError as error:
        # Of the file that was named, not of a manifest below it that cannot be there.
        if isinstance(error.__cause__, NotADirectoryError) and folder.exists():
            raise BundleError(
                f"{folder} is a file; a bundle is a folder: {_folder_instead(folder)}"
            ) from error
        raise


def _folder_instead(file: Path) -> str:
    """What to name instead of a file that was named as a bundle."""
    for parent in file.absolute().parents[:2]:
        if (parent / MANIFEST_NAME).is_file():
            return f"name the one that it lies in, {parent}"
    return (
        f"name the folder that holds its {MANIFEST_NAME}; an archive is unpacked by `hybridspec "
        "bundle import` first"
    )


def decode_table(data: bytes, *, path: object) -> pa.Table:
    """Decode Parquet bytes.

    Raises:
        BundleError: whatever Arrow makes of damaged bytes.
    """
    try:
        # Not Arrow's thread pool: a process that has imported torch and ends soon after a threaded
        # read aborts in about half of the runs (its exit code is then 134).
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        return file.read(use_threads=False)
    # Damaged bytes make Arrow raise a dozen types (decoding, memory, encryption, Unicode).
    except Exception as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BundleError(
            f"{path} is not a readable Parquet file ({detail}): it is damaged; fetch or make "
            "it again"
        ) from error


def read_table(folder: Path, entry: FileEntry, schema: pa.Schema) -> pa.Table:
    """Read one file of a bundle and check it against its manifest entry and schema."""
    path = folder / entry.path
    for parent in path.relative_to(folder).parents[:-1]:
        if (folder / parent).is_symlink():
            raise BundleError(
                f"{folder / parent} is a link; a bundle holds plain folders: copy the bundle again"
            )
    remedy = "the bundle is incomplete; fetch or make it again"
    data = read_file(path, max_bytes=MAX_TABLE_BYTES, remedy=remedy)
    found = bytes_digest(data)
    if len(data) != entry.num_bytes or found != entry.sha256:
        raise BundleError(
            f"{path} has {len(data)} bytes and sha256 {found[:12]}; the manifest says "
            f"{entry.num_bytes} bytes and {entry.sha256[:12]}: the file is damaged; fetch or "
            "make the bundle again"
        )
    table = check_table(decode_table(data, path=path), schema, path=path)
    if table.num_rows != entry.rows:
        raise BundleError(
            f"{path} has {table.num_rows} rows; the manifest says {entry.rows}: make the "
            "bundle again"
        )
    if entry.schema_id == schema_id(schema) and table_digest(table) != entry.digest:
        raise BundleError(
            f"{path}: its content does not have the digest {entry.digest[:12]} that the manifest "
            "says: make the bundle again"
        )
    return table


def replace_bundle(
    folder: Path, payloads: Sequence[Payload], build: Callable[[Manifest | None], Manifest]
) -> None:
    """Write files, then the manifest that `build` makes of the one in place, then drop old files.

    Args:
        folder: the bundle, created when missing; other writers wait.
        payloads: new files.
        build: from the current manifest (None in a new bundle) to the new one.
    """
    with FolderLock(folder, wait=True):
        path = folder / MANIFEST_NAME
        old = None
        if path.exists() or path.is_symlink():
            old = parse_manifest(read_manifest(folder), path=path)
        new = build(old)
        try:
            for payload in payloads:
                _write_payload(folder, payload)
            write_json(path, new.to_json())
        except EnvironmentMissing:
            _drop_unreferenced(folder, old)
            raise
        _drop_unreferenced(folder, new)


def _write_payload(folder: Path, payload: Payload) -> None:
    target = folder / payload.entry.path
    if target.parent.is_symlink():
        raise BundleError(
            f"{target.parent} is a link; a bundle holds plain folders: remove the link"
        )
    make_folder(target.parent)
    write_bytes(target, payload.data)


def _drop_unreferenced(folder: Path, manifest: Manifest | None) -> None:
    remove_leftovers(folder)
    kept = {entry.path for entry in manifest.entries()} if manifest else set()
    for part in PART_NAMES:
        remove_leftovers(folder / part)
        for path in (folder / part).glob("*-*.parquet"):
            if f"{part}/{path.name}" not in kept:
                path.unlink(missing_ok=True)
