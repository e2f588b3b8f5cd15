"""Prompts to record rounds on: reading, refusing, and splitting them by prompt."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from hybridspec.artifacts.digest import json_digest
from hybridspec.errors import EnvironmentMissing, PromptError

SPLITS = ("calibration", "test")
MAX_CHARACTERS = 200_000
DEFAULT_TEST_FRACTION = 0.3
_TEXT_KEYS = ("text", "prompt")
_ID_KEYS = ("prompt_id", "id")
_DATASET_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        prompt_id: unique in its set.
        category: free word; metrics are also given a category.
        split: `calibration` or `test`.
    """

    prompt_id: str
    category: str
    split: str
    text: str


def load_prompts(
    source: str | Path,
    *,
    test_fraction: float = DEFAULT_TEST_FRACTION,
    max_characters: int = MAX_CHARACTERS,
    limit: int | None = None,
) -> list[Prompt]:
    """Load prompts from a JSONL, JSON or Parquet file, or from a data set's name.

    Each row has `text` or `prompt`, and optionally `prompt_id` or `id`, `category`, and `split`.
    Rows without an id get one from their text; rows without a split get one by `assign_splits`.

    Args:
        source: a path ending in `.jsonl`, `.json` (one list) or `.parquet`, or
            `owner/name[:configuration[:split]]` for the `datasets` package.
        test_fraction: share of prompts to hold out where the source gives no split.
        max_characters: longest prompt allowed.
        limit: keep this many prompts, evenly over the categories; None keeps all.

    Raises:
        PromptError: no prompts, or one that is empty, too long, repeated or not readable.
        EnvironmentMissing: a data set's name where `datasets` is missing or cannot reach it.
    """
    prompts = read_prompts(source, max_characters=max_characters)
    return take_prompts(prompts, test_fraction=test_fraction, limit=limit)


def read_prompts(source: str | Path, *, max_characters: int = MAX_CHARACTERS) -> list[Prompt]:
    """As `load_prompts`, but all of them, and `split` is empty where the source names none."""
    path = Path(source)
    if path.is_file():
        readers = {".parquet": _parquet_rows, ".json": _json_rows}
        rows = readers.get(path.suffix, _jsonl_rows)(path)
    elif path.exists():
        raise PromptError(f"{path} is not a file; give a .jsonl or .parquet file of prompts")
    elif path.suffix in (".jsonl", ".parquet", ".json") or not _DATASET_NAME.fullmatch(str(source)):
        raise PromptError(
            f"{source} does not exist; give a .jsonl or .parquet file of prompts, or a data set as "
            "owner/name"
        )
    else:
        rows = _dataset_rows(str(source))
    return _prompts(rows, source=str(source), max_characters=max_characters)


def take_prompts(
    prompts: Sequence[Prompt], *, test_fraction: float, limit: int | None
) -> list[Prompt]:
    """Of prompts as `read_prompts` gives them those that `limit` leaves, each with a split."""
    if limit is not None:
        prompts = _evenly(prompts, limit)
    return assign_splits(prompts, test_fraction=test_fraction)


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Digest of prompts in their order: ids, categories, splits and texts."""
    return json_digest([[p.prompt_id, p.category, p.split, p.text] for p in prompts])


def assign_splits(prompts: Sequence[Prompt], *, test_fraction: float) -> list[Prompt]:
    """Give every prompt without a split one, by a hash of its id within its category.

    The same prompts get the same splits whatever their order. Of two or more such prompts in a
    category at least one lands in each split, if the fraction lies strictly between 0 and 1.
    """
    if not 0.0 <= test_fraction <= 1.0:
        raise PromptError(f"test fraction {test_fraction} must lie in 0..1")
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        if not prompt.split:
            groups[prompt.category].append(prompt)
    test_ids = set()
    for group in groups.values():
        ranked = sorted((p.prompt_id for p in group), key=_hash)
        num_test = round(len(ranked) * test_fraction)
        if len(ranked) >= 2 and 0.0 < test_fraction < 1.0:
            num_test = min(max(num_test, 1), len(ranked) - 1)
        test_ids.update(ranked[:num_test])
    return [
        p if p.split else replace(p, split="test" if p.prompt_id in test_ids else "calibration")
        for p in prompts
    ]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _evenly(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The first prompts of every category in turn, in their original order."""
    seen: dict[tuple[str, str], int] = defaultdict(int)
    turns = []
    for index, prompt in enumerate(prompts):
        key = (prompt.category, prompt.split)
        turns.append((seen[key], index))
        seen[key] += 1
    kept = sorted(index for _, index in sorted(turns)[: max(limit, 0)])
    if not kept:
        raise PromptError(f"limit = {limit} leaves no prompt; keep at least 1")
    return [prompts[index] for index in kept]


Row = tuple[str, Mapping[str, Any]]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}") from error


