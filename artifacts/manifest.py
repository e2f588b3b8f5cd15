"""manifest.json of a bundle: what it holds, for what, and the digests to check it by."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from hybridspec.artifacts.digest import canonical_json, json_digest
from hybridspec.artifacts.identity import CalibrationIdentity, CostIdentity, identity_fields
from hybridspec.errors import BundleError

SCHEMA_MAJOR, SCHEMA_MINOR = 1, 0
PART_NAMES = ("calibration", "cost")
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
# Relative, inside, plain: no `..`, no leading slash or dot, nothing a shell would expand.
RelativePath = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*(/[a-z0-9][a-z0-9_.-]*)+$", max_length=200),
]


class _Model(BaseModel):
    # Unknown keys are ignored: a newer minor version may add some.
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


class ThroughputEntry(_Model):
    """Throughput depends on both parts, so it names the ones it was fitted for."""

    file: FileEntry
    calibration: Sha256 | None
    cost: Sha256


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

    @classmethod
    def build(cls, *, parts: Parts, throughput: ThroughputEntry | None) -> Self:
        """A manifest of these parts with its content id."""
        return cls(
            schema_version=f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}",
            content_id=_content_id(parts, throughput),
            parts=parts,
            throughput=throughput,
        )

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return self.model_dump(mode="json")

    def entries(self) -> list[FileEntry]:
        """Every file that the manifest refers to."""
        parts = (self.parts.calibration, self.parts.cost)
        found = [entry for part in parts if part is not None for entry in part.files]
        return found + ([self.throughput.file] if self.throughput is not None else [])


def part_content_id(identity: CalibrationIdentity | CostIdentity, files: list[FileEntry]) -> str:
    """Digest of a part's identity and content, whatever the time, host and Parquet writer."""
    return json_digest(
        {
            "identity": identity_fields(identity),
            "files": {entry.name: [entry.schema_id, entry.digest] for entry in files},
        }
    )


def _content_id(parts: Parts, throughput: ThroughputEntry | None) -> str:
    return json_digest(
        {
            "calibration": parts.calibration.content_id if parts.calibration else None,
            "cost": parts.cost.content_id if parts.cost else None,
            "throughput": [throughput.file.digest, throughput.calibration, throughput.cost]
            if throughput
            else None,
        }
    )


def parse_manifest(data: bytes, *, path: object) -> tuple[Manifest, list[str]]:
    """Parse and check a manifest.

    Returns:
        the manifest, and warnings (a newer minor version).

    Raises:
        BundleError: not JSON, another major version, an unknown part, a field of another type, or
            content ids that do not belong to the content.
    """
    try:
        raw = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{path} is not valid JSON ({error}): the bundle is damaged; fetch or make it again"
        ) from error
    if not isinstance(raw, dict):
        raise BundleError(f"{path} holds a {type(raw).__name__}; expected an object")
    warnings = _check_version(raw.get("schema_version"), path)
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
    if not warnings:
        _check_content_ids(manifest, path)
    return manifest, warnings


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _check_version(version: object, path: object) -> list[str]:
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None:
        raise BundleError(
            f"{path} has schema_version {version!r}; expected {SCHEMA_MAJOR}.{SCHEMA_MINOR}: this "
            "is not a bundle, or it is damaged"
        )
    major, minor = int(match[1]), int(match[2])
    if major != SCHEMA_MAJOR:
        remedy = "upgrade hybridspec" if major > SCHEMA_MAJOR else "make the bundle again"
        raise BundleError(
            f"{path} has schema_version {version}; this version reads {SCHEMA_MAJOR}.x only: "
            f"{remedy}"
        )
    if minor > SCHEMA_MINOR:
        return [
            f"the bundle has schema_version {version}, newer than {SCHEMA_MAJOR}.{SCHEMA_MINOR}; "
            "what this version does not know is left out: upgrade hybridspec to use it"
        ]
    return []


def _check_content_ids(manifest: Manifest, path: object) -> None:
    for name, part in zip(
        PART_NAMES, (manifest.parts.calibration, manifest.parts.cost), strict=True
    ):
        if part is None:
            continue
        names = [entry.name for entry in part.files]
        if len(set(names)) != len(names):
            raise BundleError(f"{path}: {name} lists a file name twice: the bundle is damaged")
        if part_content_id(part.identity, part.files) != part.content_id:
            raise BundleError(
                f"{path}: {name} has content id {part.content_id[:12]}, which does not belong to "
                "its identity and files: the manifest was edited or damaged; make that part again"
            )
    if _content_id(manifest.parts, manifest.throughput) != manifest.content_id:
        raise BundleError(
            f"{path}: content id {manifest.content_id[:12]} does not belong to the parts: the "
            "manifest was edited or damaged; fetch or make the bundle again"
        )
