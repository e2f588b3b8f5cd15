"""Play a history on an engine and compare with plain decoding of the same tokens after each step.

What must hold after every operation, for every request that is there, whether it took part or not:

    cursor      all tokens but the newest are processed
    token       each greedy token is the best of plain decoding, up to `tie_logits`
    accepted    the right drafts within the verified rows, no fewer and no more
    logits      those that gave each emitted token are plain decoding's
    the parts   KV, conv window and recurrent state are plain decoding's
    slots       requests that left make room
    error       nothing is raised
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from hybridspec.fuzz.adapter import LOGITS, EngineAdapter, Outcome, PlainText
from hybridspec.fuzz.operations import History, Join, Leave, Operation, Plan, Step


@dataclass(frozen=True)
class Violation:
    """The first thing that did not hold.

    Attributes:
        kind: see the module. operation: index in the history.
        request: key, or None where no request is to blame.
        message: one line for people.
        difference: largest absolute difference, where tensors were compared.
    """

    kind: str
    operation: int
    request: int | None
    message: str
    difference: float | None = None


@dataclass
class Tally:
    """What was played and how close it came.

    Attributes:
        counts: rounds, request_rounds, tokens, joins, ... by name.
        worst: largest difference seen, by part; `logits` among them.
    """

    counts: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add what another history did."""
        self.counts.update(other.counts)
        for part, difference in other.worst.items():
            self.worst[part] = max(self.worst.get(part, 0.0), difference)


