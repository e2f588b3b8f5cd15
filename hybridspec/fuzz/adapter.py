"""What the fuzzer asks of an engine. Nothing here knows which engine it is.

An adapter lets the fuzzer say how many rows a round verifies and how many drafts are right, and
shows what the engine remembers. How it does so is its own business: by handing the engine drafts
(what the engine then does with them is its real path), never by overruling its verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hybridspec.fuzz.operations import Join, Plan

LOGITS = "logits"


@dataclass(frozen=True)
class EngineFacts:
    """What the fuzzer has to know to draw histories and to judge.

    Attributes:
        name: of the engine. dtype: its weights and activations compute in.
        vocab_size: token ids are drawn below it.
        max_requests: requests it holds at once.
        max_context: tokens of a request, prompt and output together; a request that holds so many
            is finished.
        boundaries: token counts where its work is cut (pages, prefill chunks, blocks of the delta
            rule); prompts are drawn around their multiples.
        prefix_cache: whether text of earlier requests is reused.
        tolerance: largest absolute difference from plain decoding that is rounding, by part,
            `LOGITS` among them. What is named here is compared.
        tie_logits: a greedy token may lie this far below the best logit of plain decoding.
    """

    name: str
    dtype: str
    vocab_size: int
    max_requests: int
    max_context: int
    boundaries: tuple[int, ...]
    prefix_cache: bool
    tolerance: Mapping[str, float]
    tie_logits: float


@dataclass(frozen=True)
class Outcome:
    """What the engine says about one request's prefill or round.

    Attributes:
        emitted: its new tokens.
        rows: rows that were verified; 0 for a prefill or a round without drafts.
        accepted: drafts accepted.
        finished: it can take part in no further round.
        logits_EV: [len(emitted), vocabulary], those that gave each emitted token; None where the
            engine does not show them.
    """

    emitted: Sequence[int]
    rows: int
    accepted: int
    finished: bool
    logits_EV: torch.Tensor | None


@dataclass(frozen=True)
class Memory:
    """What the engine remembers of one request.

    Attributes:
        tokens: prompt and emitted tokens.
        context_tokens: tokens that the target has processed: all but the newest.
        parts: by name (KV, conv window, recurrent state) in any shape that equals that of
            `PlainText.memory`; may be views, valid until the next operation.
    """

    tokens: Sequence[int]
    context_tokens: int
    parts: Mapping[str, torch.Tensor]


class PlainText(Protocol):
    """One text decoded token by token, without drafts, apart from the engine under test."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Make the text begin with `tokens` and process all but the last of them."""
        ...

    def continuation(self, count: int) -> list[int]:
        """Up to `count` greedy tokens behind those last followed; fewer where the context ends."""
        ...

    def logits(self, context_tokens: int) -> torch.Tensor:
        """[vocabulary], behind the first `context_tokens` tokens; of the last few rounds."""
        ...

    def memory(self, context_tokens: int) -> Mapping[str, torch.Tensor]:
        """The parts behind the first `context_tokens` tokens; of the last few rounds."""
        ...


class EngineAdapter(Protocol):
    """An engine that the fuzzer can drive."""

    @property
    def facts(self) -> EngineFacts:
        """What does not change."""
        ...

    @property
    def free_requests(self) -> int:
        """Requests that can still join."""
        ...

    def reset(self) -> None:
        """Drop every request and start from an engine that has served none."""
        ...

    def plain_text(self, prompt: Sequence[int]) -> PlainText:
        """Plain decoding of a prompt."""
        ...

    def join(self, operation: Join, prompt: Sequence[int]) -> Outcome:
        """Prefill `prompt`. End-of-sequence tokens are text like any other here."""
        ...

    def step(
        self, plans: Mapping[int, Plan], continuations: Mapping[int, Sequence[int]]
    ) -> Mapping[int, Outcome]:
        """One round.

        Args:
            plans: of the requests that take part, in batch order.
            continuations: tokens behind each one's anchor that the target will say, as far as
                needed; drafts are these up to `Plan.right`, other tokens from there on.
        """
        ...

    def memory(self, key: int) -> Memory:
        """What is remembered of a request that is there."""
        ...

    def leave(self, key: int, *, aborted: bool) -> None:
        """Let a request go, at the end of its text or torn out by its client."""
        ...
