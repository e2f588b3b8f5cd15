"""One file that holds a bundle: `.zip` or `.tar.gz`, the same bytes for the same bundle.

What comes in is another's: names are checked against the manifest inside, links, devices and
absolute or climbing paths are refused, and sizes are bounded before anything is unpacked. Nothing
is extracted by name; members are read into memory and written by `transport.install`.
"""

from __future__ import annotations

import errno
import gzip
import io
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hybridspec.artifacts.atomic import write_bytes
from hybridspec.artifacts.digest import canonical_json
from hybridspec.artifacts.manifest import parse_manifest
from hybridspec.artifacts.store import MANIFEST_NAME, MAX_MANIFEST_BYTES, MAX_TABLE_BYTES
from hybridspec.artifacts.transport import (
    MAX_PLOT_BYTES,
    MAX_PLOTS,
    PLOT_NAME,
    Package,
    checked_payload,
    checked_plot,
)
from hybridspec.errors import BundleError, EnvironmentMissing, UsageError

SUFFIXES = (".zip", ".tar.gz", ".tgz")
CARD_NAME = "README.md"
MAX_MEMBERS = 64
MAX_TOTAL_BYTES = MAX_TABLE_BYTES
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_IGNORED = frozenset({CARD_NAME, ".lock"})


def check_suffix(path: Path) -> None:
    """Refuses a name that is no archive's."""
    if not path.name.endswith(SUFFIXES):
        raise UsageError(
            f"{path} is no name of an archive; known endings are {', '.join(SUFFIXES)}: choose one"
        )


def write_archive(path: Path, package: Package, *, card: str) -> None:
    """Writes a package as one file, atomically; equal packages give equal bytes.

    Args:
        path: its ending chooses the format.
        package: what to write.
        card: text of `README.md`.

    Raises:
        UsageError: an ending that is not known.
        EnvironmentMissing: full disk or a folder that cannot be written.
    """
    check_suffix(path)
    members = {MANIFEST_NAME: canonical_json(package.manifest.to_json()) + b"\n"}
    members[CARD_NAME] = card.encode()
    members |= {payload.entry.path: payload.data for payload in package.payloads}
    members |= dict(package.plots)
    write_bytes(path, _zip(members) if path.name.endswith(".zip") else _tar(members))


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, date_time=_ZIP_TIME)
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return buffer.getvalue()


def _tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    # The gzip header would hold the time and a name.
    with (
        gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def read_archive(path: Path) -> Package:
    """Reads a package from one file, with every name, size and digest checked.

    The bundle may lie at the top of the archive or in one folder there.

    Raises:
        UsageError: an ending that is not known.
        EnvironmentMissing: a file that is not there or cannot be read.
        BundleError: a damaged archive, links or special files, names outside or that the manifest
            does not know, too large, or contents that do not fit their digests.
    """
    check_suffix(path)
    opened = False
    try:
        with path.open("rb") as file:
            opened = True
            members = _collect(_members(path, file), path)
    except OSError as error:
        # Damaged offsets point before the file's beginning, which the system calls an error too.
        if opened and (isinstance(error, gzip.BadGzipFile) or error.errno == errno.EINVAL):
            raise BundleError(f"{path} is damaged ({error}): fetch it again") from error
        raise EnvironmentMissing(
            f"{path} cannot be read: {error.strerror or error}: check the path"
        ) from error
    # NotImplementedError is how zipfile says that it does not know a compression or a version.
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError) as bad:
        raise BundleError(f"{path} is damaged ({bad}): fetch it again") from bad
    except (ValueError, RuntimeError, UnicodeError) as bad:
        raise BundleError(f"{path} cannot be read as an archive ({bad}): fetch it again") from bad
    return _package(members, path)


def _members(path: Path, file: BinaryIO) -> Iterator[tuple[str, int, BinaryIO]]:
    """Name, size and bytes of each regular file."""
    if path.name.endswith(".zip"):
        yield from _zip_members(path, file)
    else:
        yield from _tar_members(path, file)


def _zip_members(path: Path, file: BinaryIO) -> Iterator[tuple[str, int, BinaryIO]]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            name = _safe_name(info.orig_filename, path)
            if info.is_dir():
                continue
            if kind not in (0, stat.S_IFREG):
                raise _special(path, name)
            if info.flag_bits & 1:
                raise BundleError(f"{path}: {name} is encrypted; a bundle is not: fetch another")
            with archive.open(info) as content:
                yield name, info.file_size, content  # type: ignore[misc]


