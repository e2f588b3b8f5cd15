"""When drafting pays on a machine: the tokens a round that a cost table asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import root_scalar

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, StepCostTable


@dataclass(frozen=True)
class BreakEven:
    """Break-even against plain decoding at one batch and context.

    Attributes:
        batch, context_tokens: the cell of the table.
        tokens_by_length: float64 [16], emitted tokens a round that pay for length L = 1..16,
            `T(L) / T(0)`.
        acceptance: lowest acceptance of every draft (the same for all positions) at which some
            length pays; None where even full acceptance does not.
        length: the length that pays first, 0 where none does.
    """

    batch: int
    context_tokens: int
    tokens_by_length: FloatArray
    acceptance: float | None
    length: int

    def line(self) -> str:
        """The verdict in one line."""
        where = f"batch {self.batch}, context {self.context_tokens}"
        stock = float(self.tokens_by_length[-1])
        if self.acceptance is None:
            return (
                f"{where}: drafting cannot pay here: {BLOCK_SIZE} rows cost {stock:.2f} plain "
                "rounds and no length costs fewer than it can emit"
            )
        return (
            f"{where}: drafting pays from {float(self.tokens_by_length[self.length - 1]):.2f} "
            f"tokens a round at length {self.length} (each draft accepted with "
            f">= {self.acceptance:.0%}), from {stock:.2f} tokens at stock length {BLOCK_SIZE}"
        )


def break_even(table: StepCostTable) -> list[BreakEven]:
    """Returns the verdict for each batch and context of the table."""
    verdicts: list[BreakEven] = []
    for row, batch in enumerate(table.batch_sizes.tolist()):
        for column, context in enumerate(table.context_tokens.tolist()):
            latency = table.latency_us[row, column]
            ratio = latency[1:] / latency[0]
            needed = [_acceptance(float(ratio[length - 1]), length) for length in range(2, 17)]
            paying = [(value, length) for length, value in enumerate(needed, start=2) if value >= 0]
            acceptance, length = min(paying, default=(None, 0))
            verdicts.append(BreakEven(batch, context, np.array(ratio), acceptance, length))
    return verdicts


def _acceptance(tokens: float, length: int) -> float:
    """Returns h with `1 + h + ... + h^(length-1) = tokens`; -1 if over 1, 0 if none is needed."""
    if tokens > length:
        return -1.0
    if tokens <= 1.0:
        return 0.0
    powers = np.arange(length)
    solved = root_scalar(lambda h: float(np.sum(h**powers)) - tokens, bracket=(0.0, 1.0))
    return float(solved.root)
