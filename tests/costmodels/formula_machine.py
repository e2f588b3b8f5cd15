"""A machine whose every cost is a known formula, so that fits can be checked against the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hybridspec.costmodels.probe import ForcedRouteTiming, RoundTiming

DRAFT_US = 800.0


@dataclass
class FormulaMachine:
    """Implements `RoundProbe` over a formula; `noise` is the sigma of a log-normal factor."""

    noise: float = 0.0
    pad_rows_to: int = 1
    seed: int = 0
    expert_us: float = 2.0
    max_batch: int = 8
    max_context: int = 32768
    num_layers: int = 40
    num_experts: int = 256
    experts_per_token: int = 8
    prepared: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def identity(self) -> Mapping[str, str]:
        return {"device": "formula"}

    def prepare(self, *, context_tokens: int, batch_size: int) -> None:
        self.prepared.append((batch_size, context_tokens))

    def run_round(self, verify_length: int) -> RoundTiming:
        batch, context = self.prepared[-1]
        padded = -(-max(verify_length, 1) // self.pad_rows_to) * self.pad_rows_to
        factor = self._factor()
        draft = DRAFT_US * factor if verify_length else 0.0
        total = true_latency_us(batch=batch, context=context, length=verify_length) * factor
        return RoundTiming(total, draft, total - draft - 50.0, 50.0, batch * padded)

    def run_forced_routes(self, verify_length: int, distinct_experts: int) -> ForcedRouteTiming:
        batch, _ = self.prepared[-1]
        base = 3000.0 + 20.0 * verify_length
        total = (base + self.expert_us * self.num_layers * distinct_experts) * self._factor()
        return ForcedRouteTiming(total, batch * verify_length, distinct_experts)

    def _factor(self) -> float:
        return float(np.exp(self.noise * self._rng.standard_normal()))


def true_latency_us(*, batch: int, context: int, length: int) -> float:
    """A base, a draft pass, a cost a row with a step above 8 rows, and reads of the context."""
    tier = 500.0 if length > 8 else 0.0
    draft = DRAFT_US if length else 0.0
    return 4000.0 + draft + 250.0 * batch * max(length, 1) + tier + 0.01 * batch * context
