"""Questions with answers: reading any JSONL, finding the answer in a text, and grading it.

A row has `question`, `prompt` or `text`, and `answer`. Of an answer in GSM8K's format (Cobbe et
al., 2021) only what stands behind `####` counts. `match` says how to grade: `number` compares the
last number of the text (or the one behind `####`), `exact` its last line (or what stands behind
"answer is" or "answer:"), `prefix` its beginning. Left out: `number` where the answer is one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hybridspec.artifacts.digest import json_digest
from hybridspec.errors import PromptError

Match = Literal["number", "exact", "prefix"]
_MATCHES = ("number", "exact", "prefix")
_MARK = "####"
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")
_SAID = re.compile(r"answer\s*(?:is\s*:?|[:=])\s*", re.IGNORECASE)
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        expected: as graded: of GSM8K's answers what stands behind `####`.
    """

    prompt_id: str
    category: str
    text: str
    expected: str
    match: Match


def load_questions(path: Path, *, limit: int | None = None) -> list[Question]:
    """Read questions, one JSON object a line.

    Raises:
        PromptError: no file, no question, a line that is no object, a question or an answer that
            is missing or empty, an unknown `match`, or an id that occurs twice.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise PromptError(f"{path} is larger than 1 GiB: give fewer questions")
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise PromptError(
            f"{path} cannot be read ({error.strerror or error}); questions are a JSONL file: "
            "check the path"
        ) from error
    found: list[Question] = []
    seen: set[str] = set()
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            question = _question(line, f"{path} line {number}")
            if question.prompt_id in seen:
                raise PromptError(
                    f"{path} line {number}: id {question.prompt_id!r} occurs twice: name each once"
                )
            seen.add(question.prompt_id)
            found.append(question)
    if not found:
        raise PromptError(f"{path} holds no questions; at least one line is needed: add some")
    return found if limit is None else found[:limit]


def _question(line: bytes, place: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{place} is not JSON in UTF-8 ({error}): fix that line") from error
    if not isinstance(row, dict):
        raise PromptError(f"{place} holds a {type(row).__name__}; it must be an object: fix it")
    key = next((k for k in ("question", "prompt", "text") if row.get(k)), None)
    if key is None or not isinstance(row[key], str) or not row[key].strip():
        raise PromptError(
            f"{place} has no question; one of `question`, `prompt`, `text` must hold text: add it"
        )
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise PromptError(
            f"{place} has no answer; `answer` must hold text or a number: add it or drop the line"
        )
    expected = str(answer).rsplit(_MARK, 1)[-1].strip()
    if not expected:
        raise PromptError(f"{place} has an empty answer: add it or drop the line")
    match = row.get("match") or ("number" if as_number(expected) is not None else "exact")
    if match not in _MATCHES:
        raise PromptError(f"{place}: match {match!r} is unknown: use {', '.join(_MATCHES)}")
    if match == "number" and as_number(expected) is None:
        raise PromptError(f"{place}: answer {expected!r} is no number: use another match")
    text = f"Question: {row[key]}\nAnswer:" if key == "question" else row[key]
    name = row.get("prompt_id", row.get("id"))
    if name is None:
        name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Question(str(name), str(row.get("category") or "all"), text, expected, match)


def questions_digest(questions: Sequence[Question]) -> str:
    """Digest of questions and expected answers in their order."""
    return json_digest([[q.prompt_id, q.text, q.expected, q.match] for q in questions])


def as_number(text: str) -> float | None:
    """The number that a text is, currency signs, per cent signs and thousands aside; else None."""
    cleaned = text.strip().strip("$€£%").strip().rstrip(".")
    if not _NUMBER.fullmatch(cleaned):
        return None
    return float(cleaned.replace(",", ""))


def find_answer(text: str, match: Match) -> str:
    """The answer that a generated text gives, empty where it gives none."""
    if match == "prefix":
        return text.lstrip()
    if _MARK in text:
        text = text.split(_MARK, 1)[1].lstrip().split("\n", 1)[0]
    if match == "number":
        numbers = _NUMBER.findall(text)
        return numbers[-1] if numbers else ""
    said = _SAID.split(text)[-1] if _SAID.search(text) else text
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1 if said is text else 0] if lines else ""


def is_correct(text: str, question: Question) -> bool:
    """Whether a generated text answers the question."""
    given = find_answer(text, question.match)
    if question.match == "prefix":
        return given.startswith(question.expected)
    if question.match == "number":
        have, want = as_number(given), as_number(question.expected)
        return have is not None and have == want
    return _plain(given) == _plain(question.expected)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .!\"'`*")