def _json_rows(path: Path) -> Iterable[Row]:
    try:
        rows = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise PromptError(
            f"{path} is not JSON in UTF-8 ({error}); give a list of objects, or name the file "
            ".jsonl if it has one object a line"
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PromptError(f"{path} must hold one list of objects with `text` or `prompt`")
    return [(f"{path} item {index}", row) for index, row in enumerate(rows)]


def _jsonl_rows(path: Path) -> Iterable[Row]:
    data = _read(path)
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        place = f"{path} line {number}"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"{place} is not UTF-8 (byte {error.start + 1}: 0x{raw[error.start]:02x}); prompts "
                "must be UTF-8: convert the file"
            ) from error
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptError(
                f"{place} is not JSON ({error}); every line must be one JSON object: fix that line"
            ) from error
        if not isinstance(row, dict):
            raise PromptError(
                f"{place} holds a {type(row).__name__}; every line must be one JSON object with "
                "`text` or `prompt`"
            )
        yield place, row


def _parquet_rows(path: Path) -> Iterable[Row]:
    try:
        table = pq.ParquetFile(path).read(use_threads=False)  # see artifacts/store.py
        wanted = [
            name
            for name in table.column_names
            if name in (*_TEXT_KEYS, *_ID_KEYS, "category", "split")
        ]
        rows = table.select(wanted).to_pylist()
    # Damaged bytes make Arrow raise many types.
    except Exception as error:
        raise PromptError(
            f"{path} is not a readable Parquet file ({type(error).__name__}); give a Parquet file "
            "with a `text` or `prompt` column"
        ) from error
    if not any(key in wanted for key in _TEXT_KEYS):
        raise PromptError(
            f"{path} has columns {', '.join(table.column_names) or '(none)'}; a text column named "
            "`text` or `prompt` is needed: rename yours"
        )
    return [(f"{path} row {index}", row) for index, row in enumerate(rows)]


def _dataset_rows(name: str) -> Iterable[Row]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise EnvironmentMissing(
            f"prompts {name!r} name a data set, which needs the package `datasets`: "
            "pip install datasets (the extra `hub` has it), or give a .jsonl or .parquet file"
        ) from error
    repository, _, rest = name.partition(":")
    configuration, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(repository, configuration or None, split=split or "test")
    # Network, permission, and missing data sets each raise types of several packages.
    except Exception as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EnvironmentMissing(
            f"data set {name!r} could not be loaded ({detail}): check the name and the network, or "
            "give a .jsonl or .parquet file"
        ) from error
    return [(f"{name} row {index}", _first_turn(row)) for index, row in enumerate(rows)]


def _first_turn(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multi-turn sets keep their prompts in `turns`; rounds are recorded on the first one."""
    turns = row.get("turns")
    known = {key: row[key] for key in (*_TEXT_KEYS, *_ID_KEYS, "category") if key in row}
    if isinstance(turns, list) and turns and not any(key in row for key in _TEXT_KEYS):
        return {**known, "text": turns[0]}
    return known


def _prompts(rows: Iterable[Row], *, source: str, max_characters: int) -> list[Prompt]:
    prompts: list[Prompt] = []
    places_by_text: dict[str, str] = {}
    places_by_id: dict[str, str] = {}
    for place, row in rows:
        prompt = _prompt(place, row, max_characters)
        for kind, key, places in (
            ("text", prompt.text, places_by_text),
            ("id", prompt.prompt_id, places_by_id),
        ):
            if key in places:
                raise PromptError(
                    f"{place} has the same {kind} as {places[key]}; every prompt may occur once: "
                    "remove one of them"
                )
            places[key] = place
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"{source} has no prompts; at least one is needed")
    return prompts


def _prompt(place: str, row: Mapping[str, Any], max_characters: int) -> Prompt:
    text = next((row[key] for key in _TEXT_KEYS if row.get(key) is not None), None)
    if not isinstance(text, str):
        raise PromptError(
            f"{place} has no text; a string named `text` or `prompt` is needed: add it or remove "
            "the row"
        )
    if not text.strip():
        raise PromptError(f"{place} is empty; a prompt needs at least one visible character")
    if len(text) > max_characters:
        raise PromptError(
            f"{place} has {len(text)} characters; at most {max_characters} are allowed: shorten it "
            "or remove the row"
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise PromptError(f"{place} has a lone surrogate, which is not text: fix its \\u escapes")
    prompt_id = next((row[key] for key in _ID_KEYS if row.get(key) is not None), None)
    split = row.get("split") or ""
    if split and split not in SPLITS:
        raise PromptError(f"{place} has split {split!r}; allowed are {' and '.join(SPLITS)}")
    return Prompt(
        prompt_id=str(prompt_id) if prompt_id is not None else _hash(text)[:12],
        category=str(row.get("category") or "all"),
        split=split,
        text=text,
    )
