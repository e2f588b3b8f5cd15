"""Sessions: requests that meet in a live engine, which forms rounds as it likes.

Where an engine cannot be stepped, what the fuzzer varies is who is there when: requests join when
another has said so many tokens, leave at their length, or are aborted after so many tokens; each
asks for its own length of rounds, or for another one in every round. The play needs tokens as they
come and an abort, nothing else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridspec.artifacts.tables import BLOCK_SIZE

VISITS = (5, 9)
ABORT_SHARE, VARIED_SHARE, FREE_SHARE, FOLLOW_SHARE = 0.2, 0.35, 0.1, 0.25
SHORT_PROMPT_SHARE, SHORT_PROMPT_TOKENS = 0.4, 24
EARLY_SHARE, EARLY_SECONDS = 0.3, 0.005


@dataclass(frozen=True)
class LiveFacts:
    """What sessions are drawn for.

    Attributes:
        vocab_size: token ids are drawn below it. max_context: prompt and output together, tokens.
        max_new_tokens: of a request.
        boundaries: prompts are drawn around their multiples (prefill chunks, pages).
        source: text that prompts are pieces of, so that drafts are right at times; empty: random
            tokens.
    """

    vocab_size: int
    max_context: int
    max_new_tokens: int
    boundaries: tuple[int, ...]
    source: tuple[int, ...] = ()


@dataclass(frozen=True)
class Visit:
    """One request of a session.

    Attributes:
        name: id in the engine; no name begins with another.
        verify_length: rows of every round; None leaves it to the engine.
        varied: another length in every round, where the engine can.
        behind: visit and its number of tokens after which this one joins; None: at once.
        abort_after: tokens after which it is torn out, 0: as soon as it has come, queued or in its
            prefill; None: it stays to its end.
    """

    name: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    verify_length: int | None = None
    varied: bool = False
    behind: tuple[int, int] | None = None
    abort_after: int | None = None


@dataclass
class Heard:
    """What a request was told.

    Attributes:
        tokens: output. finish: `length`, `abort`, ... as the engine calls it.
        rounds: it was verified in. lengths: how often each number of rows was verified, if known.
        cached: tokens of the prompt that a prefix cache had.
    """

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    rounds: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    cached: int = 0


class LiveEngine(Protocol):
    """An engine that decodes requests as they come, greedily and past end-of-sequence tokens."""

    def stream(self, visit: Visit) -> AsyncIterator[Heard]:
        """All that was said so far, after every step; the last one has `finish`."""
        ...

    def abort(self, name: str) -> None:
        """Tear a request out; its stream then ends soon."""
        ...


def random_session(facts: LiveFacts, *, seed: int, number: int) -> tuple[Visit, ...]:
    """Session `number` of a seed: the same for the same facts."""
    rng = random.Random(f"session/{seed}/{number}")
    visits: list[Visit] = []
    for index in range(rng.randint(*VISITS)):
        if visits and rng.random() < FOLLOW_SHARE:
            prompt = rng.choice(visits).prompt
        else:
            prompt = _prompt(rng, facts, _length(rng, facts))
        most = min(facts.max_new_tokens, facts.max_context - len(prompt) - BLOCK_SIZE - 1)
        tokens = rng.randint(max(2, most // 4), most)
        varied = rng.random() < VARIED_SHARE
        free = rng.random() < FREE_SHARE
        behind = None
        if visits and rng.random() < 0.7:
            other = rng.randrange(len(visits))
            behind = (other, rng.randint(1, visits[other].max_new_tokens))
        kind = "varied-" if varied else ""
        length = None if free or varied else rng.choice((1, BLOCK_SIZE, rng.randint(2, 15)))
        visits.append(
            Visit(
                f"fuzz-{kind}{seed}-{number:06d}-{index:03d}",
                prompt,
                tokens,
                # A varied request is forced already; the engine's hook then changes the number.
                BLOCK_SIZE if varied else length,
                varied,
                behind,
                _abort_after(rng, tokens) if rng.random() < ABORT_SHARE else None,
            )
        )
    return tuple(visits)


def follow_ups(
    session: Sequence[Visit], heard: Sequence[Heard], *, seed: int, number: int, tokens: int
) -> tuple[Visit, ...]:
    """Visits that go on from what a session was told: a prefix cache has their beginnings.

    Args:
        tokens: asked for by each. They end anywhere in the answer before them; torn ones too.
    """
    rng = random.Random(f"follow/{seed}/{number}")
    return tuple(
        Visit(
            f"fuzz-after-{seed}-{number:06d}-{index:03d}",
            (*visit.prompt, *said.tokens[: rng.randint(1, len(said.tokens))]),
            tokens,
            rng.choice((1, BLOCK_SIZE, rng.randint(2, 15))),
        )
        for index, (visit, said) in enumerate(zip(session, heard, strict=True))
        if said.tokens
    )


def _abort_after(rng: random.Random, tokens: int) -> int:
    return 0 if rng.random() < EARLY_SHARE else rng.randint(1, tokens)


def _prompt(rng: random.Random, facts: LiveFacts, length: int) -> tuple[int, ...]:
    if len(facts.source) > length:
        start = rng.randrange(len(facts.source) - length)
        return facts.source[start : start + length]
    return tuple(rng.randrange(facts.vocab_size) for _ in range(length))


def _length(rng: random.Random, facts: LiveFacts) -> int:
    most = facts.max_context - BLOCK_SIZE - 8
    if rng.random() < SHORT_PROMPT_SHARE:
        return rng.randint(1, min(SHORT_PROMPT_TOKENS, most))
    boundary = rng.choice(facts.boundaries)
    edge = boundary * rng.randint(1, max(1, min(3, most // boundary)))
    return min(max(edge + rng.choice((-1, 0, 1, -rng.randint(2, 2 * BLOCK_SIZE))), 1), most)


async def play_session(
    engine: LiveEngine, session: Sequence[Visit], *, timeout_s: float
) -> list[Heard]:
    """Play a session and give what each visit was told.

    Raises:
        TimeoutError: a request did not end in time; a lost one looks like this.
    """
    heard = [Heard() for _ in session]
    changed = asyncio.Condition()

    async def attend(index: int) -> None:
        visit = session[index]
        if visit.behind is not None:
            other, tokens = visit.behind
            async with changed:
                await changed.wait_for(
                    lambda: len(heard[other].tokens) >= tokens or heard[other].finish is not None
                )
        torn = visit.abort_after == 0
        if torn:
            asyncio.get_running_loop().call_later(EARLY_SECONDS, engine.abort, visit.name)
        async for said in engine.stream(visit):
            async with changed:
                heard[index] = said
                changed.notify_all()
            after = visit.abort_after
            if after is not None and len(said.tokens) >= after and not torn and not said.finish:
                torn = True
                engine.abort(visit.name)

    async with asyncio.timeout(timeout_s):
        async with asyncio.TaskGroup() as group:
            for index in range(len(session)):
                group.create_task(attend(index))
    return heard


@dataclass(frozen=True)
class Fault:
    """Something that must not be.

    Attributes:
        kind: `token`, `length`, `finish` or a part of the state.
    """

    kind: str
    name: str
    message: str
    difference: float | None = None


def check_ends(session: Sequence[Visit], heard: Sequence[Heard]) -> list[Fault]:
    """Ends, numbers of tokens and lengths of rounds must be what was asked for."""
    faults = []
    for visit, said in zip(session, heard, strict=True):
        expected = {"length"} if visit.abort_after is None else {"length", "abort"}
        if said.finish not in expected:
            text = f"ended with {said.finish!r}, expected {' or '.join(sorted(expected))}"
            faults.append(Fault("finish", visit.name, text))
        elif said.finish == "length" and len(said.tokens) != visit.max_new_tokens:
            text = f"{len(said.tokens)} tokens of {visit.max_new_tokens}"
            faults.append(Fault("finish", visit.name, text))
        asked = visit.verify_length
        wrong = {rows for rows in said.lengths if rows != asked}
        if asked is not None and not visit.varied and wrong:
            text = f"rounds of {sorted(wrong)} rows, asked for {asked}"
            faults.append(Fault("length", visit.name, text))
    return faults


@dataclass(frozen=True)
class Place:
    """First difference of a visit's text from plain decoding's.

    Attributes:
        place: tokens of output before it. expected, found: the two tokens.
    """

    visit: Visit
    place: int
    expected: int
    found: int

    def prefix(self, tokens: Sequence[int]) -> list[int]:
        """Prompt and the output that both share, of the output `tokens`."""
        return [*self.visit.prompt, *tokens[: self.place]]


def first_differences(
    session: Sequence[Visit], heard: Sequence[Heard], plain: Sequence[Sequence[int]]
) -> list[Place]:
    """Where texts leave plain decoding's, which are at least as long; torn ones are prefixes."""
    places = []
    for visit, said, text in zip(session, heard, plain, strict=True):
        pairs = enumerate(zip(said.tokens, text, strict=False))
        found = next(((i, a, b) for i, (a, b) in pairs if a != b), None)
        if found is not None:
            places.append(Place(visit, found[0], found[2], found[1]))
    return places


def judge_places(
    places: Sequence[Place], gaps: Sequence[float | None], *, tie: float
) -> list[Fault]:
    """Differences that are no ties.

    Args:
        gaps: plain decoding's logits between the two tokens at each place; None: unknown, which is
            no tie.
    """
    faults = []
    for place, gap in zip(places, gaps, strict=True):
        # Written so that NaN is a fault too.
        if gap is None or not gap <= tie:
            text = (
                f"token {place.place} of the output is {place.found}, plain decoding's "
                f"{place.expected}, {gap} apart"
            )
            faults.append(Fault("token", place.visit.name, text, gap))
    return faults


def as_json(visit: Visit, said: Heard) -> dict[str, Any]:
    """A visit and what it was told, to be kept with a fault."""
    return {**vars(visit), "prompt": list(visit.prompt), **vars(said)}
