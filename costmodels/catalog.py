"""Every length policy by name, fitted on calibration rounds where it needs fitting."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, StepCostTable
from hybridspec.costmodels.correction import ExpertLine, ExpertPriced, RouterCorrected
from hybridspec.costmodels.lookup import batch_row, latency_by_round
from hybridspec.costmodels.peers import DSparkPlanner, EmaAccepted, Evict
from hybridspec.costmodels.policies import (
    Dinkelbach,
    FixedByCategory,
    FixedLength,
    LengthPolicy,
    OracleLength,
    RoundRatio,
)
from hybridspec.costmodels.rounds import RoundSet
from hybridspec.costmodels.throughput import MIN_ROUNDS, ThroughputFit, fit_lengths
from hybridspec.errors import NotEnoughData, UsageError

_FIXED = tuple(f"fixed-{length}" for length in range(1, BLOCK_SIZE + 1))


@dataclass(frozen=True)
class Fitting:
    """What policies are fitted on: calibration rounds against one cost.

    Attributes:
        rounds: calibration rounds outside repetition loops.
        table: the machine's cost.
        batch: requests decoded together.
    """

    rounds: RoundSet
    table: StepCostTable
    batch: int = 1

    @cached_property
    def latency_NL(self) -> FloatArray:
        """What the policies look up, float64 [n, 17] in us."""
        return latency_by_round(
            self.table, batch=self.batch, context_tokens=self.rounds.context_tokens
        )

    @cached_property
    def throughput(self) -> ThroughputFit:
        """`lam*` and the best fixed length.

        Raises:
            NotEnoughData: with fewer than 50 rounds.
        """
        if len(self.rounds) < MIN_ROUNDS:
            raise NotEnoughData(
                f"{len(self.rounds)} calibration rounds outside repetition loops; fitting policies "
                f"needs at least {MIN_ROUNDS}: record more prompts or longer outputs"
            )
        return fit_lengths(self.rounds.accepted, self.rounds.hazards_ND, self.latency_NL)

    @property
    def lam(self) -> float:
        """`lam*`, tokens/us."""
        return self.throughput.tokens_per_us

    @property
    def draft_us(self) -> float:
        """The shortest draft pass measured at this batch size."""
        return float(np.min(self.table.draft_us[batch_row(self.table, self.batch)]))

    @property
    def mean_distinct_L(self) -> FloatArray | None:
        """Distinct experts at which the table's latency holds, float64 [16]."""
        distinct = self.rounds.distinct_total_NL
        return None if distinct is None else distinct.mean(axis=0)


def _corrected(rule: str, lookahead: int, label: str) -> Callable[[Fitting], LengthPolicy]:
    def make(fitting: Fitting) -> LengthPolicy:
        return RouterCorrected(
            fitting.lam,
            ExpertLine.fit(fitting.rounds, "first-router"),
            fitting.table.expert_slope_us,
            rule="paper" if rule == "paper" else "select",
            lookahead=lookahead,
            label=label,
        )

    return make


def _priced(signal: str, label: str) -> Callable[[Fitting], LengthPolicy]:
    def make(fitting: Fitting) -> LengthPolicy:
        line = ExpertLine.fit(
            fitting.rounds, "distinct-tokens" if signal == "distinct-tokens" else "true-experts"
        )
        return ExpertPriced(fitting.lam, line, fitting.table.expert_slope_us, label)

    return make


_MAKERS: dict[str, Callable[[Fitting], LengthPolicy]] = {
    "ar": lambda _: FixedLength(0),
    **{name: lambda _, n=name: FixedLength(int(n.split("-")[1])) for name in _FIXED},  # type: ignore[misc]
    "best-fixed": lambda f: FixedLength(f.throughput.best_fixed_length, label="best-fixed"),
    "best-fixed-category": lambda f: FixedByCategory.fit(f.rounds, f.latency_NL),
    "round-ratio": lambda _: RoundRatio(),
    "hybridspec": lambda f: Dinkelbach(f.lam),
    "router-paper": _corrected("paper", 1, "router-paper"),
    "router-select": _corrected("select", 1, "router-select"),
    "router-all": _corrected("select", BLOCK_SIZE, "router-all"),
    "token-priced": _priced("distinct-tokens", "token-priced"),
    "evict": lambda f: Evict(f.draft_us),
    "dspark": lambda _: DSparkPlanner(),
    "dspark-no-lag": lambda _: DSparkPlanner(lag_rounds=0, name="dspark-no-lag"),
    "ema": lambda _: EmaAccepted(),
    "oracle-cost": _priced("true-experts", "oracle-cost"),
    "oracle": lambda _: OracleLength(),
}
NEED_ROUTES = ("router-paper", "router-select", "router-all", "token-priced", "oracle-cost")
POLICY_NAMES = tuple(_MAKERS)
DEFAULT_POLICIES = (
    "ar",
    "fixed-16",
    "best-fixed",
    "best-fixed-category",
    "ema",
    "evict",
    "dspark",
    "round-ratio",
    "hybridspec",
    "router-paper",
    "router-select",
    "oracle-cost",
    "oracle",
)


def check_names(names: Sequence[str]) -> None:
    """Refuse names that are no policy.

    Raises:
        UsageError: naming the closest ones, or a name given twice.
    """
    for name in names:
        if name not in _MAKERS:
            close = difflib.get_close_matches(name, POLICY_NAMES, n=2)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise UsageError(
                f"policy {name!r} is unknown: {hint}known are ar, fixed-1 .. fixed-{BLOCK_SIZE}, "
                + ", ".join(known for known in POLICY_NAMES if known not in ("ar", *_FIXED))
            )
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise UsageError(f"policy {twice[0]!r} is named twice: name each once")


def make_policies(names: Sequence[str], fitting: Fitting) -> list[LengthPolicy]:
    """Returns the policies of these names, in their order.

    Raises:
        UsageError: an unknown name, or a policy by experts where no routes were recorded.
        NotEnoughData: too few calibration rounds for a policy that is fitted.
    """
    check_names(names)
    return [_MAKERS[name](fitting) for name in names]
