"""Text in and out: `tokenizer.json` through `tokenizers`, chat templates through sandboxed jinja2.

Byte-level BPE only, which is what the Qwen family ships: every token is a run of bytes, so text may
end inside a character at any token boundary, and `DetokenStream` holds such an end back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from hybridspec.errors import ModelError, PromptError
from hybridspec.reference.chat_template import ChatTemplate

REPLACEMENT = "\ufffd"
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_TURN_PROBE = "hybridspec-turn-probe"


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of one model folder.

    Attributes:
        eos_token_ids: ids that end an answer: those of `generation_config.json` (or `config.json`)
            and the tokenizer's own `eos_token`, ascending.
        end_of_turn_ids: ids that the chat template writes right after an assistant's message
            (`<|im_end|>` of Qwen); they end a chat answer even where they are no `eos`.
        special_tokens: names such as `eos_token` and their text, as templates see them.
    """

    folder: Path
    backend: tokenizers.Tokenizer
    chat_template: ChatTemplate | None
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    end_of_turn_ids: tuple[int, ...]
    special_ids: frozenset[int]

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read a model folder's tokenizer files.

        Raises:
            ModelError: a file is missing, damaged, or of a kind that cannot be streamed.
        """
        folder = Path(folder)
        backend = _load_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = {
            name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name)
        }
        template = _load_template(folder, config)
        added = backend.get_added_tokens_decoder()
        special_ids = frozenset(index for index, token in added.items() if token.special)
        eos_token_ids = _eos_token_ids(folder, backend, special_tokens.get("eos_token"))
        turn = _end_of_turn_ids(template, special_tokens, backend, special_ids)
        return cls(folder, backend, template, special_tokens, eos_token_ids, turn, special_ids)

    @property
    def vocab_size(self) -> int:
        """Number of ids that have text, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return token ids of `text`; a special token written out in it becomes its own id."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # such as the JSON escape \ud800 on its own
            raise PromptError(
                f"the text holds a lone surrogate at character {error.start}; text must be valid "
                "Unicode: replace that character"
            ) from None
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Ids beyond the vocabulary (padding rows of the embedding) have no text.
        """
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt text of a conversation.

        Raises:
            PromptError: the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise PromptError(
                f"{self.folder.name} has no chat template; a chat needs one: "
                "send plain text to /v1/completions instead"
            )
        return self.chat_template.render(
            messages, self.special_tokens, add_generation_prompt=add_generation_prompt
        )

    def stream(self) -> DetokenStream:
        """Return a fresh incremental detokenizer."""
        return DetokenStream(self)


class DetokenStream:
    """Turns tokens into text as they come; the pieces joined equal `decode` of all tokens.

    Only the last U+FFFD of the text so far can still change (an unfinished UTF-8 sequence decodes
    to exactly one), so that one is held back and the rest is final.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._sent_chars = 0

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that became final with them (may be empty)."""
        skip = self._tokenizer.special_ids
        self._window.extend(index for index in ids if index not in skip)
        text = self._tokenizer.decode(self._window)
        if not text.endswith(REPLACEMENT):
            # Between two whole characters: nothing before this point can matter again.
            piece = text[self._sent_chars :]
            self._window.clear()
            self._sent_chars = 0
            return piece
        piece = text[self._sent_chars : -1]
        self._sent_chars = len(text) - 1
        return piece

    def flush(self) -> str:
        """Return what was held back, at the end of the output."""
        piece = self._tokenizer.decode(self._window)[self._sent_chars :]
        self._window.clear()
        self._sent_chars = 0
        return piece


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist; a model folder needs tokenizer.json: "
            "download the whole model folder, or point at the right one"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
        kind = json.loads(backend.to_str()).get("decoder") or {}
    except Exception as error:  # tokenizers raises plain Exception for every defect
        raise ModelError(
            f"{path} cannot be read ({error}); it must be a tokenizers file: download it again"
        ) from None
    if kind.get("type") != "ByteLevel":
        raise ModelError(
            f"{path} has decoder {kind.get('type')!r}; only byte-level BPE (decoder 'ByteLevel', "
            "the Qwen family) is supported: use such a model"
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


def _load_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate.parse(_read_text(path), source=path)
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates: the default one is for plain chat
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if not source:
        return None
    return ChatTemplate.parse(source, source=folder / "tokenizer_config.json")


def _eos_token_ids(
    folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    found: set[int] = set()
    config = _read_json(folder / "config.json")
    for source in (
        _read_json(folder / "generation_config.json"),
        config,
        config.get("text_config") or {},
    ):
        if (ids := source.get("eos_token_id")) is not None:
            found.update(ids if isinstance(ids, list) else [ids])
            break
    if eos_token is not None and (index := backend.token_to_id(eos_token)) is not None:
        found.add(index)
    return tuple(sorted(found))


def _end_of_turn_ids(
    template: ChatTemplate | None,
    special_tokens: Mapping[str, str],
    backend: tokenizers.Tokenizer,
    special_ids: frozenset[int],
) -> tuple[int, ...]:
    """Render an answered turn and look for the special token that closes the answer."""
    if template is None:
        return ()
    turn = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": _TURN_PROBE},
    ]
    try:
        text = template.render(turn, special_tokens, add_generation_prompt=False)
    except PromptError:
        return ()
    _, found, after = text.rpartition(_TURN_PROBE)
    first = backend.encode(after, add_special_tokens=False).ids[:1] if found else []
    return tuple(index for index in first if index in special_ids)


def _token_text(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else str(value)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); it must be UTF-8 text: download it again"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path} is not JSON ({error}); model files must be whole: download it again"
        ) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; expected an object: fix the file")
    return value
