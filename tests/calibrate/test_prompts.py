"""Prompt files: what is read, what is refused and with which line."""

from __future__ import annotations

import importlib.util
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.calibrate.prompts import Prompt, assign_splits, load_prompts, prompts_digest
from hybridspec.errors import EnvironmentMissing, PromptError


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_keys_and_defaults(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl",
        {"text": "one", "prompt_id": "a", "category": "code", "split": "test"},
        {"prompt": "two", "id": 7, "extra": [1]},
        {"prompt": "three"},
    )
    one, two, three = load_prompts(path, test_fraction=0.0)
    assert one == Prompt("a", "code", "test", "one")
    assert two == Prompt("7", "all", "calibration", "two")
    assert three.prompt_id
    assert load_prompts(path, test_fraction=0.0)[2].prompt_id == three.prompt_id


def test_blank_lines_bom_and_crlf_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n\n{"text": "b"}')
    assert [p.text for p in load_prompts(path)] == ["a", "b"]


def test_parquet_gives_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "id": f"i{i}", "category": "c"} for i in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    lines = load_prompts(write_lines(tmp_path / "p.jsonl", *rows))
    assert load_prompts(tmp_path / "p.parquet") == lines
    assert Counter(p.split for p in lines) == {"calibration": 4, "test": 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no prompts"),
        (b"\n\n", "has no prompts"),
        (b'{"text": "a"}\n{"text": "  "}', "line 2 is empty"),
        (b'{"text": "a"}\n{"text": "\xff\xfe"}', r"line 2 is not UTF-8 \(byte 11: 0xff\)"),
        (b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        (b'{"text": "a"}\n["b"]', "line 2 holds a list"),
        (b'{"texts": "a"}', "line 1 has no text"),
        (b'{"text": null}', "line 1 has no text"),
        (b'{"text": 3}', "line 1 has no text"),
        (b'{"text": "' + b"x" * 101 + b'"}', "has 101 characters; at most 100"),
        (b'{"text": "a"}\n{"text": "b"}\n{"text": "a"}', "line 3 has the same text as .*line 1"),
        (b'{"text": "a", "id": 1}\n{"text": "b", "id": "1"}', "line 2 has the same id as .*line 1"),
        (b'{"text": "a", "split": "train"}', "split 'train'; allowed are calibration and test"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b"[" * 50_000, "line 1 is not JSON"),
    ],
)
def test_jsonl_refusals(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(data)
    with pytest.raises(PromptError, match=message):
        load_prompts(tmp_path / "p.jsonl", max_characters=100)


def test_parquet_refusals(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"body": ["a"]}), path)
    with pytest.raises(PromptError, match=r"has columns body; a text column named"):
        load_prompts(path)
    pq.write_table(pa.table({"text": ["a", None]}), path)
    with pytest.raises(PromptError, match="row 1 has no text"):
        load_prompts(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(PromptError, match="not a readable Parquet file"):
        load_prompts(path)


def test_json_list_gives_the_same_prompts(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}"} for i in range(4)]
    (tmp_path / "p.json").write_text(json.dumps(rows, indent=1))
    assert load_prompts(tmp_path / "p.json") == load_prompts(
        write_lines(tmp_path / "p.jsonl", *rows)
    )
    for text, message in (("{}", "one list"), ("[1]", "one list"), ("[", "is not JSON")):
        (tmp_path / "p.json").write_text(text)
        with pytest.raises(PromptError, match=message):
            load_prompts(tmp_path / "p.json")


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nowhere.jsonl does not exist"):
        load_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(PromptError, match="is not a file"):
        load_prompts(tmp_path)
    with pytest.raises(PromptError, match="does not exist"):
        load_prompts("just-words")


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is not None, reason="`datasets` is installed"
)
def test_data_set_names_need_the_datasets_package() -> None:
    with pytest.raises(EnvironmentMissing, match=r"needs the package `datasets`.*extra `hub`"):
        load_prompts("owner/name:configuration")


def make_prompts(sizes: dict[str, int]) -> list[Prompt]:
    return [Prompt(f"{c}{i}", c, "", f"{c} {i}") for c, n in sizes.items() for i in range(n)]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 12), min_size=1),
    st.floats(0.01, 0.99),
    st.randoms(use_true_random=False),
)
def test_splits_are_stratified_and_ignore_order(
    sizes: dict[str, int], fraction: float, shuffler: random.Random
) -> None:
    prompts = make_prompts(sizes)
    split = {p.prompt_id: p.split for p in assign_splits(prompts, test_fraction=fraction)}
    shuffled = list(prompts)
    shuffler.shuffle(shuffled)
    again = {p.prompt_id: p.split for p in assign_splits(shuffled, test_fraction=fraction)}
    assert split == again
    for category, size in sizes.items():
        held_out = sum(split[f"{category}{i}"] == "test" for i in range(size))
        assert abs(held_out - size * fraction) <= 1
        if size >= 2:
            assert 0 < held_out < size


def test_given_splits_are_kept() -> None:
    prompts = [Prompt("a", "c", "test", "x"), Prompt("b", "c", "", "y"), Prompt("c", "c", "", "z")]
    assert assign_splits(prompts, test_fraction=0.0)[0].split == "test"
    with pytest.raises(PromptError, match="must lie in"):
        assign_splits(prompts, test_fraction=1.5)


def test_limit_is_even_over_categories_and_keeps_order(tmp_path: Path) -> None:
    rows = [{"text": f"{c}{i}", "category": c} for c in "abc" for i in range(5)]
    path = write_lines(tmp_path / "p.jsonl", *rows)
    assert [p.text for p in load_prompts(path, limit=4)] == ["a0", "a1", "b0", "c0"]
    assert len(load_prompts(path, limit=99)) == 15
    with pytest.raises(PromptError, match="limit = 0"):
        load_prompts(path, limit=0)


def test_digest_follows_content_and_order() -> None:
    prompts = assign_splits(make_prompts({"a": 3}), test_fraction=0.5)
    assert prompts_digest(prompts) == prompts_digest(list(prompts))
    assert prompts_digest(prompts) != prompts_digest(prompts[::-1])
