"""Choosing the verify length of every round from a bundle's tables (DESIGN sections 3, 4, 6).

Everything here works on small device tensors and has no random choice: the same signals give the
same length. `select` runs before the target, `correct` at the first router.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from hybridspec.artifacts.tables import (
    BLOCK_SIZE,
    NUM_DRAFTS,
    TABLE,
    HazardTable,
    RoutingTable,
    StepCostTable,
    ThroughputTable,
)
from hybridspec.draft_switch import DraftCredit
from hybridspec.errors import BundleError
from hybridspec.hazards import RequestHistory, ServedHazards, TableHazards

Correction = Literal["select", "paper", "off"]
Values = torch.Tensor | list[list[float]]
LOOKAHEAD = 1
# Scores closer than this are ties, as in the fit of the throughput.
TIE_TOKENS = 1e-9


@dataclass(frozen=True)
class Selection:
    """Chosen lengths of one round.

    Attributes:
        lengths: rows to verify, one a request.
        expected_BL: E(L) for L = 1..16, fp64 [B, 16]; lists where the tables are in host memory.
        score_BL: E(L) - lam T(L), likewise.
        lams: the prices of time used, tokens/us.
        fallback: reason for each request whose length is not the policy's own choice, else None.
    """

    lengths: list[int]
    expected_BL: Values
    score_BL: Values
    lams: list[float]
    fallback: list[str | None]


class Policy:
    """Device tables of one (calibration, cost) bundle and the rules over them.

    Args:
        hazard: hazards from draft signals alone.
        cost: round times.
        throughput: lam* and the best fixed length by batch size.
        routing: what the first router says about all layers; None switches the correction off.
        correction: `select` scores every length up to L + 1 again with the observed experts,
            `paper` only decides between L and L + 1, `off` (measured: the stop costs more than the
            experts tell) goes straight on.
        device: where the tables live.
        hazard_model: serves instead of `hazard`: boosted trees.

    Raises:
        BundleError: tables of different batch grids.
    """

    def __init__(
        self,
        hazard: HazardTable,
        cost: StepCostTable,
        throughput: ThroughputTable,
        routing: RoutingTable | None = None,
        *,
        correction: Correction = "off",
        device: torch.device | str = "cpu",
        hazard_model: ServedHazards | None = None,
    ) -> None:
        if not np.array_equal(cost.batch_sizes, throughput.batch_sizes):
            raise BundleError(
                f"throughput is fitted for batches {throughput.batch_sizes.tolist()}, costs are "
                f"measured for {cost.batch_sizes.tolist()}: fit the throughput again"
            )
        self.cost = cost
        self.throughput = throughput
        self.hazard = hazard
        self.correction: Correction = "off" if routing is None else correction
        self.lookahead = 0 if self.correction == "off" else LOOKAHEAD
        self.static_reason: str | None = None
        self.credit = DraftCredit()

        def place(values: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, dtype=np.float64), device=device)

        self._table = TableHazards(hazard, device)
        self.hazard_model: ServedHazards = hazard_model or self._table
        # Trees are walked on the host, wherever the signals are.
        self._on_host = torch.device(device).type == "cpu" or self.hazard_model.kind != TABLE
        self._arange_L = torch.arange(1, BLOCK_SIZE + 1, device=device)
        # T(L) by (batch size measured, context) as rows, made on first use.
        self._latency_rows: dict[tuple[int, int], tuple[float, torch.Tensor]] = {}
        self._host_latency_rows: dict[tuple[int, int], list[float]] = {}
        self._latency_BCL = place(cost.latency_us)
        if routing is not None:
            self._first_mean_L = place(routing.first_mean_L)
            self._expert_price_L = place(routing.slope_L) * cost.expert_slope_us

    def set_static(self, reason: str) -> None:
        """Stop choosing: from now on every round takes the best fixed length."""
        self.static_reason = reason

    def batch_index(self, batch_size: int) -> int:
        """Row of the tables for a batch: the next measured size, the largest beyond the grid."""
        index = int(np.searchsorted(self.cost.batch_sizes, batch_size))
        return min(index, len(self.cost.batch_sizes) - 1)

    def lam(self, batch_size: int) -> float:
        """Throughput a request that lengths are priced with, tokens/us."""
        return float(self.throughput.tokens_per_us[self.batch_index(batch_size)])

    def fixed_length(self, batch_size: int) -> int:
        """Best fixed length in 1..16 of the table, for rounds that cannot be decided."""
        return max(1, int(self.throughput.best_fixed_length[self.batch_index(batch_size)]))

    def latency(self, batch_size: int, context_tokens: int) -> tuple[float, torch.Tensor]:
        """Round time without a draft pass (us), and with one for L = 1..16 (fp64 [16], us).

        Linear between measured contexts, flat outside them: a bucket of 64 tokens shares one row.
        """
        batch, bucket = self.batch_index(batch_size), context_tokens // 64
        row = self._latency_rows.get((batch, bucket))
        if row is None:
            grid = self.cost.context_tokens
            centre = float(np.clip(bucket * 64 + 32, grid[0], grid[-1]))
            right = min(int(np.searchsorted(grid, centre)), len(grid) - 1)
            left = max(right - 1, 0)
            span = float(grid[right] - grid[left])
            share = (centre - float(grid[left])) / span if span else 0.0
            table = self._latency_BCL[batch]
            times = table[left] * (1.0 - share) + table[right] * share
            row = (float(times[0]), times[1:])
            self._latency_rows[batch, bucket] = row
        return row

    def host_latency(self, batch_size: int, context_tokens: int) -> list[float]:
        """Round time with a draft pass for L = 1..16 (us), as numbers."""
        key = (batch_size, context_tokens // 64)
        row = self._host_latency_rows.get(key)
        if row is None:
            row = self._host_latency_rows[key] = self.latency(batch_size, context_tokens)[
                1
            ].tolist()
        return row

    def hazards(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
    ) -> torch.Tensor:
        """Hazards by the table: fp64 [B, 15], each given the drafts before it accepted."""
        return self._table.tensor(p1_BD, p2_BD, entropy_BD, context_tokens)

    def select(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
        lams: Sequence[float],
        caps: Sequence[int],
        batch_size: int,
        *,
        draft_tokens_BD: torch.Tensor | None = None,
        histories: Sequence[RequestHistory | None] | None = None,
    ) -> Selection:
        """Verify lengths that maximise E(L) - lam T(L); ties go to the shorter one.

        Args:
            p1_BD, p2_BD, entropy_BD: draft signals [B, 15].
            context_tokens: position of each anchor.
            lams: price of time for each request, tokens/us.
            caps: longest allowed length of each request.
            batch_size: requests in the whole round.
            draft_tokens_BD: int64 [B, 15]; a hazard table does not read them.
            histories: `hazard_model.start` of each request, every round of it observed.

        Raises:
            UsageError: trees without drafts or histories.
        """
        expected_BL: Values
        score_BL: Values
        signals = (p1_BD, p2_BD, entropy_BD)
        if self._on_host:
            hazards = self.hazard_model.hazards(
                *signals, context_tokens, draft_tokens_BD, histories
            )
            expected_BL, score_BL, lengths = self._evaluate_host(
                hazards, context_tokens, lams, caps, batch_size
            )
        else:
            expected_BL, score_BL, lengths = self._evaluate(
                *signals, context_tokens, lams, caps, batch_size
            )
        fallback: list[str | None] = [None] * len(caps)
        fixed = self.fixed_length(batch_size)
        # NaN in any hazard reaches the last expectation.
        for i, expected_L in enumerate(expected_BL):
            broken = None if math.isfinite(expected_L[-1]) else "draft signals are not finite"
            reason = self.static_reason or broken
            if reason is not None:
                lengths[i], fallback[i] = min(fixed, caps[i]), reason
        return Selection(lengths, expected_BL, score_BL, list(lams), fallback)

    def _evaluate(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
        lams: Sequence[float],
        caps: Sequence[int],
        batch_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """E(L) and score of every length, both [B, 16], and the best allowed lengths."""
        hazards = self.hazards(p1_BD, p2_BD, entropy_BD, context_tokens)
        # S_0 = 1 in front, then E(L) is the running sum of the running product.
        expected_BL = F.pad(hazards, (1, 0), value=1.0).cumprod(-1).cumsum(-1)
        prices = [
            self.latency(batch_size, context)[1] * lam
            for context, lam in zip(context_tokens, lams, strict=True)
        ]
        price_BL = prices[0].unsqueeze(0) if len(prices) == 1 else torch.stack(prices)
        score = expected_BL - price_BL
        allowed = score
        if min(caps) < BLOCK_SIZE:
            limit = torch.tensor(caps, device=score.device)
            allowed = score.masked_fill(self._arange_L > limit.unsqueeze(1), float("-inf"))
        return expected_BL, score, (_shortest_best(allowed) + 1).tolist()

    def _evaluate_host(
        self,
        hazards_BD: list[list[float]],
        context_tokens: Sequence[int],
        lams: Sequence[float],
        caps: Sequence[int],
        batch_size: int,
    ) -> tuple[list[list[float]], list[list[float]], list[int]]:
        """`_evaluate` as one plain loop over numbers in host memory."""
        expected_BL, score_BL, lengths = [], [], []
        for i, hazard_D in enumerate(hazards_BD):
            latency, lam = self.host_latency(batch_size, context_tokens[i]), lams[i]
            survival = expected = 1.0
            expected_L, score_L = [expected], [expected - lam * latency[0]]
            for d in range(NUM_DRAFTS):
                survival *= hazard_D[d]
                expected += survival
                expected_L.append(expected)
                score_L.append(expected - lam * latency[d + 1])
            near_best = max(score_L[: caps[i]]) - TIE_TOKENS
            lengths.append(next((j for j, v in enumerate(score_L, 1) if v >= near_best), 1))
            expected_BL.append(expected_L)
            score_BL.append(score_L)
        return expected_BL, score_BL, lengths

    def looks_ahead(self, length: int, cap: int) -> bool:
        """Whether one more row than selected runs up to the first router.

        Not for a length of one: that round is plain decoding, which needs no factors to commit, so
        a second row would cost far more than its experts can tell.
        """
        return self.lookahead > 0 and 1 < length < cap

    def correct(
        self, experts_RK: torch.Tensor, selection: Selection, row: int, *, num_experts: int
    ) -> int:
        """Length of one request after the first router saw its rows.

        Scores `E(k) - lam (T(k) + c (predicted distinct experts given the observed - their mean))`
        for every k up to the rows at hand and takes the best; `paper` looks at L and L + 1 only.

        Args:
            experts_RK: int64, layer 0's experts of the first L + 1 rows (fewer at the cap).
            selection: of this round; row: this request's.
            num_experts: of a layer.
        """
        rows, lam = experts_RK.shape[0], selection.lams[row]
        seen = self._arange_L.new_zeros(rows, num_experts, dtype=torch.float64)
        distinct = seen.scatter_(1, experts_RK, 1.0).cummax(0).values.sum(1)
        surplus = distinct.sub_(self._first_mean_L[:rows]).mul_(self._expert_price_L[:rows])
        selected = torch.as_tensor(
            selection.score_BL[row][:rows], dtype=surplus.dtype, device=surplus.device
        )
        score = torch.sub(selected, surplus, alpha=lam)
        if self.correction == "paper":
            first = selection.lengths[row]
            return int(_shortest_best(score[first - 1 :])) + first
        return int(_shortest_best(score)) + 1


def _shortest_best(score: torch.Tensor) -> torch.Tensor:
    """Index along the last dimension of the first score that is the best but for rounding."""
    near_best = score >= score.amax(-1, keepdim=True) - TIE_TOKENS
    return near_best.to(torch.uint8).argmax(-1)
