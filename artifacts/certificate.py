"""Certificates of output preservation: one engine, one pair, one bundle, the gates that were run.

A certificate lies beside the parts of a bundle, in `certificates/ID/`, and names the bundle's
content id, so it cannot be one of its parts. `certificate.json` is replaced last: at every moment
it is the old certificate or the new one. It does not travel in archives: it holds for where it was
made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hybridspec import __version__
from hybridspec.artifacts.atomic import make_folder, remove_leftovers, write_bytes, write_json
from hybridspec.artifacts.certificate_schemas import (
    ANSWERS_SCHEMA,
    DIFFERENCES_SCHEMA,
    FIGURES_SCHEMA,
    TEXTS_SCHEMA,
)
from hybridspec.artifacts.digest import canonical_json, json_digest
from hybridspec.artifacts.lock import FolderLock
from hybridspec.artifacts.manifest import FileEntry, Sha256
from hybridspec.artifacts.schemas import check_table, table_from
from hybridspec.artifacts.store import encode, read_file, read_table
from hybridspec.errors import BundleError

FOLDER = "certificates"
NAME = "certificate.json"
REPORT = "report.md"
SCHEMA_VERSION = "1.0"
MAX_BYTES = 1 << 20
SCHEMAS: dict[str, pa.Schema] = {
    "texts": TEXTS_SCHEMA,
    "differences": DIFFERENCES_SCHEMA,
    "answers": ANSWERS_SCHEMA,
}
FIGURES = "figures"

Verdict = Literal["passed", "failed", "not run"]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True)
class Subject:
    """What a certificate speaks of; it matches where all of this is the same.

    Attributes:
        engine, engine_version: what decoded, e.g. `reference` and its release.
        dtype: of weights and activations.
        target_digest, drafter_digest: `digest.model_digest` of the folders; None where a server
            was asked and no folder was named.
        bundle: content id, None without a bundle.
        lengths: how verify lengths were chosen, e.g. `policy` or `fixed 16`.
    """

    engine: str
    engine_version: str
    dtype: str
    target_digest: str | None
    drafter_digest: str | None
    bundle: str | None
    lengths: str

    @property
    def id(self) -> str:
        """Digest of all fields; its first 16 digits name the certificate's folder."""
        return json_digest(asdict(self))


class Gate(_Model):
    """What one gate found.

    `figures` are plain numbers, units in their names; `message` is one line for people.
    """

    name: str
    verdict: Verdict
    message: str
    figures: dict[str, float] = Field(default={}, exclude=True)


class Certificate(_Model):
    """All gates of one subject under the same settings."""

    schema_version: str
    content_id: Sha256
    subject: Subject
    settings: dict[str, Any]
    gates: list[Gate]
    files: Annotated[list[FileEntry], Field(max_length=16)]
    created: str
    writer: str

    @property
    def verdict(self) -> Literal["passed", "failed", "incomplete"]:
        """`passed` if every gate that was asked for was run and passed."""
        verdicts = {gate.verdict for gate in self.gates}
        if "failed" in verdicts:
            return "failed"
        asked = self.settings.get("gates")
        run = {gate.name for gate in self.gates if gate.verdict == "passed"}
        complete = isinstance(asked, list) and bool(asked) and set(asked) <= run
        return "passed" if complete else "incomplete"

    def gate(self, name: str) -> Gate | None:
        """The gate of that name, or None."""
        return next((gate for gate in self.gates if gate.name == name), None)

    def summary(self) -> str:
        """One line: verdict, gates by verdict, when."""
        parts = [
            f"{verdict}: {', '.join(names)}"
            for verdict in ("passed", "failed", "not run")
            if (names := [gate.name for gate in self.gates if gate.verdict == verdict])
        ]
        return f"{self.verdict} ({'; '.join(parts)}), made {self.created}"


@dataclass(frozen=True)
class Evidence:
    """Rows behind the gates, as columns of the schemas of the same name."""

    texts: Mapping[str, Any]
    differences: Mapping[str, Any]
    answers: Mapping[str, Any]


def folder_of(root: Path, subject: Subject) -> Path:
    """Where the certificate of a subject lies inside a bundle, or any other folder."""
    return root / FOLDER / subject.id[:16]


