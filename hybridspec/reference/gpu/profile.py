"""Measuring rounds on a GPU as they are served: captured graphs, timed between events.

Implements `costmodels.probe.RoundProbe` over any `MeasurableRound`. Every reading starts from the
state that `place` left, which is copied back on the device in front of each replay; the host is
ahead of the device all along, so no launch cost of the host is in a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch

from hybridspec.costmodels.probe import READING_TOKENS, ForcedRouteTiming, RoundTiming
from hybridspec.errors import EnvironmentMissing, UsageError
from hybridspec.reference.gpu.control import GraphControl, SplitRound

# Rounds in front of the timed ones: they bring the caches to where a run of rounds leaves them.
WARM_ROUNDS, TIMED_ROUNDS = 1, 3
# Keeps the device busy while the host enqueues a reading.
HEAD_START_CYCLES = 1_000_000

Part = Literal["drafted", "forced", "draft", "commit", "plain"]


class MeasurableRound(Protocol):
    """A round that can be put into a chosen place and run with a forced length or routes.

    What is forced lies in buffers on the device: forcing something else needs no new capture.

    Attributes:
        batch: requests.
        max_context: tokens that a request may hold.
        num_layers, num_experts, experts_per_token: of the target's routed experts.
        drafted: the round of a policy.
        forced: the same with routes of a table in place of the routers'.
    """

    batch: int
    max_context: int
    num_layers: int
    num_experts: int
    experts_per_token: int

    @property
    def drafted(self) -> SplitRound:
        """See the class."""
        ...

    @property
    def forced(self) -> SplitRound:
        """See the class."""
        ...

    def draft(self) -> None:
        """Launches the draft pass alone; running it again changes nothing."""
        ...

    def commit(self) -> None:
        """Launches the commit of states and windows alone, of the rows of the last round."""
        ...

    def plain(self) -> None:
        """Launches a round without a draft pass, of one row a request."""
        ...

    def place(self, context_tokens: int) -> None:
        """Leaves every request with that many processed tokens, and remembers the state."""
        ...

    def restore(self) -> None:
        """Enqueues the copies that bring the state of the last `place` back."""
        ...

    def force_length(self, length: int | None) -> None:
        """Every request verifies `length` rows from now on; None: as the policy says."""
        ...

    def force_routes(self, distinct_experts: int, *, length: int) -> None:
        """Fills the table of `forced`: `length` rows a request activate that many experts.

        Args:
            distinct_experts: of each layer, over the rows of all requests.
        """
        ...

    def rows_run(self) -> int:
        """Live rows of the last round past the first router, over the batch. Waits."""
        ...

    def distinct_experts_run(self) -> set[int]:
        """Distinct experts that the layers of the last round ran, each number once. Waits."""
        ...


class GpuProbe:
    """Drives captured rounds of every batch size through forced lengths and routes.

    Args:
        make_round: the round of a batch size; called once for each.
        make_control: what captures and replays it; a fresh one a batch size.
        max_batch: largest batch size that `make_round` serves.
        identity: facts that bind the measurement.
    """

    def __init__(
        self,
        make_round: Callable[[int], MeasurableRound],
        make_control: Callable[[], GraphControl],
        *,
        max_batch: int,
        identity: Mapping[str, str],
    ) -> None:
        self.max_batch = max_batch
        self._make_round, self._make_control = make_round, make_control
        self._identity = dict(identity)
        self._captured: dict[int, _Captured] = {}
        self._current: _Captured | None = None

    def _of_batch(self, batch: int) -> _Captured:
        if batch not in self._captured:
            self._captured[batch] = _Captured(self._make_round(batch), self._make_control)
        return self._captured[batch]

    @property
    def _shape(self) -> MeasurableRound:
        return (self._current or self._of_batch(1)).round

    @property
    def max_context(self) -> int:
        """Largest context with room behind it for the rounds of one reading."""
        return self._shape.max_context - READING_TOKENS

    @property
    def num_layers(self) -> int:
        """Layers with routed experts."""
        return self._shape.num_layers

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self._shape.num_experts

    @property
    def experts_per_token(self) -> int:
        """Experts that a row activates in a layer."""
        return self._shape.experts_per_token

    def identity(self) -> Mapping[str, str]:
        """Facts that bind the measurement."""
        return self._identity

    def prepare(self, *, context_tokens: int, batch_size: int) -> None:
        """Put `batch_size` requests behind `context_tokens` processed tokens each."""
        if not 1 <= batch_size <= self.max_batch:
            raise UsageError(f"batch {batch_size} must lie in 1..{self.max_batch}")
        captured = self._of_batch(batch_size)
        most = captured.round.max_context - READING_TOKENS
        if not 1 <= context_tokens <= most:
            raise UsageError(f"context {context_tokens} must lie in 1..{most}")
        captured.round.place(context_tokens)
        self._current = captured

    def run_round(self, verify_length: int) -> RoundTiming:
        """One round of `verify_length` rows a request, 0 for a round without a draft pass.

        Draft pass and commit are timed as graphs of their own, and verification is what they leave
        of the round; a round without a draft pass is not timed in parts.
        """
        captured = self._ready()
        round = captured.round
        drafted = verify_length > 0
        round.force_length(max(verify_length, 1))
        draft_us, verify_us, commit_us = 0.0, float("nan"), float("nan")
        try:
            total_us = captured.time("drafted" if drafted else "plain")
            rows = round.rows_run()
            if drafted:
                draft_us, commit_us = captured.time("draft"), captured.time("commit")
                verify_us = max(total_us - draft_us - commit_us, 0.0)
        finally:
            round.force_length(None)
            round.restore()
        return RoundTiming(
            total_us=total_us,
            draft_us=draft_us,
            verify_us=verify_us,
            commit_us=commit_us,
            rows_run=rows,
        )

    def run_forced_routes(self, verify_length: int, distinct_experts: int) -> ForcedRouteTiming:
        """One round whose rows activate `distinct_experts` experts of each layer in total."""
        captured = self._ready()
        round = captured.round
        round.force_length(verify_length)
        round.force_routes(distinct_experts, length=verify_length)
        try:
            total_us = captured.time("forced")
            rows, ran = round.rows_run(), round.distinct_experts_run()
        finally:
            round.force_length(None)
            round.restore()
        if len(ran) != 1:
            raise EnvironmentMissing(
                f"layers ran {sorted(ran)} distinct experts where all were forced to "
                f"{distinct_experts}: the engine's forced routes do not reach every layer"
            )
        return ForcedRouteTiming(total_us=total_us, rows_run=rows, distinct_experts=ran.pop())

    def _ready(self) -> _Captured:
        if self._current is None:
            raise UsageError("prepare a context before a round is measured")
        return self._current


class _Captured:
    """The graphs of one batch size; on a host without a GPU the same work, launched eagerly."""

    def __init__(self, round: MeasurableRound, make_control: Callable[[], GraphControl]) -> None:
        self.round, self._make_control = round, make_control
        self.device = round.drafted.lengths_B.device
        self._replays: dict[Part, Callable[[], Any]] = {}

    def _replay(self, part: Part) -> Callable[[], Any]:
        """What runs a part; captured when it is first asked for, from the placed state."""
        if part not in self._replays:
            self._replays[part] = self._make(part)
        return self._replays[part]

    def _make(self, part: Part) -> Callable[[], Any]:
        round = self.round
        if part in ("drafted", "forced"):
            split = round.drafted if part == "drafted" else round.forced
            if self.device.type != "cuda":
                return lambda: (split.prefix(), split.rest(split.max_rows))
            round.restore()
            control = self._make_control()
            control.capture(split)
            return control.replay
        work = {"draft": round.draft, "commit": round.commit, "plain": round.plain}[part]
        if self.device.type != "cuda":
            return work
        from hybridspec.reference.gpu.capture import capture, warm

        round.restore()
        warm(work)
        return capture(work, pool=torch.cuda.graph_pool_handle()).replay

    def time(self, part: Part) -> float:
        """Median microseconds of a part, each time from the state of `place`."""
        replay = self._replay(part)
        for _ in range(WARM_ROUNDS):
            self.round.restore()
            replay()
        if self.device.type != "cuda":
            return statistics.median(self._host_us(replay) for _ in range(TIMED_ROUNDS))
        events = []
        torch.cuda._sleep(HEAD_START_CYCLES)
        for _ in range(TIMED_ROUNDS):
            self.round.restore()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(1e3 * begin.elapsed_time(end) for begin, end in events)

    def _host_us(self, replay: Callable[[], Any]) -> float:
        self.round.restore()
        began = time.perf_counter()
        replay()
        return (time.perf_counter() - began) * 1e6
