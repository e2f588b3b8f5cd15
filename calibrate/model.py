"""What every hazard model offers, and what every fit is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from hybridspec.artifacts.tables import NUM_DRAFTS, FloatArray, IntArray
from hybridspec.calibrate.features import BoolArray, TraceArrays, accepted_labels, at_risk
from hybridspec.errors import NotEnoughData

MIN_AT_RISK_ROWS = 200
MIN_PROMPTS = 10
MIN_POSITION_ROWS = 30
NUM_FOLDS = 5


class HazardModel(ABC):
    """Probability that a draft is accepted, given that those before it were.

    Attributes:
        name: the word for it on the command line and in every report.
    """

    name: ClassVar[str]

    @abstractmethod
    def fit(self, rounds: TraceArrays) -> Self:
        """Fit on the drafts at risk of all rounds given; select split and leave out loops before.

        Raises:
            NotEnoughData: fewer than 200 drafts at risk or 10 prompts, or only one outcome.
        """

    @abstractmethod
    def predict(self, rounds: TraceArrays) -> FloatArray:
        """Hazards, float64 [R, 15] in [0, 1]; nothing of a round's own outcome enters."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """What was fitted, in JSON's types."""


@dataclass(frozen=True)
class AtRisk:
    """Drafts that were at risk, one row each.

    Attributes:
        round, position, prompt: int64 [N].
        labels: bool [N], accepted.
        position_rows: int64 [15].
        position_group: int64 [15]: a position with fewer than 30 rows is pooled with the nearest
            lower one that has them.
    """

    round: IntArray
    position: IntArray
    prompt: IntArray
    labels: BoolArray
    position_rows: IntArray
    position_group: IntArray

    @property
    def group(self) -> IntArray:
        """Pooled position of each row, int64 [N]."""
        return self.position_group[self.position]


def rows_at_risk(rounds: TraceArrays) -> AtRisk:
    """The drafts to fit on.

    Raises:
        NotEnoughData: fewer than 200 of them or 10 prompts, or only one outcome.
    """
    mask = at_risk(rounds.accepted)
    index, position = np.nonzero(mask)
    labels = accepted_labels(rounds.accepted)[index, position]
    check_enough(labels, rounds.num_prompts)
    position_rows = mask.sum(axis=0)
    return AtRisk(
        round=index,
        position=position,
        prompt=rounds.prompt[index],
        labels=labels,
        position_rows=position_rows,
        position_group=position_groups(position_rows),
    )


def check_enough(labels: BoolArray, num_prompts: int) -> None:
    """Refuse to fit on too few drafts or prompts, or on one outcome."""
    if labels.size < MIN_AT_RISK_ROWS or num_prompts < MIN_PROMPTS:
        raise NotEnoughData(
            f"the calibration rounds have {labels.size} observed drafts of {num_prompts} prompts; "
            f"at least {MIN_AT_RISK_ROWS} of {MIN_PROMPTS} prompts are needed (outside repetition "
            "loops): record more prompts or more tokens each"
        )
    if labels.all() or not labels.any():
        word = "accepted" if labels.all() else "rejected"
        raise NotEnoughData(
            f"all {labels.size} observed drafts were {word}; calibration needs both outcomes: "
            "check that the drafter belongs to the target, or record more prompts"
        )


def position_groups(position_rows: IntArray) -> IntArray:
    """The position whose parameters each one uses, int64 [15]."""
    groups = np.arange(NUM_DRAFTS)
    for position in range(1, NUM_DRAFTS):
        if position_rows[position] < MIN_POSITION_ROWS:
            groups[position] = groups[position - 1]
    return groups


def prompt_folds(prompts: IntArray, seed: int) -> list[BoolArray]:
    """Row masks of the held-out folds; the rows of one prompt stay together."""
    distinct = np.unique(prompts)
    shuffled = np.random.default_rng(seed).permutation(distinct)
    return [np.isin(prompts, shuffled[fold::NUM_FOLDS]) for fold in range(NUM_FOLDS)]
