"""Where corpus text may come from: an allowlist of distributions and a check of what they declare.

A distribution contributes text only if it is listed here **and** its own metadata declares nothing
but permissive licences. Files that name a copyleft licence are left out one by one, and so are
folders of vendored third-party code, because their licences differ from the distribution's own.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

_BY_LICENCE = {
    "PSF-2.0": ("cpython matplotlib typing-extensions "),
    "BSD": (
        "numpy scipy scikit-learn sympy networkx mpmath joblib threadpoolctl click starlette "
        "uvicorn jinja2 markupsafe flask werkzeug django djangorestframework sphinx scrapy "
        "httpx httpcore idna fsspec cloudpickle dask distributed fabric invoke mkdocs wagtail "
        "flask-restful python-dateutil babel cookiecutter kiwisolver contourpy "
        "prometheus-client pygments nodeenv torch "
    ),
    "MIT": (
        "pydantic fastapi typer rich mypy pytest iniconfig pluggy attrs jsonschema referencing "
        "anyio h11 filelock narwhals fonttools markdown-it-py mdurl annotated-types "
        "annotated-doc typing-inspection urllib3 tox virtualenv setuptools pip wheel hatchling "
        "poetry-core marshmallow alembic peewee twisted black isort structlog gunicorn pyyaml "
        "pyparsing "
    ),
    "Apache-2.0": (
        "luigi transformers huggingface-hub tokenizers safetensors pyarrow openai requests aiohttp "
        "tornado falcon xarray nox botocore kubernetes opentelemetry-api sortedcontainers "
        "packaging "
    ),
}
ALLOWED = {name: licence for licence, names in _BY_LICENCE.items() for name in names.split()}
"""Distribution -> main licence. PSF, BSD, MIT and Apache-2.0 only."""

SYNTHETIC = "synthetic"
SYNTHETIC_LICENCE = "Apache-2.0"

_DECLARED_AS = {
    "PSF-2.0": re.compile(r"\bPSF\b|\bPython Software Foundation\b"),
    "BSD": re.compile(r"\b0?BSD\b"),
    "MIT": re.compile(r"\bMIT\b"),
    "Apache-2.0": re.compile(r"\bApache\b"),
}
_COPYLEFT = re.compile(
    r"\b[AL]?GPL(?:\b|v?\d)|\bMPL\b|\bEPL-|\bCDDL\b|\bCC[- ]BY\b|"
    r"(?i:GNU (?:Lesser |Library |Affero )?General Public|Mozilla Public|Eclipse Public|"
    r"Creative Commons Attribution|Contributor Covenant)"
)
_VENDORED = re.compile(
    r"(?:^|/)(?:_?vendor(?:ed)?|third_party|extern(?:als?)?|_distutils|site-packages|"
    r"\.github|node_modules|__pycache__|lib2to3|idlelib|locale|cldr)(?:/|$)"
)
_SUFFIXES = frozenset(
    [
        "py",
        "pyi",
        "rst",
        "md",
        "txt",
        "json",
        "toml",
        "cfg",
        "ini",
        "yaml",
        "yml",
        "csv",
        "tsv",
        "dat",
        "in",
        "editorconfig",
    ]
)
_MAX_FILE_BYTES = 400_000


@dataclass(frozen=True)
class SourceFile:
    """One readable file of an allowed distribution.

    Attributes:
        source: distribution and version, e.g. `networkx 3.6.1`.
        licence: main licence of the distribution.
        path: path inside the distribution, with forward slashes.
        text: the whole file, newlines normalised.
    """

    source: str
    licence: str
    path: str
    text: str


def canonical(name: str) -> str:
    """Returns a distribution name in the form used by `ALLOWED`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declares(header: str, licence: str) -> bool:
    """Tells whether core metadata declares a licence, and no copyleft licence beside it.

    Args:
        header: METADATA or PKG-INFO; only its header fields are read, not the description.
        licence: a value of `ALLOWED`.
    """
    fields = HeaderParser().parsestr(header, headersonly=True)
    declared = [str(v) for v in fields.get_all("License-Expression") or []]
    declared += [str(v) for v in fields.get_all("License") or []]
    declared += [
        str(v) for v in fields.get_all("Classifier") or [] if str(v).startswith("License ::")
    ]
    known = any(_DECLARED_AS[licence].search(value) for value in declared)
    return known and not any(_COPYLEFT.search(value) for value in declared)


