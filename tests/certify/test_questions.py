"""Reading and grading questions; everything that cannot be graded is refused by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridspec.certify.questions import (
    Question,
    as_number,
    find_answer,
    is_correct,
    load_questions,
    questions_digest,
)
from hybridspec.errors import PromptError


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_gsm8k_rows(tmp_path: Path) -> None:
    answer = "She eats 3 of 16.\nShe sells <<16-3=13>>13 eggs.\n#### 1,013"
    path = write(tmp_path / "q.jsonl", {"question": "How many?", "answer": answer}, "")
    (question,) = load_questions(path)
    assert question.text == "Question: How many?\nAnswer:"
    assert (question.expected, question.match) == ("1,013", "number")
    for right in ("so 1013", "it is $1,013.", "#### 1013\nQuestion: 5", "1,013.00 dollars"):
        assert is_correct(right, question), right
    for wrong in ("", "13", "1013 of 2000", "none", "#### 12\n1013"):
        assert not is_correct(wrong, question), wrong


@pytest.mark.parametrize(
    ("text", "match", "answer"),
    [
        ("The answer is Paris.\nNext", "exact", "Paris."),
        ("thinking\n\nParis\n", "exact", "Paris"),
        ("#### Paris\nmore", "exact", "Paris"),
        ("", "exact", ""),
        ("  12,x", "prefix", "12,x"),
        ("-3.5 and 1e3", "number", "1e3"),
        ("no digits", "number", ""),
    ],
)
def test_answers_are_found(text: str, match: Any, answer: str) -> None:
    assert find_answer(text, match) == answer


def test_matches_grade_as_said() -> None:
    def question(expected: str, match: Any) -> Question:
        return Question("q", "all", "?", expected, match)

    assert is_correct("The answer is: **paris**.", question("Paris", "exact"))
    assert not is_correct("Paris or Rome", question("Paris", "exact"))
    assert is_correct("\n12,a\n13", question("12,", "prefix"))
    assert not is_correct("112,a", question("12,", "prefix"))


@pytest.mark.parametrize(
    ("text", "number"), [("$1,000", 1000.0), ("50%", 50.0), ("3.", 3.0), ("x3", None), ("", None)]
)
def test_numbers(text: str, number: float | None) -> None:
    assert as_number(text) == number


def test_ids_and_digest(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": i, "id": i, "category": "c"} for i in range(3)]
    found = load_questions(write(tmp_path / "q.jsonl", *rows))
    assert [q.prompt_id for q in found] == ["0", "1", "2"]
    assert found[1].expected == "1"
    assert load_questions(tmp_path / "q.jsonl", limit=2) == found[:2]
    assert questions_digest(found) != questions_digest(found[:2])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "holds no questions"),
        ("{", "line 1 is not JSON"),
        ("[1]", "holds a list"),
        ({"answer": 1}, "has no question"),
        ({"prompt": "  ", "answer": 1}, "has no question"),
        ({"prompt": "p"}, "has no answer"),
        ({"prompt": "p", "answer": None}, "has no answer"),
        ({"prompt": "p", "answer": True}, "has no answer"),
        ({"prompt": "p", "answer": "why\n#### "}, "empty answer"),
        ({"prompt": "p", "answer": "a", "match": "fuzzy"}, "'fuzzy' is unknown"),
        ({"prompt": "p", "answer": "a", "match": "number"}, "is no number"),
    ],
)
def test_what_cannot_be_graded_is_refused(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        load_questions(write(tmp_path / "q.jsonl", row))


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot be read"):
        load_questions(tmp_path / "nowhere.jsonl")
    row = {"prompt": "p", "answer": 1, "id": "same"}
    with pytest.raises(PromptError, match="line 2: id 'same' occurs twice"):
        load_questions(write(tmp_path / "q.jsonl", row, row))
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff", "answer": 1}')
    with pytest.raises(PromptError, match="not JSON in UTF-8"):
        load_questions(tmp_path / "bytes.jsonl")
