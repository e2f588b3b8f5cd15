"""Builds the corpus of the embedded pair: `python -m hybridspec.demo.corpus --out FILE`.

The same Python environment, archives and options give the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from hybridspec.demo import synthetic
from hybridspec.demo.classify import documents_of
from hybridspec.demo.documents import (
    CATEGORIES,
    Category,
    Document,
    split_of,
    write_documents,
)
from hybridspec.demo.sources import (
    SYNTHETIC,
    SYNTHETIC_LICENCE,
    SourceFile,
    archive_files,
    installed_files,
    stdlib_files,
)

SHARES: dict[Category, float] = {
    "code": 0.32,
    "prose": 0.26,
    "legal": 0.035,
    "config": 0.085,
    "tables": 0.07,
    "markdown": 0.09,
    "chat": 0.14,
}
"""Most characters a category may take, as a share of the whole."""

_SYNTHETIC_SHARES: dict[Category, tuple[float, Callable[[random.Random], str]]] = {
    "tables": (0.75, synthetic.table),
    "config": (0.25, synthetic.settings),
    "legal": (0.45, synthetic.contract),
}
_MOST_OF_ONE_SOURCE = 0.2


def _rank(document: Document) -> bytes:
    return hashlib.sha256(document.document_id.encode()).digest()


def _fingerprints(text: str) -> tuple[bytes, bytes]:
    """Returns digests of the whole text and of its start, whitespace and case left out."""
    plain = re.sub(r"\s+", " ", text).strip().lower()
    start = plain[120:1500] if len(plain) > 1500 else plain
    return tuple(hashlib.sha256(t.encode()).digest()[:16] for t in (plain, start))  # type: ignore[return-value]


def generated(category: Category, characters: int, seed: int) -> Iterator[Document]:
    """Yields synthetic documents of one category until they hold `characters` characters."""
    maker = _SYNTHETIC_SHARES[category][1]
    made = number = 0
    while made < characters:
        document_id = f"{SYNTHETIC}/{category}/{seed}/{number}"
        text = maker(random.Random(document_id))
        yield Document(
            document_id=document_id,
            category=category,
            split=split_of(document_id),
            source=SYNTHETIC,
            licence=SYNTHETIC_LICENCE,
            text=text,
        )
        made, number = made + len(text), number + 1


def select(documents: Iterable[Document], *, characters: int, seed: int) -> list[Document]:
    """Removes duplicates and keeps each category inside its share.

    Files are taken in the order of a hash of their name, so that which ones stay does not depend
    on the order of sources. No source takes more than a fifth of a category.

    Args:
        documents: from real sources, any order.
        characters: budget of the whole corpus.
        seed: of the synthetic part.

    Returns:
        Kept documents, ordered by category and name.
    """
    by_category: dict[Category, list[Document]] = {c: [] for c in CATEGORIES}
    for document in documents:
        by_category[document.category].append(document)
    seen: set[bytes] = set()
    kept: list[Document] = []
    for category in CATEGORIES:
        budget = int(characters * SHARES[category])
        share = _SYNTHETIC_SHARES[category][0] if category in _SYNTHETIC_SHARES else 0.0
        per_source: Counter[str] = Counter()
        for document in sorted(by_category[category], key=_rank):
            size = len(document.text)
            used = per_source[document.source]
            if used + size > _MOST_OF_ONE_SOURCE * budget or per_source.total() + size > budget:
                continue
            prints = _fingerprints(document.text)
            if not seen.isdisjoint(prints):
                continue
            seen.update(prints)
            per_source[document.source] += size
            kept.append(document)
        if share:
            room = min(int(share * budget), budget - per_source.total())
            kept.extend(generated(category, max(room, int(share * budget)), seed))
    return sorted(kept, key=lambda d: (CATEGORIES.index(d.category), d.document_id))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hybridspec.demo.corpus", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write (.jsonl.xz)")
    parser.add_argument("--megabytes", type=float, default=70.0, help="characters to keep, / 1e6")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic part")
    parser.add_argument("--archives", type=Path, help="folder of source distributions (.tar.gz)")
    parser.add_argument(
        "--site", type=Path, help="use this site-packages folder only, without the stdlib"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    options = _parser().parse_args(arguments)
    files: Iterator[SourceFile]
    archives = sorted(options.archives.glob("*.tar.gz")) if options.archives else []
    installed = installed_files(options.site)
    files = chain(() if options.site else stdlib_files(), installed, *map(archive_files, archives))
    documents = select(
        chain.from_iterable(map(documents_of, files)),
        characters=int(options.megabytes * 1e6),
        seed=options.seed,
    )
    digest = write_documents(options.out, documents)
    sizes, counts, sources = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    for document in documents:
        sizes[document.category] += len(document.text)
        counts[f"{document.category} {document.split}"] += 1
        sources[(document.source, document.licence)] += len(document.text)
    for category in CATEGORIES:
        held = [counts[f"{category} {s}"] for s in ("train", "calibration", "test")]
        print(f"{category:9s} {sizes[category] / 1e6:7.2f} MB, documents by split {held}")
    for (source, licence), size in sorted(sources.items()):
        print(f"source {source} ({licence}): {size / 1e6:.2f} MB")
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, sha256 {digest}")


if __name__ == "__main__":
    main()
