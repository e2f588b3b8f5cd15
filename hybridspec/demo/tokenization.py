"""Byte-level BPE tokenizer of the pair: training, files and the ids that configurations need."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hybridspec.demo.documents import CATEGORIES, Document
from hybridspec.demo.presets import MAX_POSITIONS
from hybridspec.errors import ModelError

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
MASK = "<|MASK|>"
SPECIAL_TOKENS = (
    END_OF_TEXT, PAD, "<|im_start|>", "<|im_end|>", MASK,
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TokenIds:
    """Ids of the special tokens."""

    end_of_text: int
    pad: int
    message_end: int
    mask: int
    image: int
    video: int
    vision_start: int
    vision_end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenIds:
        """Looks the ids up.

        Raises:
            ModelError: a special token is not in the vocabulary.
        """
        names = (
            END_OF_TEXT, PAD, "<|im_end|>", MASK,
            "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
        )  # fmt: skip
        ids = {name: tokenizer.token_to_id(name) for name in names}
        missing = [name for name, number in ids.items() if number is None]
        if missing:
            raise ModelError(f"tokenizer lacks {missing}: train it with hybridspec.demo.train")
        return cls(*(number for number in ids.values() if number is not None))


def train_tokenizer(
    documents: Sequence[Document], *, vocab: int, seed: int, megabytes: float = 12.0
) -> Tokenizer:
    """Trains the tokenizer on training documents, an equal share of text from each category."""
    sample: list[str] = []
    for category in CATEGORIES:
        texts = [d.text for d in documents if d.category == category and d.split == "train"]
        random.Random(seed).shuffle(texts)
        room = megabytes * 1e6 / len(CATEGORIES)
        for text in texts:
            if room <= 0:
                break
            sample.append(text)
            room -= len(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    if tokenizer.get_vocab_size() > vocab:
        raise ModelError(
            f"tokenizer has {tokenizer.get_vocab_size()} tokens, the preset allows {vocab}: "
            "raise vocab (bytes and special tokens alone need 265)"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": list(SPECIAL_TOKENS[2:4] + SPECIAL_TOKENS[5:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads tokenizer.json.

    Raises:
        ModelError: there is none.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{file} does not exist: run hybridspec.demo.train --stage tokenizer")
    return Tokenizer.from_file(str(file))
