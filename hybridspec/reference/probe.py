"""Measuring one round of the reference engine again and again from the same state.

Implements `costmodels.probe.RoundProbe`. Drafted rounds run the selection as a policy round does
and then the asked number of rows, so `T(L)` for L >= 1 holds the policy's own cost too. The
first-router correction, which is off by default, is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridspec.artifacts.tables import (
    BLOCK_SIZE,
    FEATURE_NAMES,
    NUM_DRAFTS,
    HazardTable,
    StepCostTable,
    ThroughputTable,
)
from hybridspec.costmodels.probe import READING_TOKENS, ForcedRouteTiming, RoundTiming
from hybridspec.errors import EnvironmentMissing, UsageError
from hybridspec.policy import Policy
from hybridspec.reference.engine import Engine, Request
from hybridspec.request import LengthRule

VARIANTS = 4
# Rounds of the same length before the one that is timed. Drafted rounds follow one another with
# changing lengths, but plain rounds come in long runs and find everything in the caches: measured
# right behind others they came out 30 % too slow.
WARM_ROUNDS, WARM_PLAIN_ROUNDS = 2, 16
# Tokens that a round typically commits: their hidden states wait for the next draft pass.
PENDING_TOKENS = 3


@dataclass(frozen=True)
class _Snapshot:
    """What a round changes in one request besides its state slot."""

    tokens: list[int]
    context_tokens: int
    drafter_tokens: int
    pending: list[list[torch.Tensor]]


class EngineProbe:
    """Drives an engine of its own through forced rounds.

    Args:
        engine: with a drafter and `VARIANTS` slots for each request of the largest batch; its
            policy is replaced by one that costs the same and decides nothing.
        texts: token ids of real text; contexts are cut from their concatenation, so drafts and
            routes are as in use. Each is used in turn as a start, so that repeats see several.
        identity: facts that bind the measurement.

    Raises:
        UsageError: no drafter, or no text.
    """

    def __init__(
        self, engine: Engine, texts: Sequence[Sequence[int]], identity: Mapping[str, str]
    ) -> None:
        if engine.drafter is None:
            raise UsageError("profiling needs a drafter: give one with --drafter")
        stream = [token for text in texts for token in text]
        if not stream:
            raise UsageError("profiling needs some text to decode from; 0 tokens were given")
        self._engine = engine
        self._stream = stream
        self._starts = np.cumsum([0, *[len(text) for text in texts]])[:-1].tolist()
        self._identity = dict(identity)
        self._batches: list[list[Request]] = []
        self._snapshots: list[list[_Snapshot]] = []
        self._next = 0
        engine.policy = Policy(*indifferent_tables(), device=engine.device)

    @property
    def max_batch(self) -> int:
        """Largest batch that fits in every variant."""
        return self._engine.max_batch // VARIANTS

    @property
    def max_context(self) -> int:
        """Largest context with room behind it for the rounds of one measurement."""
        return self._engine.max_context - READING_TOKENS

    @property
    def num_layers(self) -> int:
        """Layers with routed experts."""
        return self._engine.target_config.num_layers

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self._engine.target_config.num_experts

    @property
    def experts_per_token(self) -> int:
        """Experts that a row activates in a layer."""
        return self._engine.target_config.experts_per_token

    def identity(self) -> Mapping[str, str]:
        """Facts that bind the measurement."""
        return self._identity

    def prepare(self, *, context_tokens: int, batch_size: int) -> None:
        """Fill `VARIANTS` batches of requests that have processed `context_tokens` tokens."""
        if batch_size > self.max_batch or not PENDING_TOKENS < context_tokens <= self.max_context:
            raise UsageError(
                f"batch {batch_size} and context {context_tokens} must lie in 1..{self.max_batch} "
                f"and {PENDING_TOKENS + 1}..{self.max_context}"
            )
        for batch in self._batches:
            for request in batch:
                self._engine.remove(request)
        self._batches = [
            [self._request(context_tokens, v * batch_size + i) for i in range(batch_size)]
            for v in range(VARIANTS)
        ]
        self._snapshots = [[_snapshot(r) for r in batch] for batch in self._batches]
        self._states = (
            self._engine.pool.recurrent_SXHVK.clone(),
            self._engine.pool.conv_SXWC.clone(),
        )

    @torch.inference_mode()
    def _request(self, context_tokens: int, number: int) -> Request:
        engine = self._engine
        start = self._starts[number % len(self._starts)] + number // len(self._starts)
        tokens = [self._stream[(start + i) % len(self._stream)] for i in range(context_tokens)]
        request = engine.add(tokens, length_rule=LengthRule("policy"))
        request.log.eos_token_ids = frozenset()
        request.log.finished = False
        layers = [torch.cat(parts) for parts in zip(*request.pending_features, strict=True)]
        features = torch.cat(layers, -1)
        assert engine.drafter is not None
        assert request.draft_cache is not None
        engine.drafter.inject(request.draft_cache, 0, features[:-PENDING_TOKENS])
        request.drafter_tokens = context_tokens - PENDING_TOKENS
        request.pending_features[:] = [[part[-PENDING_TOKENS:] for part in layers]]
        return request

    @torch.inference_mode()
    def _restore(self, variant: int) -> None:
        pool = self._engine.pool
        for request, saved in zip(self._batches[variant], self._snapshots[variant], strict=True):
            request.log.tokens[:] = saved.tokens
            request.log.context_tokens = saved.context_tokens
            request.log.finished = False
            request.drafter_tokens = saved.drafter_tokens
            request.pending_features[:] = saved.pending
            recurrent, conv = self._states
            pool.recurrent_SXHVK[request.slot] = recurrent[request.slot]
            pool.conv_SXWC[request.slot] = conv[request.slot]

    def _run(self, verify_length: int) -> float:
        if not self._batches:
            raise UsageError("prepare a context before a round is measured")
        variant = self._next = (self._next + 1) % VARIANTS
        engine = self._engine
        engine.forced_length = verify_length
        try:
            for _ in range(WARM_ROUNDS if verify_length else WARM_PLAIN_ROUNDS):
                engine.step(self._batches[variant])
            self._synchronise()
            began = time.perf_counter()
            engine.step(self._batches[variant])
            self._synchronise()
            return (time.perf_counter() - began) * 1e6
        finally:
            engine.forced_length = None
            self._restore(variant)

    def _synchronise(self) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)

    def run_round(self, verify_length: int) -> RoundTiming:
        """One round of `verify_length` rows a request, 0 for a round without a draft pass."""
        total_us = self._run(verify_length)
        timing = self._engine.last_timing
        return RoundTiming(
            total_us=total_us,
            draft_us=timing.draft_us,
            verify_us=timing.verify_us,
            commit_us=timing.commit_us,
            rows_run=timing.rows_run,
        )

    def run_forced_routes(self, verify_length: int, distinct_experts: int) -> ForcedRouteTiming:
        """One round whose rows activate `distinct_experts` experts of each layer in total."""
        engine = self._engine
        rows = len(self._batches[0]) * verify_length
        blocks = engine.target.blocks
        top_k = self.experts_per_token
        places = (torch.arange(rows * top_k) % distinct_experts).view(rows, top_k)
        generator = torch.Generator().manual_seed(verify_length * 1009 + distinct_experts)
        try:
            for block in blocks:
                chosen = torch.randperm(self.num_experts, generator=generator)
                block.forced_experts_RK = chosen[places].to(engine.device)
            total_us = self._run(verify_length)
        finally:
            for block in blocks:
                block.forced_experts_RK = None
        ran = {block.last_distinct_experts for block in blocks}
        if len(ran) != 1:
            raise EnvironmentMissing(
                f"layers ran {sorted(ran)} distinct experts where all were forced to "
                f"{distinct_experts}: the batch is too large for forced routes"
            )
        return ForcedRouteTiming(
            total_us=total_us, rows_run=engine.last_timing.rows_run, distinct_experts=ran.pop()
        )


def _snapshot(request: Request) -> _Snapshot:
    return _Snapshot(
        list(request.log.tokens),
        request.log.context_tokens,
        request.drafter_tokens,
        list(request.pending_features),
    )


def indifferent_tables() -> tuple[HazardTable, StepCostTable, ThroughputTable]:
    """Tables of a policy that costs what any policy costs and whose choices mean nothing."""
    ones = np.ones((1, 1, BLOCK_SIZE + 1))
    grid = np.ones(1, dtype=np.int64)
    hazard = HazardTable(
        "raw",
        np.eye(len(FEATURE_NAMES))[0],
        np.zeros(NUM_DRAFTS),
        np.linspace(0.0, 1.0, 32),
        np.linspace(0.0, 1.0, 32),
    )
    cost = StepCostTable(grid, grid, ones, ones, ones, ones[..., 0], 1.0, 1.0)
    return hazard, cost, ThroughputTable(grid, np.ones(1), grid)
