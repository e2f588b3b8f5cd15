"""Calibration and test prompts: `python -m hybridspec.demo.prompts --corpus FILE --out FILE`.

Prompts are cut from held-out documents only, 40 a category and split. One that shares long word
runs with training text, or with another prompt, is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from hybridspec.demo.documents import CATEGORIES, Category, Document, Split, read_documents
from hybridspec.demo.tokenization import load_tokenizer
from hybridspec.errors import NotEnoughData, PromptError

PER_CATEGORY = 40
_SHORTEST, _LONGEST = 64, 110
_SHINGLE = 8
_CANDIDATES = 20
_MOST_OF_ONE_DOCUMENT = 4
_MOST_SEEN: dict[Category, float] = {"legal": 0.85, "config": 0.5, "tables": 0.5}
_MOST_REPEATED: dict[Category, float] = {"legal": 0.6}
_ASSISTANT = "<|im_start|>assistant\n"


@dataclass(frozen=True)
class Prompt:
    """One prompt as text.

    Attributes:
        prompt_id: unique name, `category-split-number`.
        category: one of the seven.
        split: `calibration` or `test`.
        text: ready to be encoded; a chat prompt ends with the header of the assistant's turn.
        source: distribution and version that the text comes from, or `synthetic`.
        licence: licence of that source.
    """

    prompt_id: str
    category: Category
    split: Split
    text: str
    source: str
    licence: str


def read_prompts(file: Path) -> list[Prompt]:
    """Reads prompts.jsonl.

    Raises:
        PromptError: the file is missing or a line is not a prompt.
    """
    try:
        with file.open(encoding="utf-8") as stream:
            return [Prompt(**json.loads(line)) for line in stream]
    except (OSError, ValueError, TypeError) as error:
        raise PromptError(f"{file} is not a prompt file ({error}): build it again") from error


def _shingles(text: str) -> Iterator[int]:
    words = re.findall(r"\w+", text.lower())
    for i in range(len(words) - _SHINGLE + 1):
        yield hash(tuple(words[i : i + _SHINGLE]))


def _cut(document: Document, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    """Returns a piece of 64-110 tokens that begins at a line start, or None."""
    text = document.text
    wanted = rng.randint(_SHORTEST, _LONGEST)
    if document.category == "chat":
        parts = text.split(_ASSISTANT)
        turns = rng.randint(1, max(1, len(parts) - 1))
        piece = _ASSISTANT.join(parts[:turns]) + _ASSISTANT if len(parts) > 1 else ""
        length = len(tokenizer.encode(piece).ids)
        return piece if _SHORTEST // 2 <= length <= 3 * _LONGEST // 2 else None
    if document.category != "tables" and rng.random() < 0.7:
        start = text.find("\n", rng.randrange(max(1, len(text) * 2 // 3))) + 1
        text = text[start:]
    encoding = tokenizer.encode(text[: 12 * wanted])
    if len(encoding.ids) < wanted:
        return None
    piece = text[: encoding.offsets[wanted - 1][1]]
    return piece if len(piece.strip()) > wanted else None


def _candidates(
    documents: Sequence[Document], tokenizer: Tokenizer, category: Category, split: Split, seed: int
) -> list[tuple[Document, str]]:
    rng = random.Random(f"{seed}/{category}/{split}")
    pool = [
        d
        for d in documents
        # Nobody asks what a test function does.
        if d.category == category
        and d.split == split
        and not (category == "chat" and "/test" in d.document_id)
    ]
    rng.shuffle(pool)
    found: list[tuple[Document, str]] = []
    for attempt in range(_CANDIDATES * PER_CATEGORY):
        if not pool or len(found) >= _CANDIDATES * PER_CATEGORY:
            break
        document = pool[attempt % len(pool)]
        piece = _cut(document, tokenizer, rng)
        if piece:
            found.append((document, piece))
    return found


def build_prompts(
    documents: Sequence[Document], tokenizer: Tokenizer, *, seed: int
) -> list[Prompt]:
    """Returns 40 prompts for each category and split.

    Raises:
        NotEnoughData: the held-out documents do not hold that many different ones.
    """
    splits: tuple[Split, ...] = ("calibration", "test")
    pools: dict[tuple[Category, Split], list[tuple[Document, str]]] = {
        (category, split): _candidates(documents, tokenizer, category, split, seed)
        for split in splits
        for category in CATEGORIES
    }
    wanted = {s for found in pools.values() for _, piece in found for s in _shingles(piece)}
    known: set[int] = set()
    for document in documents:
        if document.split == "train":
            known.update(wanted.intersection(_shingles(document.text)))
    prompts: list[Prompt] = []
    used: set[int] = set()
    texts: set[str] = set()
    for (category, split), found in pools.items():
        number = 0
        per_document: Counter[str] = Counter()
        most = _MOST_SEEN.get(category, 0.25)
        for document, piece in found:
            shingles = set(_shingles(piece))
            seen = len(shingles & known) / max(1, len(shingles))
            repeated = len(shingles & used) / max(1, len(shingles))
            if (
                seen > most
                or repeated > _MOST_REPEATED.get(category, 0.25)
                or piece in texts
                or number == PER_CATEGORY
            ):
                continue
            if per_document[document.document_id] >= _MOST_OF_ONE_DOCUMENT:
                continue
            per_document[document.document_id] += 1
            used |= shingles
            texts.add(piece)
            prompts.append(
                Prompt(
                    prompt_id=f"{category}-{split}-{number:02d}",
                    category=category,
                    split=split,
                    text=piece,
                    source=document.source,
                    licence=document.licence,
                )
            )
            number += 1
        if number < PER_CATEGORY:
            raise NotEnoughData(
                f"{category}/{split}: {number} of {PER_CATEGORY} prompts from {len(found)} "
                "candidates: use a larger corpus"
            )
    return prompts


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m hybridspec.demo.prompts", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="file of hybridspec.demo.corpus")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="prompts.jsonl to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    prompts = build_prompts(
        read_documents(options.corpus), load_tokenizer(options.tokenizer), seed=options.seed
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as stream:
        for prompt in prompts:
            stream.write(json.dumps(asdict(prompt), ensure_ascii=False) + "\n")
    print(f"{options.out}: {len(prompts)} prompts, {options.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
