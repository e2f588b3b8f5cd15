"""What a caller says about a request and what a round says back. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from the target's distribution.

    Attributes:
        temperature: 0 is greedy; else logits are divided by it.
        top_p: nucleus mass in (0, 1].
        seed: of the request's own coins; None draws one from the system.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise UsageError(f"temperature {self.temperature} must lie in 0..100: lower it")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p {self.top_p} must lie in (0, 1]: use 1 to switch it off")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed} must fit in 64 bits: use a smaller one")

    @property
    def greedy(self) -> bool:
        """Whether the highest logit wins."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class LengthRule:
    """How the verify length of one request is chosen.

    Attributes:
        kind: `none` decodes without a drafter, `fixed` verifies `length` rows in every round,
            `policy` lets the engine's policy choose up to `length`.
        length: 1..16.
    """

    kind: Literal["none", "fixed", "policy"]
    length: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        if self.kind not in ("none", "fixed", "policy"):
            raise UsageError(f"length rule {self.kind!r} is unknown: use none, fixed or policy")
        if not 1 <= self.length <= BLOCK_SIZE:
            raise UsageError(f"verify length {self.length} must lie in 1..{BLOCK_SIZE}")


@dataclass
class RoundRecord:
    """Draft and target signals of one drafted round, for traces.

    Attributes:
        anchor: token of the first row; context_tokens: its position.
        draft_tokens [15], p1 [15], p2 [15], entropy_nats [15]: the drafter's top token, its
            probability, the runner-up's, and the entropy of the whole distribution.
        target_tokens, target_p1 [verified rows]: the target's most probable token and probability.
        routes: bytes, experts as little-endian uint8 or uint16 [layers, rows, top-k] in C order;
            empty unless asked for.
    """

    anchor: int
    context_tokens: int
    draft_tokens: list[int]
    p1: list[float]
    p2: list[float]
    entropy_nats: list[float]
    target_tokens: list[int]
    target_p1: list[float]
    routes: bytes = b""


@dataclass
class Round:
    """Outcome of one round for one request.

    Attributes:
        emitted: new tokens, 1..16; cut after an end-of-sequence token.
        verify_length: rows the target verified; 0 for a round without a draft pass.
        selected_length: rows chosen before the first-router correction.
        accepted: drafts accepted.
        predicted_us: round time by the cost table, None without a policy.
        observed_us: wall time of the whole step, shared by all its requests.
        fallback: why the policy did not choose this length itself, else None.
        record: signals, where they were asked for.
    """

    emitted: list[int]
    verify_length: int
    selected_length: int
    accepted: int
    predicted_us: float | None
    observed_us: float = math.nan
    fallback: str | None = None
    record: RoundRecord | None = None

    @property
    def drafted(self) -> bool:
        """Whether a draft pass ran."""
        return self.verify_length > 0


@dataclass
class TokenLog:
    """Tokens of a request so far.

    Attributes:
        tokens: prompt and generated tokens.
        num_prompt_tokens: how many of them are the prompt.
        context_tokens: tokens the target has processed; the anchor is `tokens[context_tokens]`.
        finished: an end-of-sequence token was emitted or the context is full.
    """

    tokens: list[int]
    num_prompt_tokens: int
    context_tokens: int = 0
    finished: bool = False
    finish_reason: Literal["stop", "length"] | None = None
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def num_emitted(self) -> int:
        """Generated tokens."""
        return len(self.tokens) - self.num_prompt_tokens

    def extend(self, emitted: list[int]) -> list[int]:
        """Append tokens up to and including the first end-of-sequence token; returns them."""
        for i, token in enumerate(emitted):
            if token in self.eos_token_ids:
                emitted = emitted[: i + 1]
                self.finished, self.finish_reason = True, "stop"
                break
        self.tokens.extend(emitted)
        return emitted
