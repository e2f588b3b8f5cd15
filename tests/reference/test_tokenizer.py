from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import ModelError, PromptError
from hybridspec.reference.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2].parent / "shared" / "pairs" / "micro" / "target"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"needs the trained micro pair in {FOLDER}"
)
EOS, IM_START, IM_END = 0, 2, 3
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?  é😀"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": 'quote " and <b> & \\'},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(FOLDER / name, tmp_path / name)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def test_agrees_with_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(FOLDER)
    text = tokenizer.apply_chat_template(CHAT)
    assert text == oracle.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special=False) == text


def test_specials_of_the_template_become_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(tokenizer.apply_chat_template(CHAT[:2]))
    assert ids.count(IM_START) == 3
    assert ids.count(IM_END) == 2
    assert ids[0] == IM_START


def test_ends_of_answers(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (EOS,)
    assert tokenizer.end_of_turn_ids == (IM_END,)


def test_ids_without_text_decode_to_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("plain")
    assert tokenizer.decode([*ids, tokenizer.vocab_size + 7, EOS]) == "plain"


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_template_from_its_own_file_wins(copied: Path) -> None:
    (copied / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.content | tojson }}]{% endfor %}{{ eos_token }}"
    )
    tokenizer = Tokenizer.load(copied)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "<é>"}]) == (
        '["<é>"]<|endoftext|>'
    )
    assert tokenizer.end_of_turn_ids == ()


def test_named_templates_use_the_default(copied: Path) -> None:
    named = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D{{ messages | length }}"},
    ]
    edit(copied / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.load(copied).apply_chat_template(CHAT) == "D4"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('system first') }}", "system first"),
        ("{{ messages[9].content.strip() }}", "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
    ],
)
def test_template_refusals(copied: Path, template: str, words: str) -> None:
    edit(copied / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer.load(copied)
    with pytest.raises(PromptError, match=words):
        tokenizer.apply_chat_template(CHAT)


def test_no_template(copied: Path) -> None:
    edit(copied / "tokenizer_config.json", chat_template=None)
    with pytest.raises(PromptError, match="/v1/completions"):
        Tokenizer.load(copied).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "does not exist"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer.json", '{"version": "1.0", "added', "cannot be read"),
        ("tokenizer_config.json", "[1]", "expected an object"),
        ("tokenizer_config.json", '{"a": ', "is not JSON"),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}', "chat template line 1"),
        ("generation_config.json", b"\xff\xfe", "cannot be read"),
    ],
)
def test_damaged_files_are_refused(
    copied: Path, name: str, content: str | bytes | None, words: str
) -> None:
    path = copied / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=words):
        Tokenizer.load(copied)


def test_other_decoders_are_refused(copied: Path) -> None:
    edit(copied / "tokenizer.json", decoder={"type": "Fuse"})
    with pytest.raises(ModelError, match="'Fuse'"):
        Tokenizer.load(copied)


ANY_IDS = st.lists(st.integers(0, 2100), max_size=40)
TEXTS = st.text(max_size=30)


@settings(max_examples=300, deadline=None)
@given(ids=ANY_IDS)
def test_stream_of_any_tokens_equals_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = tokenizer.stream()
    pieces = [stream.push([index]) for index in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_stream_of_text_never_sends_a_broken_character(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pieces = [stream.push(ids[start:end]) for start, end in itertools.pairwise(bounds)]
    sent = "".join(pieces)
    assert sent + stream.flush() == tokenizer.decode(ids)
    assert "\ufffd" not in sent or "\ufffd" in text


def test_endless_garbage_is_not_held_back(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("😀")
    assert len(smile) > 1
    stream = tokenizer.stream()
    sent = [stream.push([smile[-1]]) for _ in range(50)]
    assert "".join(sent) == "\ufffd" * 49
    assert stream.flush() == "\ufffd"
