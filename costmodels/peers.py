"""Length rules that other projects publish, written from their descriptions for comparison.

Each states its source and where it departs from it. Rules that need what a trace does not hold are
not here: AdaFlash (arXiv:2607.19223) reads the drafter's hidden states through a trained head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS, FloatArray, IntArray
from hybridspec.costmodels.policies import best_ratio
from hybridspec.costmodels.rounds import RoundSet, expected_emitted
from hybridspec.errors import UsageError

# DSpark's planner leaves out drafts that survive less often than this.
SURVIVAL_FLOOR = 1e-6


@dataclass(frozen=True)
class Evict:
    """Benefit of the drafts against profiled verification cost, from the drafter's own signals.

    EVICT (arXiv:2605.00342) truncates the draft to its cost-effective prefix before verification:
    "fine-grained drafter signals to estimate candidate benefit", combined with "offline-profiled
    verification cost", without training. A public implementation for vLLM words the rule on a
    chain as the prefix m with the largest `E[A(m)] / C(m)`, expected accepted length over profiled
    cost. Here E comes from raw top-1 probabilities, and C is the verification alone: a draft pass
    that is over cannot be saved any more.

    For one request D-Cut's published rule is the same one: prefix products of the selected tokens'
    probabilities over a profiled verifier time (vllm-project/vllm#44885).

    Attributes:
        draft_us: the draft pass, taken off the round latency.
    """

    draft_us: float
    name: str = "evict"

    def __post_init__(self) -> None:
        if not self.draft_us >= 0:
            raise UsageError(f"draft pass of {self.draft_us:g} us must be at least 0")

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns the length in 1..16 with the best ratio; ties go shorter.

        Raises:
            UsageError: no raw probabilities, or a draft pass as long as a whole round.
        """
        if rounds.top1_ND is None:
            raise UsageError(
                "evict needs the drafter's top-1 probabilities, which these rounds lack: "
                "leave it out or record them"
            )
        verify_us = latency_NL - self.draft_us
        if not np.all(verify_us[:, 1:] > 0):
            raise UsageError(
                f"a draft pass of {self.draft_us:g} us is as long as a whole round of "
                f"{float(latency_NL[:, 1:].min()):g} us: measure it again"
            )
        return best_ratio(expected_emitted(rounds.top1_ND), verify_us)


@dataclass(frozen=True)
class DSparkPlanner:
    """SGLang's confidence planner over a steps-per-second (SPS) table, for one request.

    As published in SGLang 0.5.16 (`dspark_components`): the budget of verified drafts maximises
    `(requests + sum of the largest survivals) * steps per second`, on the confidences of
    `lag_rounds` rounds earlier, as a host plans it; a request too young for that counts as
    surviving surely, so that its first rounds are verified in full. The drafts of the current
    round then fill the budget by survival: for one request a prefix of that length. Survival comes
    from the hazards of the replay, where DSpark has a trained confidence head.

    Attributes:
        lag_rounds: how old the planned confidences are; 0 plans on the current round.
    """

    lag_rounds: int = 2
    name: str = "dspark"

    def __post_init__(self) -> None:
        if self.lag_rounds < 0:
            raise UsageError(f"a lag of {self.lag_rounds} rounds must be at least 0")

    @property
    def keeps_history(self) -> bool:
        """Whether a choice depends on rounds before."""
        return self.lag_rounds > 0

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns `1 + budget` in 1..16; ties go shorter."""
        survival = np.cumprod(rounds.hazards_ND, axis=1)
        planned = np.ones_like(survival)
        source = _rows_before(rounds.prompt_index, self.lag_rounds)
        planned[source >= 0] = survival[source[source >= 0]]
        planned[planned < SURVIVAL_FLOOR] = 0.0
        emitted = np.ones((len(rounds), BLOCK_SIZE + 1))
        emitted[:, 2:] += np.cumsum(planned, axis=1)
        return best_ratio(emitted, latency_NL)


@dataclass(frozen=True)
class EmaAccepted:
    """One row beyond what a moving average of accepted drafts expects, and the anchor.

    SGLang's adaptive rule: `clamp(round(ema) + 1)` drafts, the average with weight 0.2 for the
    newest round and starting one below the current number of drafts (`adaptive_spec_params.py`,
    0.5.16; for DFlash sgl-project/sglang#24596). Departures: the average belongs to a request and
    moves the length every round and to any value; theirs belongs to a batch size, moves every five
    rounds and between captured tiers. It sees what an engine would: at most the drafts verified.

    Attributes:
        weight: of the newest round, in (0, 1].
        first_length: verify length of a request's first round.
    """

    weight: float = 0.2
    first_length: int = BLOCK_SIZE
    name: str = "ema"
    keeps_history: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise UsageError(f"weight {self.weight:g} of the newest round must lie in (0, 1]")
        if not 2 <= self.first_length <= BLOCK_SIZE:
            raise UsageError(f"first length {self.first_length} must lie in 2..{BLOCK_SIZE}")

    def lengths(self, rounds: RoundSet, latency_NL: FloatArray) -> IntArray:
        """Returns `clamp(round(ema) + 1, 1, 15) + 1`."""
        prompts, prompt = np.unique(rounds.prompt_index, return_inverse=True)
        ema = np.full(prompts.size, self.first_length - 2.0)
        lengths = np.empty(len(rounds), dtype=np.int64)
        for rows in _rows_by_step(rounds.prompt_index):
            who = prompt[rows]
            drafts = np.clip(np.round(ema[who]) + 1.0, 1, NUM_DRAFTS)
            lengths[rows] = drafts.astype(np.int64) + 1
            seen = np.minimum(rounds.accepted[rows], drafts)
            ema[who] += self.weight * (seen - ema[who])
        return lengths


def _positions(prompt_index: IntArray) -> tuple[IntArray, IntArray]:
    """Returns rows sorted by prompt, and for each of them its place within the prompt."""
    order = np.argsort(prompt_index, kind="stable")
    ordered = prompt_index[order]
    new = np.ones(ordered.size, dtype=np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    start = np.maximum.accumulate(np.where(new, np.arange(ordered.size), 0))
    return order, np.arange(ordered.size) - start


def _rows_before(prompt_index: IntArray, distance: int) -> IntArray:
    """Returns the row `distance` rounds earlier in the same prompt, -1 where there is none."""
    order, place = _positions(prompt_index)
    source = np.full(order.size, -1, dtype=np.int64)
    late = np.flatnonzero(place >= distance)
    source[order[late]] = order[late - distance]
    return source


def _rows_by_step(prompt_index: IntArray) -> Iterator[IntArray]:
    """Yields the rows of all first rounds, then of all second rounds, and so on."""
    order, place = _positions(prompt_index)
    by_place = order[np.argsort(place, kind="stable")]
    ends = np.cumsum(np.bincount(place))
    start = 0
    for end in ends.tolist():
        yield by_place[start:end]
        start = end
