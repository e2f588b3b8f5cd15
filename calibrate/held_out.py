"""How models do on unseen prompts: by category, and on a category left out of the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hybridspec.calibrate.bootstrap import Score
from hybridspec.calibrate.features import TraceArrays
from hybridspec.calibrate.metrics import DEFAULT_RESAMPLES, MIN_ROUNDS, round_scores
from hybridspec.calibrate.model import HazardModel

ALL = "all"
LOOPS = "loops"


@dataclass(frozen=True)
class HeldOutScores:
    """Scores of one model on one set of held-out rounds.

    Attributes:
        category: of the rounds; `all`, or `loops` for rounds inside repetition loops.
        left_out: whether the category was also left out of the fit.
        scores: metric name (`metrics.round_scores`) to score.
        num_rounds, num_prompts: scored.
    """

    category: str
    left_out: bool
    scores: dict[str, Score]
    num_rounds: int
    num_prompts: int


def calibration_rounds(rounds: TraceArrays) -> TraceArrays:
    """Rounds to fit on: of the calibration split, outside repetition loops."""
    return rounds.select((rounds.split == "calibration") & (rounds.loop_period == 0))


def held_out_rounds(rounds: TraceArrays) -> TraceArrays:
    """Rounds to score on: of the test split, outside repetition loops."""
    return rounds.select((rounds.split == "test") & (rounds.loop_period == 0))


def held_out_scores(
    model: HazardModel,
    rounds: TraceArrays,
    *,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Iterator[HeldOutScores]:
    """Scores on the test split: all categories, each one, and rounds in repetition loops.

    A set of fewer than 20 rounds is left out.

    Args:
        model: fitted on `calibration_rounds(rounds)`.
        rounds: of the whole trace.
    """
    test = held_out_rounds(rounds)
    loops = rounds.select((rounds.split == "test") & (rounds.loop_period > 0))
    sets = [(ALL, test), (LOOPS, loops)]
    sets += [(name, test.select(test.category == name)) for name in categories(test)]
    for name, chosen in sets:
        if len(chosen) >= MIN_ROUNDS:
            yield _scored(model, chosen, name, False, resamples, seed)


def leave_one_category_out(
    make: Callable[[], HazardModel],
    rounds: TraceArrays,
    *,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Iterator[HeldOutScores]:
    """Scores on each category's test rounds by a model that saw nothing of that category.

    Args:
        make: an unfitted model.
        rounds: of the whole trace.

    Raises:
        NotEnoughData: what is left is too little to fit.
    """
    fit, test = calibration_rounds(rounds), held_out_rounds(rounds)
    for name in categories(test):
        chosen = test.select(test.category == name)
        if len(chosen) >= MIN_ROUNDS:
            model = make().fit(fit.select(fit.category != name))
            yield _scored(model, chosen, name, True, resamples, seed)


def categories(rounds: TraceArrays) -> list[str]:
    """Categories among these rounds, sorted; prompts without one (`all`) are no category."""
    return sorted(set(rounds.category.tolist()) - {ALL})


def _scored(
    model: HazardModel,
    rounds: TraceArrays,
    category: str,
    left_out: bool,
    resamples: int,
    seed: int,
) -> HeldOutScores:
    scores, _ = round_scores(model.predict(rounds), rounds, resamples=resamples, seed=seed)
    return HeldOutScores(category, left_out, scores, len(rounds), rounds.num_prompts)
