"""Turns source files into documents of the seven categories; dialogues come from docstrings."""

from __future__ import annotations

import ast
import inspect
import random
import re
from collections.abc import Iterator

from hybridspec.demo.documents import Category, Document, split_of
from hybridspec.demo.sources import SourceFile

_CONFIG = frozenset(["json", "toml", "cfg", "ini", "yaml", "yml", "in", "editorconfig"])
_TABLES = frozenset(["csv", "tsv", "dat"])
_LIMITS: dict[Category, tuple[int, int]] = {
    "code": (200, 40_000),
    "prose": (200, 40_000),
    "legal": (200, 20_000),
    "config": (120, 8_000),
    "tables": (120, 8_000),
    "markdown": (200, 40_000),
    "chat": (120, 6_000),
}
_QUESTIONS = (
    "What does `{name}` do?",
    "Explain the {kind} `{name}`.",
    "How do I use `{name}` from {module}?",
    "Describe {module}.{name} briefly.",
    "When should I use `{name}`?",
    "I found {kind} `{name}` in {module}. What is it for?",
    "Can you summarise the documentation of `{name}`?",
    "What are the arguments of `{name}`, and what do they mean?",
)
_FOLLOW_UPS = ("And `{name}`?", "Thanks. What about `{name}`?", "What is `{name}` then?")


def chat_turn(role: str, content: str) -> str:
    """Returns one ChatML message, exactly as the tokenizer's chat template writes it."""
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _category(file: SourceFile) -> Category | None:
    name = file.path.rsplit("/", 1)[-1].lower()
    suffix = name.rsplit(".", 1)[-1] if "." in name else ""
    if suffix in {"py", "pyi"}:
        return "code"
    if "licen" in name or name.startswith(("notice", "copying", "copyright")):
        return "legal" if suffix not in _CONFIG else None
    if suffix == "rst":
        return "prose"
    if suffix == "md" or name in {"metadata", "pkg-info"}:
        return "markdown"
    if suffix in _CONFIG:
        return "config"
    if suffix in _TABLES:
        return "tables"
    if suffix == "txt":
        head = file.text[:2000]
        digits = sum(map(str.isdigit, head)) / len(head)
        spaces = head.count(" ") / len(head)
        if digits > 0.3:
            return "tables"
        return "prose" if digits < 0.08 and spaces > 0.08 else None
    return None


def _docstrings(text: str) -> list[tuple[str, str, str]]:
    """Returns (kind, name, docstring) of every documented function and class."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) >= 60:
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                found.append((kind, node.name, inspect.cleandoc(doc)))
    return found


def _answer(doc: str, limit: int) -> str:
    kept = ""
    for paragraph in re.split(r"\n\s*\n", doc):
        if kept and len(kept) + len(paragraph) > limit:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    return kept[: 2 * limit].strip()


def _dialogues(module: str, docs: list[tuple[str, str, str]], rng: random.Random) -> Iterator[str]:
    position = 0
    while position < len(docs):
        turns = rng.randint(1, 3)
        text = ""
        for turn, (kind, name, doc) in enumerate(docs[position : position + turns]):
            forms = _QUESTIONS if turn == 0 or rng.random() < 0.5 else _FOLLOW_UPS
            question = rng.choice(forms).format(kind=kind, name=name, module=module)
            text += chat_turn("user", question)
            text += chat_turn("assistant", _answer(doc, rng.choice([250, 500, 900])))
        yield text
        position += turns


def _document(
    file: SourceFile, category: Category, part: str, text: str, split_key: str
) -> Document | None:
    low, high = _LIMITS[category]
    text = text.strip("\n")[:high] + "\n"
    if len(text) < low:
        return None
    return Document(
        document_id=f"{file.source}/{file.path}{part}",
        category=category,
        split=split_of(split_key),
        source=file.source,
        licence=file.licence,
        text=text,
    )


def documents_of(file: SourceFile) -> Iterator[Document]:
    """Yields the documents made of one file: itself, and prose and dialogues from docstrings."""
    category = _category(file)
    if category is None:
        return
    key = f"{file.source.split(' ')[0]}/{file.path}"
    text = file.text
    if category == "markdown" and file.path.lower().endswith(("metadata", "pkg-info")):
        text = text.partition("\n\n")[2]
    document = _document(file, category, "", text, key)
    if document:
        yield document
    if category != "code":
        return
    docs = _docstrings(text)
    rng = random.Random(key)
    long_docs = [doc for _, _, doc in docs[1::2] if len(doc) > 160]
    if long_docs:
        prose = _document(file, "prose", "#docstrings", "\n\n".join(long_docs), key)
        if prose:
            yield prose
    module = re.sub(r"(/__init__)?\.pyi?$", "", file.path).replace("/", ".")
    module = re.sub(r"^(src|lib)\.", "", module)
    for i, dialogue in enumerate(_dialogues(module, docs[::2], rng)):
        chat = _document(file, "chat", f"#dialogue{i}", dialogue, key)
        if chat:
            yield chat
