"""Recording rounds: decode prompts with every draft verified and keep what was seen.

Prompts are decoded in fixed groups of `identity.group_size`, each group from its first token to its
last together. A group is the unit that is written and resumed: what a row computes may depend, in
its last bits, on its neighbours in the batch, so a group is never continued half-way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.calibrate.loops import round_loop_periods
from hybridspec.calibrate.prompts import Prompt
from hybridspec.calibrate.rounds import RoundRow, TraceIdentity
from hybridspec.calibrate.trace import TraceWriter, read_trace
from hybridspec.errors import BundleError, Interrupted, ModelError, PromptError
from hybridspec.request import LengthRule, Round, SamplingParams

if TYPE_CHECKING:
    from hybridspec.reference.engine import Engine, Request


class Progress(Protocol):
    """What is told about the tokens that are done."""

    def advance(self, amount: float = 1.0) -> None:
        """Count `amount` further tokens as done."""
        ...


class _Silent:
    def advance(self, amount: float = 1.0) -> None:
        pass


@contextmanager
def _silent(total: float) -> Iterator[Progress]:
    yield _Silent()


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ...


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt and its token ids."""

    prompt: Prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Collected:
    """What one call of `collect` did.

    Attributes:
        groups_kept: groups that were already on disk.
        groups_recorded: groups decoded by this call.
        rounds: rounds written by this call.
        tokens: tokens emitted by this call, prefill's included.
    """

    groups_kept: int
    groups_recorded: int
    rounds: int
    tokens: int


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Encoder, *, max_new_tokens: int, context_limit: int
) -> list[TokenPrompt]:
    """Tokenize prompts and refuse those that leave no room for every round to be whole.

    Args:
        context_limit: tokens the target can hold.

    Raises:
        PromptError: a prompt without tokens, or one too long for the target.
    """
    encoded = []
    for prompt in prompts:
        ids = tuple(tokenizer.encode(prompt.text))
        if not ids:
            raise PromptError(f"prompt {prompt.prompt_id} has no tokens: remove it")
        needed = context_tokens(len(ids), max_new_tokens)
        if needed > context_limit:
            raise PromptError(
                f"prompt {prompt.prompt_id} has {len(ids)} tokens and needs a context of {needed} "
                f"for {max_new_tokens} new ones; the target holds {context_limit}: shorten or "
                "remove it, or lower --max-new-tokens"
            )
        encoded.append(TokenPrompt(prompt, ids))
    return encoded


def context_tokens(prompt_tokens: int, max_new_tokens: int) -> int:
    """Context that a prompt needs so that its last round still has all rows."""
    return prompt_tokens + max_new_tokens + BLOCK_SIZE


def group_prompts(prompts: Sequence[TokenPrompt], group_size: int) -> list[list[TokenPrompt]]:
    """Consecutive groups; the last one may be smaller."""
    return [list(prompts[i : i + group_size]) for i in range(0, len(prompts), group_size)]


def collect(
    load_engine: Callable[[], Engine],
    prompts: Sequence[TokenPrompt],
    writer: TraceWriter,
    *,
    record_routes: bool,
    progress: Callable[[float], AbstractContextManager[Progress]] = _silent,
) -> Collected:
    """Record the rounds of every prompt whose group is not on disk yet.

    Args:
        load_engine: makes an engine with a drafter and `group_size` slots; called only if there is
            something to decode.
        prompts: all of the run, in its order.
        writer: open for `len(group_prompts(...))` groups.
        record_routes: keep the experts of every layer and row.
        progress: called with the tokens that are left to decode at most; what it opens is told
            how many of them are done, bit by bit.

    Raises:
        Interrupted: Ctrl-C; finished groups are on disk.
        BundleError: the groups on disk were recorded with another `record_routes`.
    """
    identity = writer.identity
    groups = group_prompts(prompts, identity.group_size)
    kept = writer.completed
    if kept:
        check_same_routes(writer.folder, record_routes)
    left = {index: group for index, group in enumerate(groups) if index not in kept}
    total = identity.max_new_tokens * sum(map(len, left.values()))
    recorded = rounds = tokens = 0
    try:
        engine = load_engine() if left else None
        with progress(float(total)) as bar:
            for index, group in left.items():
                assert engine is not None
                rows, emitted = record_group(
                    engine, group, identity, record_routes=record_routes, progress=bar
                )
                writer.write_group(index, rows)
                recorded, rounds, tokens = recorded + 1, rounds + len(rows), tokens + emitted
    except KeyboardInterrupt:
        done = len(writer.completed)
        raise Interrupted(
            f"{done} of {len(groups)} groups of prompts are recorded in {writer.folder} and kept; "
            "run the same command with --resume to go on"
        ) from None
    return Collected(len(kept), recorded, rounds, tokens)


