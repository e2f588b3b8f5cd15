from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import hybridspec.demo.prompts
from hybridspec.demo.documents import CATEGORIES
from hybridspec.demo.prompts import Prompt, read_prompts
from hybridspec.demo.sources import ALLOWED, SYNTHETIC, mentions_copyleft
from hybridspec.demo.tokenization import load_tokenizer
from hybridspec.errors import PromptError

PAIR = Path(hybridspec.demo.prompts.__file__).parent / "pair"
FILE = PAIR / "prompts.jsonl"


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return read_prompts(FILE)


def test_forty_prompts_a_category_and_split(prompts: list[Prompt]) -> None:
    counts = Counter((p.category, p.split) for p in prompts)
    assert counts == {(c, s): 40 for c in CATEGORIES for s in ("calibration", "test")}
    assert len({p.prompt_id for p in prompts}) == len({p.text for p in prompts}) == 560
    assert FILE.stat().st_size <= 250_000


def test_sources_are_allowed(prompts: list[Prompt]) -> None:
    for p in prompts:
        name = p.source.split()[0]
        assert p.licence == ("Apache-2.0" if name == SYNTHETIC else ALLOWED[name])
        assert not mentions_copyleft(p.text)


def test_chat_prompts_end_with_the_assistant_header(prompts: list[Prompt]) -> None:
    for p in prompts:
        chat = p.category == "chat"
        assert p.text.startswith("<|im_start|>user\n") == chat
        assert p.text.endswith("<|im_end|>\n<|im_start|>assistant\n") == chat


def test_prompts_are_long_enough_for_every_tokenizer_in_the_repository(
    prompts: list[Prompt],
) -> None:
    for file in PAIR.glob("*/tokenizer.json"):
        tokenizer = load_tokenizer(file.parent)
        lengths = [len(tokenizer.encode(p.text).ids) for p in prompts]
        assert min(lengths) >= 32
        assert max(lengths) <= 256


@pytest.mark.parametrize("content", ['{"prompt_id": "a"}\n', "[]\n", "{"])
def test_damaged_prompt_files_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(PromptError):
        read_prompts(file)
