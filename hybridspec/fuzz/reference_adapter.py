"""The reference engine under the fuzzer.

The engine's code runs as it is. Its drafter is handed on to, but what it proposes is replaced by
the planned drafts; a policy with planned lengths makes the rounds that are cut at the first router;
the target is watched for the logits of each pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.fuzz.adapter import LOGITS, EngineFacts, Memory, Outcome, PlainText
from hybridspec.fuzz.operations import Join, Plan
from hybridspec.fuzz.plain import CONV, KEYS, RECURRENT, VALUES, ReferencePlainText
from hybridspec.policy import Policy, Selection
from hybridspec.reference.drafter import Drafter, DraftSignals
from hybridspec.reference.engine import PREFILL_CHUNK_TOKENS, Engine
from hybridspec.reference.gdn_layer import PREFILL_BLOCK_ROWS
from hybridspec.reference.loading import load_pair
from hybridspec.reference.probe import indifferent_tables
from hybridspec.reference.sequence import Request
from hybridspec.reference.state import PAGE_TOKENS, KVCache
from hybridspec.reference.target import Target
from hybridspec.request import LengthRule, SamplingParams

MAX_REQUESTS = 3
MAX_CONTEXT = 560
# In float64 the order of sums moves states by 1e-13 or so (benchmarks/results/fuzz_cpu.json).
TOLERANCE = 1e-9
TIE_LOGITS = 1e-9


@dataclass
class PlannedDrafter:
    """A drafter whose proposals are planned; its passes and caches are the real ones.

    Attributes:
        drafts: the 15 tokens to propose, by the id of the request's draft cache.
    """

    real: Drafter
    drafts: dict[int, list[int]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def draft(
        self, anchors: Sequence[int], starts: Sequence[int], caches: Sequence[KVCache]
    ) -> DraftSignals:
        """Draft for real, then put the planned tokens in place."""
        signals = self.real.draft(anchors, starts, caches)
        planned = [self.drafts[id(cache)] for cache in caches]
        return replace(signals, tokens_BD=torch.tensor(planned, device=self.real.device))


@dataclass
class WatchedTarget:
    """A target that remembers the logits of its last pass."""

    real: Target
    last_logits_RV: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def logits(self, normed_RH: torch.Tensor) -> torch.Tensor:
        """The LM head."""
        self.last_logits_RV = self.real.logits(normed_RH)
        return self.last_logits_RV


class PlannedLengths(Policy):
    """A policy that selects what it was told and cuts at the first router where it was told.

    Attributes:
        plans: of the policy requests of the next round, in batch order.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(*indifferent_tables(), device=device)
        self.lookahead = 1
        self.plans: list[Plan] = []
        # Else a request would stop drafting once that does not pay.
        self.set_static("lengths are planned")

    def select(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
        lams: Sequence[float],
        caps: Sequence[int],
        batch_size: int,
        **unread: object,
    ) -> Selection:
        """Verified and dropped rows of each plan, as far as they fit."""
        lengths = [min(p.rows + p.dropped, c) for p, c in zip(self.plans, caps, strict=True)]
        nothing = [[0.0] * BLOCK_SIZE for _ in lengths]
        return Selection(lengths, nothing, nothing, list(lams), [None] * len(lengths))

    def looks_ahead(self, length: int, cap: int) -> bool:
        """Never: the dropped rows are selected ones."""
        return False

    def correct(
        self, experts_RK: torch.Tensor, selection: Selection, row: int, *, num_experts: int
    ) -> int:
        """Cut to the planned rows."""
        return min(self.plans[row].rows, selection.lengths[row])