def write_certificate(
    root: Path,
    *,
    subject: Subject,
    settings: Mapping[str, Any],
    gates: Sequence[Gate],
    evidence: Evidence,
    report: str,
    created: str,
) -> Certificate:
    """Write or replace the certificate of `subject`.

    Args:
        root: the bundle's folder, or any other.
        report: one page of Markdown, written beside it.
        created: ISO 8601; no part of the content id.

    Raises:
        BundleError: rows that do not fit their schema.
        EnvironmentMissing: full disk or a folder that cannot be written; the old one is kept.
    """
    folder = folder_of(root, subject)
    part = f"{FOLDER}/{folder.name}"
    tables = {name: table_from(getattr(evidence, name), schema) for name, schema in SCHEMAS.items()}
    tables[FIGURES] = _figures_table(gates)
    payloads = [
        encode(part, name, check_table(table, table.schema, path=f"certificate {name}"))
        for name, table in sorted(tables.items())
    ]
    files = [payload.entry for payload in payloads]
    certificate = Certificate(
        schema_version=SCHEMA_VERSION,
        content_id=_content_id(subject, settings, gates, files),
        subject=subject,
        settings=dict(settings),
        gates=list(gates),
        files=files,
        created=created,
        writer=__version__,
    )
    with FolderLock(root, wait=True):
        make_folder(folder)
        for payload in payloads:
            write_bytes(root / payload.entry.path, payload.data)
        write_bytes(folder / REPORT, report.encode())
        write_json(folder / NAME, certificate.model_dump(mode="json"))
        remove_leftovers(folder)
        kept = {entry.path for entry in files}
        for path in folder.glob("*-*.parquet"):
            if f"{part}/{path.name}" not in kept:
                path.unlink(missing_ok=True)
    return certificate


def read_certificate(root: Path, name: str) -> Certificate:
    """Read the certificate in `root/certificates/name`, every digest checked, figures included.

    Raises:
        BundleError: missing, damaged, edited or of another version.
    """
    path = root / FOLDER / name / NAME
    for parent in (root / FOLDER, root / FOLDER / name):
        if parent.is_symlink():
            raise BundleError(f"{parent} is a link; certificates lie in plain folders: copy it")
    data = read_file(path, max_bytes=MAX_BYTES, remedy="run `hybridspec certify`")
    try:
        raw = json.loads(data)
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{path} has schema_version {version!r}; this version reads {SCHEMA_VERSION}: "
                "run `hybridspec certify` again"
            )
        found = Certificate.model_validate_json(canonical_json(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise BundleError(
            f"{path}: {place!r}: {first['msg']}: it is damaged; run `hybridspec certify` again"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{path} is not valid JSON: it is damaged; run `hybridspec certify` again"
        ) from error
    names = [entry.name for entry in found.files]
    if sorted(names) != sorted([*SCHEMAS, FIGURES]):
        raise BundleError(f"{path} names other files than a certificate has: it is damaged")
    figures: dict[str, dict[str, float]] = {}
    for entry in found.files:
        if not entry.path.startswith(f"{FOLDER}/{name}/"):
            raise BundleError(f"{path} names {entry.path}, which is not its own: it is damaged")
        if entry.name == FIGURES:
            for row in read_table(root, entry, FIGURES_SCHEMA).to_pylist():
                figures.setdefault(row["gate"], {})[row["figure"]] = row["value"]
    gates = [g.model_copy(update={"figures": figures.get(g.name, {})}) for g in found.gates]
    if _content_id(found.subject, found.settings, gates, found.files) != found.content_id or (
        folder_of(root, found.subject).name != name
    ):
        raise BundleError(
            f"{path}: content id {found.content_id[:12]} does not belong to the content: it was "
            "edited or damaged; run `hybridspec certify` again"
        )
    return found.model_copy(update={"gates": gates})


def read_evidence(root: Path, certificate: Certificate) -> Evidence:
    """The rows behind a certificate, as columns.

    Raises:
        BundleError: a file that is missing or damaged.
    """
    tables = {
        entry.name: read_table(root, entry, SCHEMAS[entry.name]).to_pydict()
        for entry in certificate.files
        if entry.name in SCHEMAS
    }
    return Evidence(**tables)


def list_certificates(root: Path) -> tuple[list[Certificate], list[str]]:
    """Certificates in a folder, newest first, and a line for each one that cannot be read."""
    found, refused = [], []
    folder = root / FOLDER
    if folder.is_symlink():
        return [], [f"{folder} is a link; certificates in it are not read: copy it"]
    for path in sorted(folder.glob("*")):
        # A writer that was killed before its first certificate leaves a folder without one.
        if not path.is_dir() or not (path / NAME).exists():
            continue
        try:
            found.append(read_certificate(root, path.name))
        except BundleError as error:
            refused.append(str(error))
    return sorted(found, key=lambda c: c.created, reverse=True), refused


def _content_id(
    subject: Subject, settings: Mapping[str, Any], gates: Sequence[Gate], files: Sequence[FileEntry]
) -> str:
    return json_digest(
        {
            "subject": asdict(subject),
            "settings": dict(settings),
            "gates": [[gate.name, gate.verdict, gate.message] for gate in gates],
            "files": {entry.name: [entry.schema_id, entry.digest] for entry in files},
        }
    )


def _figures_table(gates: Sequence[Gate]) -> pa.Table:
    rows = [(gate.name, name, value) for gate in gates for name, value in gate.figures.items()]
    columns = ("gate", "figure", "value")
    return table_from(
        {column: [row[i] for row in rows] for i, column in enumerate(columns)}, FIGURES_SCHEMA
    )