def _tar_members(path: Path, file: BinaryIO) -> Iterator[tuple[str, int, BinaryIO]]:
    with (
        gzip.GzipFile(fileobj=file, mode="rb") as unpacked,
        tarfile.open(fileobj=_Bounded(unpacked, path), mode="r|") as archive,
    ):
        for info in archive:
            name = _safe_name(info.name, path)
            if info.isdir():
                continue
            content = archive.extractfile(info) if info.isreg() else None
            if content is None:
                raise _special(path, name)
            yield name, info.size, content  # type: ignore[misc]


class _Bounded(io.RawIOBase):
    """Refuses to unpack more than a bundle may hold, whatever the headers say."""

    def __init__(self, source: gzip.GzipFile, path: Path) -> None:
        self._source, self._path, self._left = source, path, MAX_TOTAL_BYTES + (16 << 20)

    def readable(self) -> bool:
        """Always."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes of the unpacked stream."""
        data = self._source.read(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(data)
        if self._left <= 0:
            raise _too_large(self._path)
        return data


def _collect(members: Iterator[tuple[str, int, BinaryIO]], path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    left = MAX_TOTAL_BYTES
    for name, size, content in members:
        if name in found:
            raise BundleError(f"{path} holds {name} twice: it is no archive of a bundle")
        if len(found) == MAX_MEMBERS:
            raise BundleError(
                f"{path} holds more than {MAX_MEMBERS} files: it is no archive of a bundle"
            )
        if size > left:
            raise _too_large(path)
        data = content.read(left + 1)
        if len(data) > left:
            raise _too_large(path)
        left -= len(data)
        found[name] = data
    return found


def _safe_name(name: str, path: Path) -> str:
    parts = PurePosixPath(name).parts
    if (
        not parts
        or name.startswith("/")
        or ".." in parts
        or any(mark in name for mark in ("\\", "\0", ":"))
        or not name.isprintable()
    ):
        raise BundleError(
            f"{path} holds a file named {name!r}; names must be relative and inside: it is not "
            "to be trusted"
        )
    return "/".join(part for part in parts if part != ".")


def _special(path: Path, name: str) -> BundleError:
    return BundleError(
        f"{path}: {name} is a link or a special file; a bundle holds plain files: it is not to "
        "be trusted"
    )


def _too_large(path: Path) -> BundleError:
    return BundleError(
        f"{path} unpacks to more than {MAX_TOTAL_BYTES >> 20} MiB; a bundle is smaller: it is not "
        "to be trusted"
    )


def _package(members: dict[str, bytes], path: Path) -> Package:
    places = [name for name in members if PurePosixPath(name).name == MANIFEST_NAME]
    tops = [name for name in places if name.count("/") <= 1]
    if len(places) != 1 or len(tops) != 1:
        raise BundleError(
            f"{path} holds {len(places)} files {MANIFEST_NAME}; a bundle has one, at the top or in "
            "one folder: it is no archive of a bundle"
        )
    prefix = tops[0].removesuffix(MANIFEST_NAME)
    inside = {name.removeprefix(prefix): data for name, data in members.items()}
    if not all(name.startswith(prefix) for name in members) or len(inside) != len(members):
        raise BundleError(f"{path} holds files beside the bundle {prefix!r}: take them out")
    raw = inside.pop(MANIFEST_NAME)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{path}: its manifest has {len(raw)} bytes: it is damaged")
    manifest = parse_manifest(raw, path=f"{path}:{MANIFEST_NAME}")
    payloads = []
    for entry in manifest.entries():
        data = inside.pop(entry.path, None)
        if data is None:
            raise BundleError(
                f"{path} lacks {entry.path}, which its manifest names: fetch it again"
            )
        payloads.append(checked_payload(entry, data, where=path))
    plots = {name: data for name, data in inside.items() if PLOT_NAME.fullmatch(name)}
    other = sorted(
        name
        for name in inside.keys() - plots.keys() - _IGNORED
        if not (name.startswith("plots/") and name.endswith(".svg"))
    )
    if other:
        raise BundleError(
            f"{path} holds {other[0]!r}, which its manifest does not name: it is not to be trusted"
        )
    if len(plots) > MAX_PLOTS or sum(map(len, plots.values())) > MAX_PLOTS * MAX_PLOT_BYTES:
        raise BundleError(f"{path} holds {len(plots)} plots; at most {MAX_PLOTS} are taken")
    for name, data in plots.items():
        checked_plot(name, data, where=path)
    return Package(manifest, tuple(payloads), plots)