class ReferenceAdapter:
    """Drives a reference engine, a new one after every `reset`.

    Args:
        target_folder, drafter_folder: of one pair.
        device: `cpu`, `cuda` or `cuda:N`.
        max_requests: slots. max_context: tokens of a request, or the target's limit if lower.

    Raises:
        ModelError: a folder that is no such model.
    """

    def __init__(
        self,
        target_folder: Path,
        drafter_folder: Path,
        *,
        device: str = "cpu",
        max_requests: int = MAX_REQUESTS,
        max_context: int = MAX_CONTEXT,
    ) -> None:
        loaded = load_pair(
            target_folder,
            drafter_folder,
            dtype=torch.float64,
            device=device,
            max_batch=1,
            max_context=max_context,
        )
        assert loaded.drafter is not None
        self.target, self.drafter = loaded.target, loaded.drafter
        self.facts = EngineFacts(
            name="reference",
            dtype="float64",
            vocab_size=loaded.target_config.vocab_size,
            max_requests=max_requests,
            max_context=max_context,
            boundaries=tuple(sorted({PREFILL_BLOCK_ROWS, PREFILL_CHUNK_TOKENS, PAGE_TOKENS})),
            prefix_cache=False,
            tolerance=dict.fromkeys((KEYS, VALUES, CONV, RECURRENT, LOGITS), TOLERANCE),
            tie_logits=TIE_LOGITS,
        )
        self.reset()

    def reset(self) -> None:
        """Drop every request and start from an engine that has served none."""
        self._planned_drafter = PlannedDrafter(self.drafter)
        self._watched_target = WatchedTarget(self.target)
        self._planned_lengths = PlannedLengths(self.target.device)
        self.engine = Engine(
            cast(Target, self._watched_target),
            cast(Drafter, self._planned_drafter),
            max_batch=self.facts.max_requests,
            max_context=self.facts.max_context,
            policy=self._planned_lengths,
        )
        self.requests: dict[int, Request] = {}

    @property
    def free_requests(self) -> int:
        """Requests that can still join."""
        return self.engine.free_slots

    def plain_text(self, prompt: Sequence[int]) -> PlainText:
        """Plain decoding of a prompt, on memory of its own."""
        return ReferencePlainText(self.target, prompt, max_context=self.facts.max_context)

    def join(self, operation: Join, prompt: Sequence[int]) -> Outcome:
        """Prefill `prompt`."""
        request = self.engine.add(
            prompt,
            sampling=SamplingParams(operation.temperature, seed=operation.seed),
            # Fixed, so that hidden states are kept for drafting while rounds without drafts go on.
            length_rule=LengthRule("fixed"),
        )
        request.log.eos_token_ids = frozenset()
        if request.finish_reason == "stop":
            request.log.finished, request.log.finish_reason = False, None
        self.requests[operation.key] = request
        return Outcome(
            request.tokens[len(prompt) :],
            0,
            0,
            request.finished,
            self._watched_target.last_logits_RV,
        )

    def step(
        self, plans: Mapping[int, Plan], continuations: Mapping[int, Sequence[int]]
    ) -> Mapping[int, Outcome]:
        """One round of the requests that have a plan."""
        members = {key: self.requests[key] for key in plans}
        for key, request in members.items():
            request.rule = _rule(plans[key])
            drafts = self._drafts(plans[key], continuations[key])
            self._planned_drafter.drafts[id(request.draft_cache)] = drafts
        self._planned_lengths.plans = [plan for plan in plans.values() if plan.dropped]
        rounds = self.engine.step(list(members.values()))
        outcomes, row = {}, 0
        for (key, request), outcome in zip(members.items(), rounds, strict=True):
            told = slice(row, row + len(outcome.emitted))
            outcomes[key] = Outcome(
                outcome.emitted,
                outcome.verify_length,
                outcome.accepted,
                request.finished,
                self._watched_target.last_logits_RV[told],
            )
            row += max(outcome.verify_length, 1)
        return outcomes

    def _drafts(self, plan: Plan, continuation: Sequence[int]) -> list[int]:
        vocab = self.facts.vocab_size
        right = min(plan.right, len(continuation))
        drafts = [*continuation[:right], *((token + 1) % vocab for token in continuation[right:])]
        # Behind the first wrong draft anything will do.
        return drafts + [(7 * place) % vocab for place in range(len(drafts), NUM_DRAFTS)]

    def memory(self, key: int) -> Memory:
        """Views of what the engine holds of a request."""
        request, pool = self.requests[key], self.engine.pool
        context = request.context_tokens
        return Memory(
            request.tokens,
            context,
            {
                KEYS: request.cache.keys[:, :, :context],
                VALUES: request.cache.values[:, :, :context],
                CONV: pool.conv_SXWC[request.slot],
                RECURRENT: pool.recurrent_SXHVK[request.slot],
            },
        )

    def leave(self, key: int, *, aborted: bool) -> None:
        """Free the request's slot; the engine knows one way of leaving, between two rounds."""
        self.engine.remove(self.requests.pop(key))


def _rule(plan: Plan) -> LengthRule:
    if plan.rows == 0:
        return LengthRule("none")
    return LengthRule("policy") if plan.dropped else LengthRule("fixed", plan.rows)