def mentions_copyleft(text: str) -> bool:
    """Tells whether a file names a copyleft or attribution licence anywhere."""
    return _COPYLEFT.search(text) is not None


def _wanted(path: str) -> bool:
    name = path.rsplit("/", 1)[-1].lower()
    if _VENDORED.search(path):
        return False
    suffix = name.rsplit(".", 1)[-1] if "." in name else ""
    return suffix in _SUFFIXES or "licen" in name or name in {"metadata", "pkg-info", "notice"}


def _decode(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None


def _accept(source: str, licence: str, path: str, raw: bytes) -> SourceFile | None:
    if not 60 <= len(raw) <= _MAX_FILE_BYTES:
        return None
    text = _decode(raw)
    if text is None or "\x00" in text or mentions_copyleft(text):
        return None
    return SourceFile(source=source, licence=licence, path=path, text=text)


def folder_files(root: Path, *, source: str, licence: str) -> Iterator[SourceFile]:
    """Yields the accepted files below one folder in sorted order."""
    for file in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
        path = file.relative_to(root).as_posix()
        if _wanted(path) and (found := _accept(source, licence, path, file.read_bytes())):
            yield found


def stdlib_files() -> Iterator[SourceFile]:
    """Yields the standard library of the running CPython, under the PSF licence."""
    version = ".".join(map(str, sys.version_info[:3]))
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from folder_files(root, source=f"cpython {version}", licence=ALLOWED["cpython"])


def installed_files(site: Path | None = None) -> Iterator[SourceFile]:
    """Yields files of allowed distributions installed in `site` (default: where Python looks)."""
    found = metadata.distributions(path=[str(site)]) if site else metadata.distributions()
    distributions = {canonical(d.metadata["Name"]): d for d in found}
    for name in sorted(distributions):
        distribution = distributions[name]
        header = distribution.read_text("METADATA") or ""
        if name not in ALLOWED or not declares(header, ALLOWED[name]):
            continue
        source = f"{name} {distribution.version}"
        for entry in sorted(distribution.files or [], key=lambda f: f.as_posix()):
            path = entry.as_posix()
            if ".." in path or not _wanted(path):
                continue
            file = Path(str(distribution.locate_file(entry)))
            if file.is_file():
                accepted = _accept(source, ALLOWED[name], path, file.read_bytes())
                if accepted:
                    yield accepted


def archive_files(archive: Path) -> Iterator[SourceFile]:
    """Yields files of one source distribution (`.tar.gz`) if it is allowed."""
    with tarfile.open(archive) as tar:
        members = sorted((m for m in tar.getmembers() if m.isfile()), key=lambda m: m.name)
        info = next((m for m in members if re.fullmatch(r"[^/]+/PKG-INFO", m.name)), None)
        handle = tar.extractfile(info) if info else None
        header = (_decode(handle.read()) or "") if handle else ""
        fields = HeaderParser().parsestr(header, headersonly=True)
        name = canonical(str(fields.get("Name", "")))
        if name not in ALLOWED or not declares(header, ALLOWED[name]):
            return
        source = f"{name} {fields.get('Version')}"
        for member in members:
            path = member.name.split("/", 1)[-1]
            if not _wanted(path) or member.size > _MAX_FILE_BYTES:
                continue
            if content := tar.extractfile(member):
                found = _accept(source, ALLOWED[name], path, content.read())
                if found:
                    yield found
