"""One sequence in the engine: its log, caches and what the drafter has yet to be given."""

from __future__ import annotations

import torch

from hybridspec.acceptance import Coins
from hybridspec.draft_switch import DraftSwitch
from hybridspec.hazards import RequestHistory, ServedHazards
from hybridspec.reference.state import KVCache
from hybridspec.request import LengthRule, SamplingParams, TokenLog


class Request:
    """One sequence in the engine. Made by `Engine.add`; read its `log`.

    Attributes:
        slot: state slot, or -1 once removed.
        log: tokens and cursors (`tokens`, `context_tokens`, `finished`, ... are mirrored here).
        prefill_us: wall time of the prefill.
    """

    def __init__(
        self,
        slot: int,
        log: TokenLog,
        sampling: SamplingParams,
        rule: LengthRule,
        cache: KVCache,
        draft_cache: KVCache | None,
    ) -> None:
        self.slot = slot
        self.log = log
        self.sampling = sampling
        self.rule = rule
        self.cache = cache
        self.draft_cache = draft_cache
        self.coins = None if sampling.greedy else Coins(sampling.seed)
        self.switch: DraftSwitch | None = None
        self.history: RequestHistory | None = None
        self.history_model: ServedHazards | None = None
        self.prefill_us = 0.0
        # Hidden states of processed tokens that the drafter has not been given yet, a list of the
        # target layers' [T, hidden] for each round.
        self.pending_features: list[list[torch.Tensor]] = []
        self.drafter_tokens = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return self.log.tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.log.num_prompt_tokens

    @property
    def num_emitted(self) -> int:
        """Generated tokens."""
        return self.log.num_emitted

    @property
    def context_tokens(self) -> int:
        """Tokens the target has processed; the position of the anchor."""
        return self.log.context_tokens

    @property
    def finished(self) -> bool:
        """An end-of-sequence token was emitted or the context is full."""
        return self.log.finished

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length` once finished."""
        return self.log.finish_reason

    @property
    def anchor(self) -> int:
        """Newest emitted token, not yet processed."""
        return self.log.tokens[self.log.context_tokens]
