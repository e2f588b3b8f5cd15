"""A bundle on the move: its manifest and bytes, read from one place and put into another.

Archives, folders and hub repositories all carry the same `Package`. Whatever arrives is checked as
a whole in a folder of its own before anything is written to where it shall go.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridspec.artifacts.atomic import make_folder, write_bytes
from hybridspec.artifacts.bundle import Bundle, load_bundle
from hybridspec.artifacts.digest import bytes_digest
from hybridspec.artifacts.manifest import FileEntry, Manifest, Parts, parse_manifest
from hybridspec.artifacts.store import (
    MANIFEST_NAME,
    MAX_TABLE_BYTES,
    Payload,
    read_file,
    read_manifest,
    replace_bundle,
)
from hybridspec.errors import BundleError

MAX_PLOT_BYTES = 8 << 20
MAX_PLOTS = 16
PLOT_NAME = re.compile(r"plots/[a-z0-9][a-z0-9_-]{0,60}\.png")
_PNG = b"\x89PNG\r\n\x1a\n"
_READ_ATTEMPTS = 5


@dataclass(frozen=True)
class Package:
    """A bundle's manifest and files in memory.

    Attributes:
        manifest: as parsed and checked.
        payloads: every file that the manifest names, bytes and digest in agreement.
        plots: `plots/NAME.png` to bytes. No digest covers them, so only pictures travel, and only
            as PNG: an SVG from elsewhere may hold scripts.
    """

    manifest: Manifest
    payloads: tuple[Payload, ...]
    plots: Mapping[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(payload.data) for payload in self.payloads) + sum(
            map(len, self.plots.values())
        )


def checked_payload(entry: FileEntry, data: bytes, *, where: object) -> Payload:
    """Returns bytes with their entry, or refuses bytes of another size or digest."""
    found = bytes_digest(data)
    if len(data) != entry.num_bytes or found != entry.sha256:
        raise BundleError(
            f"{where}: {entry.path} has {len(data)} bytes and sha256 {found[:12]}; the manifest "
            f"says {entry.num_bytes} bytes and {entry.sha256[:12]}: it is damaged; fetch it again"
        )
    return Payload(entry, data)


def checked_plot(name: str, data: bytes, *, where: object) -> bytes:
    """Returns the bytes of a plot, or refuses what is no PNG of a sensible size."""
    if len(data) > MAX_PLOT_BYTES or not data.startswith(_PNG):
        raise BundleError(
            f"{where}: {name} is no PNG of at most {MAX_PLOT_BYTES >> 20} MiB: remove it"
        )
    return data


def read_package(folder: Path) -> Package:
    """Reads a bundle folder in full, checked.

    Raises:
        BundleError: whatever `load_bundle` refuses.
    """
    load_bundle(folder)
    data = read_manifest(folder)
    for _ in range(_READ_ATTEMPTS - 1):
        try:
            return _read(folder, data)
        except BundleError:
            newer = read_manifest(folder)
            if newer == data:
                raise
            data = newer
    return _read(folder, data)


def _read(folder: Path, data: bytes) -> Package:
    manifest = parse_manifest(data, path=folder / MANIFEST_NAME)
    payloads = tuple(
        checked_payload(
            entry, read_file(folder / entry.path, max_bytes=MAX_TABLE_BYTES), where=folder
        )
        for entry in manifest.entries()
    )
    plots = {}
    if not (folder / "plots").is_symlink():
        for path in sorted((folder / "plots").glob("*.png"))[:MAX_PLOTS]:
            name = f"plots/{path.name}"
            if PLOT_NAME.fullmatch(name):
                content = read_file(path, max_bytes=MAX_PLOT_BYTES)
                plots[name] = checked_plot(name, content, where=folder)
    return Package(manifest, payloads, plots)


def check_package(package: Package) -> None:
    """Checks schemas and values of everything in a package that came from elsewhere.

    Raises:
        BundleError: whatever `load_bundle` refuses.
    """
    with tempfile.TemporaryDirectory(prefix="hybridspec-") as name:
        folder = Path(name) / "bundle"
        install(folder, package)
        try:
            load_bundle(folder)
        except BundleError as error:
            raise BundleError(str(error).replace(f"{folder}/", "")) from error


def install(folder: Path, package: Package, *, replace: bool = False) -> bool:
    """Puts a package into a folder, atomically; other writers of the folder wait.

    Args:
        folder: created when missing.
        package: what to write.
        replace: put it in the place of another bundle.

    Returns:
        False when the folder already held this very bundle.

    Raises:
        BundleError: the folder holds another bundle and `replace` is not set, or a damaged one.
        EnvironmentMissing: full disk or a folder that cannot be written; the old bundle is kept.
    """
    same = False

    def build(old: Manifest | None) -> Manifest:
        nonlocal same
        same = old is not None and old.content_id == package.manifest.content_id
        if old is not None and not (same or replace):
            raise BundleError(
                f"{folder} holds another bundle ({old.content_id[:8]}, not "
                f"{package.manifest.content_id[:8]}): choose another folder, or add --replace"
            )
        return package.manifest

    replace_bundle(folder, package.payloads, build)
    if package.plots:
        if (folder / "plots").is_symlink():
            raise BundleError(f"{folder / 'plots'} is a link: remove it")
        make_folder(folder / "plots")
        for name, data in package.plots.items():
            write_bytes(folder / name, data)
    return not same


def copy_calibration(source: Path, out: Path, *, provenance: Mapping[str, Any]) -> None:
    """Puts the calibration part of one bundle into another, byte for byte; a cost part stays.

    Args:
        source: a bundle with a calibration part.
        out: the other bundle, created when missing.
        provenance: in the place of the source's, which may name paths seen from there.

    Raises:
        BundleError: no calibration part, or a damaged bundle on either side.
        EnvironmentMissing: full disk or a folder that cannot be written; the old bundle is kept.
    """
    package = read_package(source)
    found = package.manifest.parts.calibration
    if found is None:
        raise BundleError(f"{source} has no calibration part: run `hybridspec calibrate`")
    entry = found.model_copy(update={"provenance": dict(provenance)})
    names = {file.path for file in entry.files}

    def build(old: Manifest | None) -> Manifest:
        parts = Parts(calibration=entry, cost=old.parts.cost if old else None)
        return Manifest.build(parts=parts, throughput=old.throughput if old else None)

    replace_bundle(out, [p for p in package.payloads if p.entry.path in names], build)


def bundle_name(bundle: Bundle) -> str:
    """A name for people, `[a-z0-9.-]` only, that ends in 8 digits of the content id."""
    words = []
    if bundle.cost is not None:
        identity = bundle.cost.identity
        words += [identity.device, f"tp{identity.tp_size}", identity.dtype]
        words += [f"{identity.engine}-{identity.engine_version}"]
    elif bundle.calibration is not None:
        words += ["calibration", bundle.calibration.identity.dtype]
    words.append(bundle.content_id[:8])
    return "--".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-.") for word in words)
