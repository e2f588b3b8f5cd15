"""Training text as token streams on a device, and random windows cut from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hybridspec.demo.documents import CATEGORIES, Document
from hybridspec.errors import NotEnoughData

_ENCODE_AT_ONCE = 1024


def encode(tokenizer: Tokenizer, texts: Sequence[str], end: int) -> list[np.ndarray]:
    """Returns one int32 array a text, each closed by the end-of-text token."""
    arrays = []
    for start in range(0, len(texts), _ENCODE_AT_ONCE):
        for encoding in tokenizer.encode_batch(list(texts[start : start + _ENCODE_AT_ONCE])):
            arrays.append(np.array([*encoding.ids, end], dtype=np.int32))
    return arrays


class TokenStreams:
    """Documents of each category joined end to end, sampled category first.

    Categories are drawn in proportion to their token count to the power `mix_exponent`. A share
    of the windows begins where a document begins, as prompts often do.
    """

    def __init__(
        self, documents: Sequence[Document], tokenizer: Tokenizer, *, end: int, window: int,
        device: torch.device, mix_exponent: float, at_start: float = 0.25,
    ) -> None:  # fmt: skip
        self.device, self.window, self.at_start = device, window, at_start
        pieces: list[np.ndarray] = []
        starts: list[np.ndarray] = []
        bounds: list[tuple[int, int]] = []
        total = 0
        self.tokens_of: dict[str, int] = {}
        for category in CATEGORIES:
            texts = [d.text for d in documents if d.category == category and d.split == "train"]
            arrays = encode(tokenizer, texts, end)
            sizes = np.array([a.size for a in arrays], dtype=np.int64)
            length = int(sizes.sum())
            if length <= window:
                raise NotEnoughData(
                    f"category {category} has {length} training tokens, a window needs {window}: "
                    "use a larger corpus"
                )
            begin = total + np.concatenate([[0], np.cumsum(sizes)[:-1]])
            starts.append(begin[begin < total + length - window])
            bounds.append((total, length))
            pieces.extend(arrays)
            self.tokens_of[category] = length
            total += length
        self.tokens = torch.from_numpy(np.concatenate(pieces)).to(device)
        self.bounds = torch.tensor(bounds, dtype=torch.float64)
        self.starts = torch.from_numpy(np.concatenate(starts))
        counts = torch.tensor([len(s) for s in starts], dtype=torch.float64)
        self.start_bounds = torch.stack([counts.cumsum(0) - counts, counts], dim=1)
        self.weights = self.bounds[:, 1] ** mix_exponent

    def starts_of_windows(self, batch: int, generator: torch.Generator) -> Tensor:
        """Returns int64 positions [batch] on the CPU, where the generator is too."""
        category = torch.multinomial(self.weights, batch, replacement=True, generator=generator)
        where, kind = torch.rand(2, batch, dtype=torch.float64, generator=generator)
        bounds, start_bounds = self.bounds[category], self.start_bounds[category]
        anywhere = (bounds[:, 0] + where * (bounds[:, 1] - self.window)).long()
        document = (start_bounds[:, 0] + where * start_bounds[:, 1]).long()
        return torch.where(kind < self.at_start, self.starts[document], anywhere)

    def cut(self, starts: Tensor, length: int) -> Tensor:
        """Returns int64 windows [batch, length <= window] from device positions [batch]."""
        offsets = torch.arange(length, device=self.device)
        return self.tokens[starts.unsqueeze(1) + offsets].long()

    def sample(self, batch: int, generator: torch.Generator, *, length: int) -> Tensor:
        """Returns random int64 windows [batch, length <= window] on the device."""
        return self.cut(self.starts_of_windows(batch, generator).to(self.device), length)


def held_out_windows(
    documents: Sequence[Document], tokenizer: Tokenizer, *, end: int, window: int, most: int
) -> dict[str, Tensor]:
    """Returns int64 windows [n <= most, window] of held-out text for every category with enough."""
    windows = {}
    for category in CATEGORIES:
        texts = [d.text for d in documents if d.category == category and d.split != "train"]
        room = 6 * most * window  # Characters; a token has fewer than six.
        chosen: list[str] = []
        for text in sorted(texts):
            if room <= 0:
                break
            chosen.append(text[: 8 * window])
            room -= len(chosen[-1])
        if not chosen:
            continue
        joined = np.concatenate(encode(tokenizer, chosen, end))
        count = min(most, joined.size // window)
        if count:
            tokens = torch.from_numpy(joined[: count * window].astype(np.int64))
            windows[category] = tokens.view(count, window)
    return windows