def record_group(
    engine: Engine,
    group: Sequence[TokenPrompt],
    identity: TraceIdentity,
    *,
    record_routes: bool,
    progress: Progress,
) -> tuple[list[RoundRow], int]:
    """Decode one group together, every round verified in full.

    A prompt ends with an end-of-sequence token or once it has `max_new_tokens` tokens.

    Returns:
        rows by prompt, then round; and the number of tokens emitted.
    """
    limit = identity.max_new_tokens
    histories: list[_History] = []
    try:
        for member in group:
            sampling = SamplingParams(
                temperature=identity.temperature,
                top_p=identity.top_p,
                seed=prompt_seed(identity.seed, member.prompt.prompt_id),
            )
            request = engine.add(
                member.token_ids, sampling=sampling, length_rule=LengthRule("fixed", BLOCK_SIZE)
            )
            histories.append(_History(member.prompt, request))
            progress.advance(1.0)
        active = [history for history in histories if not history.done(limit)]
        for history in histories:
            if history not in active:
                engine.remove(history.request)
                progress.advance(float(limit - 1))
        while active:
            before = [history.request.num_emitted for history in active]
            outcomes = engine.step(
                [history.request for history in active], record=True, record_routes=record_routes
            )
            for history, outcome, start in zip(active, outcomes, before, strict=True):
                history.add(outcome, start)
                counted = min(history.request.num_emitted, limit)
                if history.done(limit):
                    engine.remove(history.request)
                    counted = limit
                progress.advance(float(counted - min(start, limit)))
            active = [history for history in active if not history.done(limit)]
    finally:
        for history in histories:
            engine.remove(history.request)
    rows = [row for history in histories for row in history.finished_rows()]
    return rows, sum(history.request.num_emitted for history in histories)


def prompt_seed(seed: int, prompt_id: str) -> int:
    """Seed of one prompt's coins: of its own, whatever it is grouped with."""
    digest = hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class _History:
    """Rounds of one prompt while it is decoded."""

    def __init__(self, prompt: Prompt, request: Request) -> None:
        self.prompt, self.request = prompt, request
        self._rows: list[RoundRow] = []
        self._stops: list[int] = []

    def done(self, max_new_tokens: int) -> bool:
        """Whether no further round is wanted."""
        return self.request.finished or self.request.num_emitted >= max_new_tokens

    def add(self, outcome: Round, start: int) -> None:
        """Keep a round that began with `start` emitted tokens."""
        record = outcome.record
        if record is None or len(record.target_tokens) != BLOCK_SIZE:
            rows = 0 if record is None else len(record.target_tokens)
            raise ModelError(
                f"a round of prompt {self.prompt.prompt_id} verified {rows} rows; recording needs "
                f"{BLOCK_SIZE}: give the engine a longer context"
            )
        self._rows.append(
            RoundRow(
                prompt_id=self.prompt.prompt_id,
                category=self.prompt.category,
                split=self.prompt.split,
                round=len(self._rows),
                generated_tokens=start,
                context_tokens=record.context_tokens,
                accepted=outcome.accepted,
                anchor=record.anchor,
                draft_tokens=record.draft_tokens,
                target_tokens=record.target_tokens,
                p1=record.p1,
                p2=record.p2,
                entropy_nats=record.entropy_nats,
                target_p1=record.target_p1,
                routes=record.routes,
            )
        )
        self._stops.append(start + len(outcome.emitted))

    def finished_rows(self) -> list[RoundRow]:
        """All rounds, with the loop periods that only the whole output shows."""
        emitted = self.request.tokens[self.request.num_prompt_tokens :]
        starts = [row.generated_tokens for row in self._rows]
        periods = round_loop_periods(emitted, starts=starts, stops=self._stops)
        return [
            replace(row, loop_period=int(period))
            for row, period in zip(self._rows, periods, strict=True)
        ]


def check_same_routes(folder: Path, record_routes: bool) -> None:
    """Refuse to go on with a trace whose routes were recorded otherwise.

    Raises:
        BundleError: naming the flag.
    """
    routes = read_trace(folder, allow_partial=True).column("routes")
    if len(routes) and (len(routes[0].as_py()) > 0) != record_routes:
        saved, now = ("without", "with") if record_routes else ("with", "without")
        flag = "--no-record-routes" if record_routes else "--record-routes"
        raise BundleError(
            f"{folder} was recorded {saved} routes, now they are asked for {now}; a resumed run "
            f"must be the same: use {flag} or another folder"
        )
