"""Random histories: seeds in, operations out."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.fuzz.adapter import EngineFacts
from hybridspec.fuzz.operations import History, Join, Leave, Operation, Plan, Step

OPERATIONS = 40
# A request drafts, pauses or is cut; a third of the rounds are at the ends of the range, where
# off-by-ones live.
NO_DRAFT_SHARE, ONE_ROW_SHARE, FULL_SHARE, DROP_SHARE = 0.25, 0.15, 0.2, 0.15
SHORT_PROMPT_SHARE, FOLLOW_SHARE, SAMPLED_SHARE = 0.5, 0.2, 0.15
JOIN_SHARE, LEAVE_SHARE, ABORT_SHARE = 0.12, 0.05, 0.05
TAKES_PART_SHARE = 0.85
SHORT_PROMPT_TOKENS = 12


@dataclass
class _Live:
    key: int
    rounds: int = 0


def random_history(facts: EngineFacts, *, seed: int, number: int) -> History:
    """History `number` of a seed: the same for the same facts, whatever was played before it."""
    rng = random.Random(f"{seed}/{number}")
    live: list[_Live] = []
    operations: list[Operation] = []
    joined = 0
    while len(operations) < OPERATIONS:
        chance = rng.random()
        if not live or (chance < JOIN_SHARE and len(live) < facts.max_requests):
            operations.append(_join(rng, facts, joined))
            live.append(_Live(joined))
            joined += 1
        elif chance > 1.0 - LEAVE_SHARE - ABORT_SHARE:
            gone = live.pop(rng.randrange(len(live)))
            operations.append(Leave(gone.key, aborted=chance > 1.0 - ABORT_SHARE))
        else:
            members = [r for r in live if rng.random() < TAKES_PART_SHARE] or [rng.choice(live)]
            rng.shuffle(members)
            operations.append(Step({member.key: _plan(rng) for member in members}))
    return tuple(operations)


def _join(rng: random.Random, facts: EngineFacts, key: int) -> Join:
    follows = rng.randrange(key) if key and rng.random() < FOLLOW_SHARE else None
    if follows is not None or rng.random() < SHORT_PROMPT_SHARE:
        length = rng.randint(1, SHORT_PROMPT_TOKENS)
    else:
        length = _boundary_length(rng, facts)
    sampled = rng.random() < SAMPLED_SHARE
    return Join(
        key,
        tuple(rng.randrange(facts.vocab_size) for _ in range(length)),
        follows,
        temperature=rng.choice((0.5, 1.0)) if sampled else 0.0,
        seed=rng.randrange(2**31) if sampled else 0,
    )


def _boundary_length(rng: random.Random, facts: EngineFacts) -> int:
    """A prompt that ends at a boundary, or so shortly before it that decoding crosses it."""
    edges = {
        multiple * boundary
        for boundary in facts.boundaries
        for multiple in (1, 2)
        if multiple * boundary < facts.max_context
    }
    edge = rng.choice(sorted(edges | {facts.max_context}))
    length = edge + rng.choice((-1, 0, 1, -rng.randint(2, 2 * BLOCK_SIZE)))
    return min(max(length, 1), facts.max_context - 2)


def _plan(rng: random.Random) -> Plan:
    kind = rng.random()
    if kind < NO_DRAFT_SHARE:
        return Plan(0)
    if kind < NO_DRAFT_SHARE + ONE_ROW_SHARE:
        rows = 1
    elif kind < NO_DRAFT_SHARE + ONE_ROW_SHARE + FULL_SHARE:
        rows = BLOCK_SIZE
    else:
        rows = rng.randint(2, BLOCK_SIZE - 1)
    right = rng.choice((0, NUM_DRAFTS, rng.randint(0, NUM_DRAFTS), rng.randint(0, rows - 1)))
    room = BLOCK_SIZE - rows
    dropped = rng.randint(1, room) if room and rng.random() < DROP_SHARE else 0
    return Plan(rows, right, dropped)
