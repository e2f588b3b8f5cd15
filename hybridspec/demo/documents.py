"""A corpus document and the file that holds all of them: xz-compressed JSON lines."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from hybridspec.errors import BundleError

Category = Literal["code", "prose", "legal", "config", "tables", "markdown", "chat"]
Split = Literal["train", "calibration", "test"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
SPLITS: tuple[Split, ...] = get_args(Split)
_HELD_OUT_OF = 16


@dataclass(frozen=True)
class Document:
    """One text with where it came from.

    Attributes:
        document_id: stable name, unique in a corpus.
        category: one of `CATEGORIES`.
        split: held-out documents serve calibration and test prompts only.
        source: distribution and version, or `synthetic`.
        licence: licence of that source.
        text: the document, not empty.
    """

    document_id: str
    category: Category
    split: Split
    source: str
    licence: str
    text: str

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES or self.split not in SPLITS or not self.text:
            raise BundleError(
                f"document {self.document_id!r} has category {self.category!r}, split "
                f"{self.split!r} and {len(self.text)} characters; expected {CATEGORIES}, "
                f"{SPLITS} and a text: build the corpus again"
            )


def split_of(key: str) -> Split:
    """Returns the split of a file by the hash of its path, so that whole files are held out."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % _HELD_OUT_OF
    return "calibration" if bucket == 0 else "test" if bucket == 1 else "train"


def write_documents(file: Path, documents: Iterable[Document]) -> str:
    """Writes a corpus file and returns its SHA-256 hex digest (same documents, same bytes)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(file, "wt", encoding="utf-8", newline="\n", preset=6) as stream:
        for document in documents:
            stream.write(json.dumps(asdict(document), ensure_ascii=False) + "\n")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_documents(file: Path) -> list[Document]:
    """Reads a corpus file.

    Raises:
        BundleError: the file is missing, damaged or not a corpus.
    """
    try:
        with lzma.open(file, "rt", encoding="utf-8", newline="\n") as stream:
            return [Document(**json.loads(line)) for line in stream]
    except (OSError, lzma.LZMAError, EOFError, ValueError, TypeError) as error:
        raise BundleError(
            f"{file} cannot be read as a corpus ({error}): "
            "build it with python -m hybridspec.demo.corpus"
        ) from error
