"""Choosing the verify length of every round from a bundle's tables (DESIGN sections 3, 4, 6).

Everything here works on small device tensors and has no random choice: the same signals give the
same length. `select` runs before the target, `correct` at the first router.
"""

from __future__ import annotations

import bisect
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
    HazardTable,
    RoutingTable,
    StepCostTable,
    ThroughputTable,
)
from hybridspec.draft_switch import DraftCredit
from hybridspec.errors import BundleError

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
        hazard: hazards from draft signals.
        cost: round times.
        throughput: lam* and the best fixed length by batch size.
        routing: what the first router says about all layers; None switches the correction off.
        correction: `select` scores every length up to L + 1 again with the observed experts,
            `paper` only decides between L and L + 1, `off` (measured: the stop costs more than the
            experts tell) goes straight on.
        device: where the tables live.

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

        self._on_host = torch.device(device).type == "cpu"
        self._weights = [float(w) for w in hazard.weights_F]
        self._bias_D = place(hazard.position_bias_D)
        # Each piece between two knots as offset + slope x.
        slopes = np.diff(hazard.knots_y) / np.diff(hazard.knots_x)
        self._piece_slope = place(slopes)
        self._piece_offset = place(hazard.knots_y[:-1] - slopes * hazard.knots_x[:-1])
        self._inner_knots = place(hazard.knots_x[1:-1])
        self._host_tables = tuple(
            table.tolist()
            for table in (self._bias_D, self._inner_knots, self._piece_offset, self._piece_slope)
        )
        self._knot_range = (float(hazard.knots_x[0]), float(hazard.knots_x[-1]))
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
        """Acceptance probability of each draft given the ones before it, fp64 [B, 15]."""
        p1 = p1_BD.to(torch.float64).clamp(1e-6, 1.0 - 1e-6)
        p2 = p2_BD.to(torch.float64).clamp(1e-9, 1.0)
        log_p1, neg_log_1m_p1, entropy, margin, log_context = self._weights
        # The context adds one number to all positions of a request.
        context = [log_context * math.log1p(tokens) for tokens in context_tokens]
        if len(context) == 1:
            score = self._bias_D + context[0]
        else:
            score = self._bias_D + torch.tensor(context, dtype=p1.dtype, device=p1.device)[:, None]
        score = torch.add(score, p1.log(), alpha=log_p1)
        score = score.sub_(torch.log1p(-p1), alpha=neg_log_1m_p1)
        score = score.add_(entropy_BD, alpha=entropy).add_(p1.sub_(p2), alpha=margin)
        x = score.sigmoid_().clamp_(*self._knot_range)
        piece = torch.searchsorted(self._inner_knots, x, right=True)
        return torch.addcmul(self._piece_offset[piece], self._piece_slope[piece], x)

    def select(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
        lams: Sequence[float],
        caps: Sequence[int],
        batch_size: int,
    ) -> Selection:
        """Verify lengths that maximise E(L) - lam T(L); ties go to the shorter one.

        Args:
            p1_BD, p2_BD, entropy_BD: draft signals [B, 15].
            context_tokens: position of each anchor.
            lams: price of time for each request, tokens/us.
            caps: longest allowed length of each request.
            batch_size: requests in the whole round.
        """
        evaluate = self._evaluate_host if self._on_host else self._evaluate
        expected_BL, score_BL, lengths = evaluate(
            p1_BD, p2_BD, entropy_BD, context_tokens, lams, caps, batch_size
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
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
        lams: Sequence[float],
        caps: Sequence[int],
        batch_size: int,
    ) -> tuple[list[list[float]], list[list[float]], list[int]]:
        """`_evaluate` as one plain loop: on 15 numbers in host memory the price of a library call,
        cold after a forward pass, is several of its iterations.
        """
        low, high = self._knot_range
        log_p1, neg_log_1m_p1, entropy, margin, log_context = self._weights
        bias, knots, offsets, slopes = self._host_tables
        expected_BL, score_BL, lengths = [], [], []
        rows = zip(p1_BD.tolist(), p2_BD.tolist(), entropy_BD.tolist(), strict=True)
        for i, (p1_D, p2_D, entropy_D) in enumerate(rows):
            context = log_context * math.log1p(context_tokens[i])
            latency = self.host_latency(batch_size, context_tokens[i])
            survival = expected = 1.0
            expected_L, score_L = [expected], [expected - lams[i] * latency[0]]
            for d in range(NUM_DRAFTS):
                p1 = min(max(p1_D[d], 1e-6), 1.0 - 1e-6)
                linear = (
                    bias[d]
                    + context
                    + log_p1 * math.log(p1)
                    - neg_log_1m_p1 * math.log1p(-p1)
                    + entropy * entropy_D[d]
                    + margin * (p1 - min(max(p2_D[d], 1e-9), 1.0))
                )
                # exp(700) is near the largest double; NaN takes the other branch and stays NaN.
                raw = 0.0 if linear < -700.0 else 1.0 / (1.0 + math.exp(-linear))
                x = min(max(raw, low), high)
                piece = bisect.bisect_right(knots, x)
                survival *= offsets[piece] + slopes[piece] * x
                expected += survival
                expected_L.append(expected)
                score_L.append(expected - lams[i] * latency[d + 1])
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
        selected = torch.as_tensor(selection.score_BL[row][:rows], dtype=surplus.dtype)
        score = torch.sub(selected, surplus, alpha=lam)
        if self.correction == "paper":
            first = selection.lengths[row]
            return int(_shortest_best(score[first - 1 :])) + first
        return int(_shortest_best(score)) + 1


def _shortest_best(score: torch.Tensor) -> torch.Tensor:
    """Index along the last dimension of the first score that is the best but for rounding."""
    near_best = score >= score.amax(-1, keepdim=True) - TIE_TOKENS
    return near_best.to(torch.uint8).argmax(-1)
