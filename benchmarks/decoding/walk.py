"""What each arm would take for this run's own prompts, walked over rounds recorded at every anchor.

The texts are those that the arms decode, from their first token to their last: a walk starts each
round at an anchor whose drafts, acceptance and experts were recorded, so what it says differs from
a measurement only by the cost of rounds (and by ties that another order of sums decides otherwise).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from decoding.prepared import Prepared

from hybridspec.artifacts.tables import TREES, FloatArray, HazardKind, StepCostTable
from hybridspec.calibrate.features import TraceArrays, list_column, trace_arrays
from hybridspec.calibrate.hazard import predict_hazards
from hybridspec.calibrate.loops import round_loop_periods
from hybridspec.costmodels.lookup import latency_by_round
from hybridspec.costmodels.policies import LengthPolicy
from hybridspec.costmodels.recorded import round_set
from hybridspec.costmodels.replay import round_costs
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.hazards import RequestHistory, TreeHazards


@dataclass
class Walked:
    """Sums over rounds outside repetition loops."""

    tokens: int = 0
    us: float = 0.0
    rounds: int = 0
    rows: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.us * 1e6 if self.us else float("nan")


class Step(NamedTuple):
    """A round of a walk: the anchor that it starts at, the next one's, and its length."""

    start: int
    stop: int
    length: int


@dataclass(frozen=True)
class AnchorTexts:
    """Texts with a recorded round at every anchor.

    Attributes:
        rounds: a row an anchor, hazards of the table; rows of a text in order.
        arrays: the signals behind them.
        target_tokens_RL: int64 [R, 16], the target's choices.
        cost_NL: float64 [R, 17], what a round there costs, experts of its own rows priced.
        latency_NL: float64 [R, 17], what policies look up.
    """

    rounds: RoundSet
    arrays: TraceArrays
    target_tokens_RL: np.ndarray
    cost_NL: FloatArray
    latency_NL: FloatArray

    @classmethod
    def of(
        cls,
        table: pa.Table,
        prepared: Prepared,
        cost: StepCostTable,
        charged: StepCostTable,
        *,
        mean_distinct_L: FloatArray | None,
    ) -> AnchorTexts:
        """From `record_texts`.

        Args:
            cost: what policies look latencies up in.
            charged: mean times, what a round costs where its experts are as many as on average.
            mean_distinct_L: float64 [16], distinct experts at which the costs were measured.
        """
        arrays = trace_arrays(table)
        rounds = round_set(
            table, lambda found: predict_hazards(prepared.hazard, found.features_RDF), arrays=arrays
        )
        return cls(
            rounds,
            arrays,
            list_column(table, "target_tokens").astype(np.int64),
            round_costs(rounds, charged, mean_distinct_L=mean_distinct_L),
            latency_by_round(cost, batch=1, context_tokens=rounds.context_tokens),
        )

    def texts(self) -> list[np.ndarray]:
        """Rows of each text."""
        prompts = self.rounds.prompt_index
        return [np.flatnonzero(prompts == prompt) for prompt in np.unique(prompts)]

    def walk(self, policy: LengthPolicy, trees: TreeHazards | None) -> dict[str, Walked]:
        """Walk all texts under a rule; sums by category, `all` among them.

        Args:
            trees: hazards in place of the table's, whose history follows the walk.
        """
        sums: dict[str, Walked] = {}
        for rows in self.texts():
            steps = self.walk_text(rows, policy, trees)
            tokens = [*self.arrays.anchor[rows].tolist(), int(self.target_tokens_RL[rows[-1], 0])]
            # The first token is the prefill's.
            loops = round_loop_periods(
                tokens,
                starts=[1 + step.start for step in steps],
                stops=[1 + step.stop for step in steps],
            )
            for step, loop in zip(steps, loops, strict=True):
                if loop:
                    continue
                for category in ("all", str(self.rounds.category[rows[0]])):
                    total = sums.setdefault(category, Walked())
                    total.tokens += step.stop - step.start
                    total.us += float(self.cost_NL[rows[step.start], step.length])
                    total.rounds += 1
                    total.rows += max(step.length, 1)
        return sums

    def walk_text(
        self, rows: np.ndarray, policy: LengthPolicy, trees: TreeHazards | None
    ) -> list[Step]:
        """The rounds of one text.

        Args:
            rows: of the text, one an anchor.
        """
        chosen = None
        if trees is None:
            chosen = policy.lengths(self.rounds.select(rows), self.latency_NL[rows])
        history = None if trees is None else trees.start([int(self.arrays.anchor[rows[0]])])
        accepted, steps, place = self.rounds.accepted[rows], [], 0
        while place < len(rows):
            row = int(rows[place])
            if chosen is not None:
                length = int(chosen[place])
            else:
                assert trees is not None
                assert history is not None
                length = self._by_trees(row, policy, trees, history)
            kept = min(int(accepted[place]), max(length, 1) - 1)
            if history is not None:
                emitted = self.target_tokens_RL[row, : kept + 1].tolist()
                history.observe(emitted, accepted=kept, verify_length=length)
            steps.append(Step(place, min(place + kept + 1, len(rows)), length))
            place = steps[-1].stop
        return steps

    def _by_trees(
        self, row: int, policy: LengthPolicy, trees: TreeHazards, history: RequestHistory
    ) -> int:
        arrays = self.arrays
        p1, p2, entropy = (
            torch.from_numpy(values[row : row + 1]).float()
            for values in (arrays.p1_RD, arrays.p2_RD, arrays.entropy_RD)
        )
        drafts = torch.from_numpy(arrays.draft_tokens_RD[row : row + 1])
        hazards = trees.hazards(
            p1, p2, entropy, [int(arrays.context_tokens[row])], drafts, [history]
        )
        one = self.rounds.select(np.array([row]))
        one = dataclasses.replace(one, hazards_ND=np.asarray(hazards))
        return int(policy.lengths(one, self.latency_NL[row : row + 1])[0])


def walk_arms(
    texts: AnchorTexts,
    policies: Sequence[LengthPolicy],
    prepared: Prepared,
    kind: HazardKind,
    *,
    by_hazards: Callable[[str], bool],
) -> dict[tuple[str, str], Walked]:
    """Walk every rule; by name and category.

    Args:
        kind: hazards of the rules that read them.
        by_hazards: whether the rule of a name reads hazards.
    """
    trees = None
    if kind == TREES and prepared.trees is not None:
        trees = TreeHazards(prepared.trees)
    return {
        (policy.name, category): walked
        for policy in policies
        for category, walked in texts.walk(
            policy, trees if by_hazards(policy.name) else None
        ).items()
    }
