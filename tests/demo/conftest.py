from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from hybridspec.demo import synthetic
from hybridspec.demo.documents import CATEGORIES, Document, split_of, write_documents
from hybridspec.demo.presets import PairPreset, get_preset
from hybridspec.demo.target_module import Target
from hybridspec.demo.tokenization import train_tokenizer


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    makers = (synthetic.table, synthetic.settings, synthetic.contract)
    made = []
    for i, category in enumerate(CATEGORIES):
        for number in range(40):
            key = f"{category}/{number}"
            text = makers[i % 3](random.Random(key))
            made.append(Document(key, category, split_of(key), "synthetic", "Apache-2.0", text))
    return made


@pytest.fixture(scope="session")
def corpus_file(documents: list[Document], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl.xz"
    write_documents(file, documents)
    return file


@pytest.fixture(scope="session")
def preset() -> PairPreset:
    return get_preset("micro-test")


@pytest.fixture(scope="session")
def tokenizer(documents: list[Document], preset: PairPreset) -> Tokenizer:
    return train_tokenizer(documents, vocab=preset.vocab, seed=0)


@pytest.fixture
def target(preset: PairPreset) -> Target:
    target = Target(preset)
    target.initialise(5)
    with torch.no_grad():  # Larger embeddings and norms off one, so that mistakes show.
        target.embed_tokens.weight.mul_(20)
        for name, parameter in target.named_parameters():
            if "norm" in name:
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
            parameter.copy_(parameter.bfloat16().float())
    return target.eval().requires_grad_(False)
