"""Shares of `--budget`, and what to say where one is too small."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from hybridspec.costmodels.measure import BudgetEnded
from hybridspec.errors import QualityGate


@contextmanager
def share_of_budget(budget_s: float, share: float, what: str) -> Iterator[float]:
    """Seconds of a part of a command; where they are too few, the error is about the whole.

    Args:
        budget_s: of the command.
        share: of it that this part has.
        what: is measured in it.

    Raises:
        QualityGate: in place of `BudgetEnded`, with a budget that would be enough.
    """
    try:
        yield budget_s * share
    except BudgetEnded as error:
        needed_s = math.ceil(error.needed_s / share / 10) * 10
        raise QualityGate(
            f"--budget {budget_s:g} leaves {budget_s * share:.0f} s for {what}: {error}; use "
            f"--budget {needed_s}, or fewer --batch-sizes and --contexts"
        ) from None
