"""Plain decoding of one text, with memory of its own.

It shares the weights with the engine under test and nothing else: no slots, no pages of others, no
drafts, no commits. One row is processed at a time; a prompt in pieces whose ends are not the
engine's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import KVCache, StatePool
from hybridspec.reference.target import Target

PREFILL_TOKENS = 97
# Behind the newest tokens lie the current place and a block of tokens that were looked ahead.
KEPT_STATES = BLOCK_SIZE + 4
KEYS, VALUES, CONV, RECURRENT = "kv_keys", "kv_values", "conv_window", "recurrent_state"


class DecodedText(ABC):
    """A text that is decoded token by token, whoever processes them.

    Args:
        prompt: token ids, at least one. max_context: longest text, tokens.
    """

    def __init__(self, prompt: Sequence[int], *, max_context: int) -> None:
        self._max_context = max_context
        self._text = list(prompt)
        self._followed = len(prompt)
        self._context = 0
        # Behind the first n tokens: logits, recurrent states, conv windows. Of the last few n.
        self._behind: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def _prefill(self, tokens: int) -> None:
        """Process the prompt in pieces of so many tokens."""
        for start in range(0, len(self._text), tokens):
            self._process(min(tokens, len(self._text) - start))

    @abstractmethod
    def _process(self, rows: int) -> None:
        """Process the next `rows` tokens of the text and keep what is behind them."""

    @abstractmethod
    def _put_back(self, recurrent: torch.Tensor, conv: torch.Tensor, context: int) -> None:
        """Make these the states behind `context` tokens."""

    def _keep(
        self, context: int, logits_V: torch.Tensor, recurrent: torch.Tensor, conv: torch.Tensor
    ) -> None:
        self._context = context
        self._behind[context] = (logits_V, recurrent, conv)
        for old in [n for n in self._behind if n <= context - KEPT_STATES]:
            del self._behind[old]

    def follow(self, tokens: Sequence[int]) -> None:
        """Make the text begin with `tokens` and process all but the last of them.

        What was looked ahead is kept where it agrees, else the text goes back to where it does
        not: the states of that place are put back.
        """
        shared = min(len(tokens), len(self._text))
        same = next((i for i in range(shared) if tokens[i] != self._text[i]), shared)
        if same < self._context:
            _, recurrent, conv = self._behind[same]
            self._put_back(recurrent, conv, same)
            self._context = same
            self._behind = {n: kept for n, kept in self._behind.items() if n <= same}
        if same < len(tokens):
            self._text = list(tokens)
        self._followed = len(tokens)
        while self._context < len(tokens) - 1:
            self._process(1)

    def continuation(self, count: int) -> list[int]:
        """Up to `count` greedy tokens behind those last followed; fewer where the context ends."""
        wanted = min(self._followed + count, self._max_context)
        while len(self._text) < wanted:
            while self._context < len(self._text):
                self._process(1)
            self._text.append(int(self._behind[self._context][0].argmax()))
        return self._text[self._followed : wanted]

    def logits(self, context_tokens: int) -> torch.Tensor:
        """[vocabulary], behind the first `context_tokens` tokens; of the last few rounds."""
        return self._behind[context_tokens][0]


class ReferencePlainText(DecodedText):
    """One text on the reference target.

    Args:
        target: weights. max_context: longest text, tokens.
        prompt: token ids, at least one.
    """

    def __init__(self, target: Target, prompt: Sequence[int], *, max_context: int) -> None:
        super().__init__(prompt, max_context=max_context)
        config = target.config
        self._target = target
        self._pool = StatePool(config, 1, target.dtype, target.device)
        self._pool.take()
        self._cache = KVCache(
            len(config.attention_layers),
            config.num_kv_heads,
            config.head_dim,
            target.dtype,
            target.device,
        )
        self._cache.reserve(max_context + 1)
        self._prefill(PREFILL_TOKENS)

    @torch.inference_mode()
    def _process(self, rows: int) -> None:
        start, stop = self._context, self._context + rows
        layout = RowLayout([0], [start], [rows], self._target.device)
        tokens = torch.tensor(self._text[start:stop], device=self._target.device)
        state, routed = self._target.first_router(tokens, layout, self._pool, in_place=True)
        hidden = self._target.finish(state, routed, self._pool, [self._cache])
        self._keep(
            stop,
            self._target.logits(hidden[-1:])[0],
            self._pool.recurrent_SXHVK[0].clone(),
            self._pool.conv_SXWC[0].clone(),
        )

    @torch.inference_mode()
    def _put_back(self, recurrent: torch.Tensor, conv: torch.Tensor, context: int) -> None:
        del context
        self._pool.recurrent_SXHVK[0] = recurrent
        self._pool.conv_SXWC[0] = conv

    def memory(self, context_tokens: int) -> Mapping[str, torch.Tensor]:
        """KV, conv windows and recurrent states behind the first `context_tokens` tokens."""
        _, recurrent, conv = self._behind[context_tokens]
        return {
            KEYS: self._cache.keys[:, :, :context_tokens],
            VALUES: self._cache.values[:, :, :context_tokens],
            CONV: conv,
            RECURRENT: recurrent,
        }
