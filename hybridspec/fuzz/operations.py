"""What a history of the fuzzer is made of. Plain values: they are drawn, played, shrunk and kept.

Requests are named by a key of their own, so an operation whose request is not there (never joined,
gone, full) is skipped: every sub-sequence of a history is a history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS


@dataclass(frozen=True)
class Join:
    """A request enters and its prompt is prefilled.

    Attributes:
        key: name of the request, unique in a history.
        prompt: token ids; behind the text so far of request `follows`, where that is given.
        follows: earlier request whose text the prompt goes on from, as a next turn of a
            conversation does; an engine with a prefix cache finds it there.
        temperature: 0 is greedy. Coins decide what a sampled request accepts.
        seed: of a sampled request's coins.
    """

    key: int
    prompt: tuple[int, ...]
    follows: int | None = None
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.key} joins without a prompt; one token is needed")


@dataclass(frozen=True)
class Plan:
    """What one request does in one round.

    Attributes:
        rows: rows the target verifies, 1..16; 0 is a round without a draft pass.
        right: drafts that the target agrees with before the first wrong one, 0..15: so
            `min(right, rows - 1)` are accepted.
        dropped: further rows that run up to the first router and are cut there.
    """

    rows: int
    right: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rows <= BLOCK_SIZE or not 0 <= self.right <= NUM_DRAFTS:
            raise ValueError(f"{self}: rows must lie in 0..{BLOCK_SIZE}, right in 0..{NUM_DRAFTS}")
        if not 0 <= self.dropped <= (BLOCK_SIZE - self.rows if self.rows else 0):
            raise ValueError(f"{self}: dropped rows must fit behind {self.rows} rows in a block")


@dataclass(frozen=True)
class Step:
    """One round of the named requests together; all others sit still.

    Attributes:
        plans: by key of the request, in the order of the batch.
    """

    plans: Mapping[int, Plan]


@dataclass(frozen=True)
class Leave:
    """A request goes and its slot is free again.

    Attributes:
        aborted: torn out between two rounds by its client, not at the end of its text.
    """

    key: int
    aborted: bool = False


Operation = Join | Step | Leave
History = tuple[Operation, ...]