class _Broken(Exception):
    def __init__(
        self, kind: str, request: int | None, message: str, difference: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.request, self.difference = kind, request, difference


@dataclass
class _Live:
    plain: PlainText
    tokens: list[int]
    greedy: bool
    finished: bool = False

    @property
    def context_tokens(self) -> int:
        return len(self.tokens) - 1


def play(adapter: EngineAdapter, history: History, tally: Tally | None = None) -> Violation | None:
    """Play `history` from an engine that has served nothing; returns the first violation.

    Args:
        tally: counts what was done, up to the violation.
    """
    player = _Player(adapter, tally or Tally())
    adapter.reset()
    for index, operation in enumerate(history):
        try:
            player.do(operation)
        except _Broken as broken:
            return Violation(broken.kind, index, broken.request, str(broken), broken.difference)
        except Exception as error:
            # Whatever the engine raises on a history that it must be able to serve is a finding.
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return Violation("error", index, None, text)
    return None


class _Player:
    def __init__(self, adapter: EngineAdapter, tally: Tally) -> None:
        self.adapter, self.facts, self.tally = adapter, adapter.facts, tally
        self.live: dict[int, _Live] = {}
        # Also of requests that left: prompts may go on from them.
        self.texts: dict[int, list[int]] = {}

    def do(self, operation: Operation) -> None:
        match operation:
            case Join():
                self._join(operation)
            case Step():
                self._step(operation)
            case Leave():
                self._leave(operation)
        for key in self.live:
            self._check_memory(key)
        free = self.facts.max_requests - len(self.live)
        if self.adapter.free_requests != free:
            raise _Broken(
                "slots", None, f"{self.adapter.free_requests} slots are free, {free} should be"
            )

    def _join(self, operation: Join) -> None:
        key = operation.key
        if key in self.texts or len(self.live) == self.facts.max_requests:
            return
        prompt = [*self.texts.get(-1 if operation.follows is None else operation.follows, ())]
        prompt += operation.prompt
        if len(prompt) >= self.facts.max_context:
            return
        self.tally.counts["joins"] += 1
        self.tally.counts["joins_behind_earlier_text"] += len(prompt) > len(operation.prompt)
        plain = self.adapter.plain_text(prompt)
        self.live[key] = _Live(plain, prompt, greedy=operation.temperature == 0.0)
        self.texts[key] = self.live[key].tokens
        self._take(key, self.adapter.join(operation, prompt), None, [])

    def _step(self, operation: Step) -> None:
        plans = {
            key: plan
            for key, plan in operation.plans.items()
            if key in self.live and not self.live[key].finished
        }
        if not plans:
            return
        continuations = {
            # One token more than is right, so that the next draft is known to be wrong.
            key: self.live[key].plain.continuation(min(plan.right + 1, max(plan.rows - 1, 0)))
            for key, plan in plans.items()
        }
        outcomes = self.adapter.step(plans, continuations)
        counts = self.tally.counts
        counts["rounds"] += 1
        for key, plan in plans.items():
            counts["request_rounds"] += 1
            counts["request_rounds_without_drafts"] += plan.rows == 0
            counts["request_rounds_cut_at_first_router"] += plan.dropped > 0
            self._take(key, outcomes[key], plan, continuations[key])

    def _leave(self, operation: Leave) -> None:
        if operation.key in self.live:
            self.tally.counts["aborts" if operation.aborted else "leaves"] += 1
            self.adapter.leave(operation.key, aborted=operation.aborted)
            del self.live[operation.key]

    def _take(self, key: int, outcome: Outcome, plan: Plan | None, continuation: list[int]) -> None:
        """Judge what was emitted and go on from it."""
        request = self.live[key]
        start = len(request.tokens)
        emitted = list(outcome.emitted)
        if len(emitted) != outcome.accepted + 1:
            raise _Broken(
                "accepted",
                key,
                f"{len(emitted)} tokens are emitted with {outcome.accepted} drafts accepted",
            )
        if plan is not None:
            room = self.facts.max_context - request.context_tokens - 1
            rows = min(plan.rows, room)
            if outcome.rows != rows:
                raise _Broken("accepted", key, f"{outcome.rows} rows are verified, not {rows}")
            right = min(plan.right, max(rows - 1, 0))
            as_plain = emitted == continuation[: len(emitted)]
            # Where the text is not plain decoding's, the token is judged below.
            if request.greedy and as_plain and outcome.accepted != right:
                raise _Broken(
                    "accepted", key, f"{outcome.accepted} drafts are accepted, {right} are right"
                )
        request.tokens += emitted
        request.finished = outcome.finished
        request.plain.follow(request.tokens)
        self.tally.counts["tokens"] += len(emitted)
        self._count_boundaries(start, len(request.tokens))
        for place, token in enumerate(emitted):
            plain_logits = request.plain.logits(start + place)
            if request.greedy:
                gap = float(plain_logits.max() - plain_logits[token])
                # Written so that NaN is a violation too.
                if not gap <= self.facts.tie_logits:
                    best = int(plain_logits.argmax())
                    text = (
                        f"token {token} of request {key} at position {start + place} lies "
                        f"{gap:.3g} below plain decoding's {best}"
                    )
                    raise _Broken("token", key, text, gap)
            if outcome.logits_EV is not None:
                have = outcome.logits_EV[place]
                self._compare(key, LOGITS, have, plain_logits, start + place)

    def _count_boundaries(self, start: int, stop: int) -> None:
        for boundary in self.facts.boundaries:
            crossed = (stop - 1) // boundary - (start - 1) // boundary
            self.tally.counts[f"crossings_of_{boundary}"] += crossed

    def _check_memory(self, key: int) -> None:
        request = self.live[key]
        memory = self.adapter.memory(key)
        if memory.context_tokens != request.context_tokens or len(memory.tokens) != len(
            request.tokens
        ):
            raise _Broken(
                "cursor",
                key,
                f"request {key} has {len(request.tokens)} tokens; the engine holds "
                f"{len(memory.tokens)}, {memory.context_tokens} of them as processed",
            )
        if list(memory.tokens) != request.tokens:
            raise _Broken("token", key, f"the engine's text of request {key} is not what it said")
        plain = request.plain.memory(request.context_tokens)
        for part in self.facts.tolerance:
            if part != LOGITS:
                self._compare(key, part, memory.parts[part], plain[part], request.context_tokens)

    def _compare(
        self, key: int, part: str, have: torch.Tensor, plain: torch.Tensor, context: int
    ) -> None:
        if have.shape != plain.shape:
            raise _Broken(part, key, f"{part} of request {key} is {tuple(have.shape)}")
        difference = float((have - plain).abs().max()) if plain.numel() else 0.0
        allowed = self.facts.tolerance[part]
        if not difference <= allowed:
            raise _Broken(
                part,
                key,
                f"{part} of request {key} behind {context} tokens is {difference:.3g} from plain "
                f"decoding, more than {allowed:.1g}",
                difference,
            )
        self.tally.worst[part] = max(self.tally.worst.get(part, 0.0), difference)
