"""Differences that are no ties, decided by the target in float64 on the host.

Plain decoding in bfloat16 is not exact either: where its own rounding has moved the two likeliest
tokens past each other, the token that exact arithmetic chooses is the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hybridspec.fuzz.plain import ReferencePlainText
from hybridspec.reference.loading import load_pair

# Prefix, pairs of tokens (plain decoding's, found); gives float64 logits of both.
Exact = Callable[[Sequence[int], tuple[int, int]], tuple[float, float]]
# Prefix; gives float64 logits of all tokens.
ExactRow = Callable[[Sequence[int]], torch.Tensor]


def exact_row(target: Path, *, max_context: int) -> ExactRow:
    """The target in a folder; the model is loaded when it is first asked."""
    loaded = []

    def row(prefix: Sequence[int]) -> torch.Tensor:
        if not loaded:
            engine = load_pair(
                target, None, dtype=torch.float64, max_batch=1, max_context=max_context
            )
            loaded.append(engine.target)
        text = ReferencePlainText(loaded[0], prefix, max_context=max_context)
        return text.logits(len(prefix))

    return row


def exact_logits(target: Path, *, max_context: int) -> Exact:
    """A judge of the target in a folder; the model is loaded when it is first asked."""
    row = exact_row(target, max_context=max_context)

    def logits(prefix: Sequence[int], pair: tuple[int, int]) -> tuple[float, float]:
        found_V = row(prefix)
        return float(found_V[pair[0]]), float(found_V[pair[1]])

    return logits


def plain_text(target: Path, prompt: Sequence[int], tokens: int, dtype: torch.dtype) -> list[int]:
    """Greedy tokens of plain decoding on the host."""
    most = len(prompt) + tokens + 1
    engine = load_pair(target, None, dtype=dtype, max_batch=1, max_context=most)
    return ReferencePlainText(engine.target, prompt, max_context=most).continuation(tokens)
