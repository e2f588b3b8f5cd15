"""manifest.json of a bundle: what it holds, for what, and the digests to check it by."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Annotated, Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from hybridspec import __version__
from hybridspec.artifacts.digest import canonical_json, json_digest
from hybridspec.artifacts.identity import CalibrationIdentity, CostIdentity, counted_fields
from hybridspec.artifacts.tables import TABLE, HazardKind, TransferRecord
from hybridspec.errors import BundleError

SCHEMA_MAJOR, SCHEMA_MINOR = 1, 2
PART_NAMES = ("calibration", "cost")
_UPGRADE = "upgrade hybridspec"
_RELEASE = re.compile(r"[0-9][0-9a-z.+]{0,40}")
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
# Relative, inside, plain: no `..`, no leading slash or dot, nothing a shell would expand.
RelativePath = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*(/[a-z0-9][a-z0-9_.-]*)+$", max_length=200),
]


class _Model(BaseModel):
    # What a newer version adds is refused by its schema version, so a key too many means nothing.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class FileEntry(_Model):
    """One Parquet file: `sha256` is of its bytes, `digest` of its content."""

    name: str
    path: RelativePath
    sha256: Sha256
    digest: Sha256
    num_bytes: Annotated[int, Field(ge=0)]
    rows: Annotated[int, Field(ge=0)]
    schema_id: str


class _PartEntry(_Model):
    content_id: Sha256
    files: list[FileEntry]
    provenance: dict[str, Any] = {}

    def file(self, name: str) -> FileEntry | None:
        """The entry of that name, or None."""
        return next((entry for entry in self.files if entry.name == name), None)


class CalibrationEntry(_PartEntry):
    """The calibration part."""

    identity: CalibrationIdentity


class CostEntry(_PartEntry):
    """The cost part."""

    identity: CostIdentity
    transfer: TransferRecord | None = None


class ThroughputEntry(_Model):
    """Throughput depends on both parts, so it names the ones it was fitted for.

    `hazard` came with schema 1.2; before, every throughput was fitted with the table.
    """

    file: FileEntry
    calibration: Sha256 | None
    cost: Sha256
    hazard: HazardKind = TABLE


class Parts(_Model):
    """The parts present."""

    calibration: CalibrationEntry | None = None
    cost: CostEntry | None = None


class Manifest(_Model):
    """The whole file."""

    schema_version: str
    content_id: Sha256
    parts: Parts
    throughput: ThroughputEntry | None = None
    writer: str | None = None

    @classmethod
    def build(cls, *, parts: Parts, throughput: ThroughputEntry | None) -> Self:
        """A manifest of these parts with its content id."""
        return cls(
            schema_version=f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}",
            content_id=_content_id(parts, throughput),
            parts=parts,
            throughput=throughput,
            writer=__version__,
        )

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return self.model_dump(mode="json")

    def entries(self) -> list[FileEntry]:
        """Every file that the manifest refers to."""
        parts = (self.parts.calibration, self.parts.cost)
        found = [entry for part in parts if part is not None for entry in part.files]
        return found + ([self.throughput.file] if self.throughput is not None else [])


def part_content_id(
    identity: CalibrationIdentity | CostIdentity,
    files: list[FileEntry],
    transfer: TransferRecord | None = None,
) -> str:
    """Digest of a part's identity and content, whatever the time, host and Parquet writer."""
    content: dict[str, Any] = {
        "identity": counted_fields(identity),
        "files": {entry.name: [entry.schema_id, entry.digest] for entry in files},
    }
    if transfer is not None:
        content["transfer"] = asdict(transfer)
    return json_digest(content)


def _content_id(parts: Parts, throughput: ThroughputEntry | None) -> str:
    fitted: list[str | None] | None = None
    if throughput is not None:
        fitted = [throughput.file.digest, throughput.calibration, throughput.cost]
        # Counts only where it says more than bundles of before could.
        fitted += [] if throughput.hazard == TABLE else [throughput.hazard]
    return json_digest(
        {
            "calibration": parts.calibration.content_id if parts.calibration else None,
            "cost": parts.cost.content_id if parts.cost else None,
            "throughput": fitted,
        }
    )


def parse_manifest(data: bytes, *, path: object) -> Manifest:
    """Parse and check a manifest.

    Raises:
        BundleError: not JSON, a version newer than this or of another major, an unknown part, a
            field of another type, or content ids that do not belong to the content.
    """
    try:
        raw = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{path} is not valid JSON ({error}): the bundle is damaged; fetch or make it again"
        ) from error
    if not isinstance(raw, dict):
        raise BundleError(f"{path} holds a {type(raw).__name__}; expected an object")
    _check_version(raw, path)
    parts = raw.get("parts")
    unknown = sorted(set(parts) - set(PART_NAMES)) if isinstance(parts, dict) else []
    if unknown:
        raise BundleError(
            f"{path} has an unknown part {unknown[0]!r}; known are {', '.join(PART_NAMES)}: "
            "upgrade hybridspec or remove that part"
        )
    try:
        # JSON mode: strict types, yet objects become dataclasses.
        manifest = Manifest.model_validate_json(canonical_json(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BundleError(
            f"{path}: {place or 'manifest'!r}: {first['msg']}: the bundle is damaged; fetch "
            "or make it again"
        ) from error
    except RecursionError as error:
        raise BundleError(f"{path} is nested too deeply: the bundle is damaged") from error
    _check_content_ids(manifest, path)
    return manifest


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _check_version(raw: dict[str, Any], path: object) -> None:
    version, writer = raw.get("schema_version"), raw.get("writer")
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None:
        raise BundleError(
            f"{path} has schema_version {version!r}; expected {SCHEMA_MAJOR}.{SCHEMA_MINOR}: this "
            "is no bundle, or it is damaged; check the path, or fetch it again"
        )
    found, known = (int(match[1]), int(match[2])), (SCHEMA_MAJOR, SCHEMA_MINOR)
    if found > known:
        named = isinstance(writer, str) and _RELEASE.fullmatch(writer)
        raise BundleError(
            f"{path} has schema_version {version}; this version reads {SCHEMA_MAJOR}.0 to "
            f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}: "
            + (f"use hybridspec {writer}, which wrote it, or newer" if named else _UPGRADE)
        )
    if found[0] != SCHEMA_MAJOR:
        raise BundleError(
            f"{path} has schema_version {version}; this version reads {SCHEMA_MAJOR}.x only: "
            "make the bundle again"
        )


def _check_content_ids(manifest: Manifest, path: object) -> None:
    for name, part in zip(
        PART_NAMES, (manifest.parts.calibration, manifest.parts.cost), strict=True
    ):
        if part is None:
            continue
        names = [entry.name for entry in part.files]
        if len(set(names)) != len(names):
            raise BundleError(f"{path}: {name} lists a file name twice: the bundle is damaged")
        transfer = part.transfer if isinstance(part, CostEntry) else None
        if part_content_id(part.identity, part.files, transfer) != part.content_id:
            raise BundleError(
                f"{path}: {name} has content id {part.content_id[:12]}, which does not belong to "
                "its identity and files: the manifest was edited or damaged; make that part again"
            )
    if _content_id(manifest.parts, manifest.throughput) != manifest.content_id:
        raise BundleError(
            f"{path}: content id {manifest.content_id[:12]} does not belong to the parts: the "
            "manifest was edited or damaged; fetch or make the bundle again"
        )
