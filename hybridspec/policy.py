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
    HazardTable,
    RoutingTable,
    StepCostTable,
    ThroughputTable,
)
from hybridspec.errors import BundleError

Correction = Literal["select", "paper", "off"]
LOOKAHEAD = 1


@dataclass(frozen=True)
class Selection:
    """Chosen lengths of one round.

    Attributes:
        lengths: rows to verify, one a request.
        expected_BL: E(L) for L = 1..16, fp64 [B, 16].
        price_BL: lam x T(L), fp64 [B, 16].
        fallback: reason for each request whose length is not the policy's own choice, else None.
    """

    lengths: list[int]
    expected_BL: torch.Tensor
    price_BL: torch.Tensor
    fallback: list[str | None]


class Policy:
    """Device tables of one (calibration, cost) bundle and the rules over them.

    Args:
        hazard: hazards from draft signals.
        cost: round times.
        throughput: lam* and the best fixed length by batch size.
        routing: what the first router says about all layers; None switches the correction off.
        correction: `select` scores every length up to L + 1 again with the observed experts,
            `paper` only decides between L and L + 1, `off` skips the stop.
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
        correction: Correction = "select",
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

        def place(values: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, dtype=np.float64), device=device)

        self._weights = [float(w) for w in hazard.weights_F]
        self._bias_D = place(hazard.position_bias_D)
        # Each piece between two knots as offset + slope x.
        slopes = np.diff(hazard.knots_y) / np.diff(hazard.knots_x)
        self._piece_slope = place(slopes)
        self._piece_offset = place(hazard.knots_y[:-1] - slopes * hazard.knots_x[:-1])
        self._inner_knots = place(hazard.knots_x[1:-1])
        self._knot_range = (float(hazard.knots_x[0]), float(hazard.knots_x[-1]))
        self._arange_L = torch.arange(1, BLOCK_SIZE + 1, device=device)
        # T(L) by (batch size measured, context) as rows, made on first use.
        self._latency_rows: dict[tuple[int, int], tuple[float, torch.Tensor]] = {}
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

    def hazards(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
    ) -> torch.Tensor:
        """Acceptance probability of each draft given the ones before it, fp64 [B, 15]."""
        p1 = p1_BD.to(torch.float64).clamp_(1e-6, 1.0 - 1e-6)
        p2 = p2_BD.to(torch.float64).clamp_(1e-9, 1.0)
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
        hazards = self.hazards(p1_BD, p2_BD, entropy_BD, context_tokens)
        # S_0 = 1 in front, then E(L) is the running sum of the running product.
        expected_BL = F.pad(hazards, (1, 0), value=1.0).cumprod(-1).cumsum(-1)
        prices = [
            self.latency(batch_size, context)[1] * lam
            for context, lam in zip(context_tokens, lams, strict=True)
        ]
        price_BL = prices[0].unsqueeze(0) if len(prices) == 1 else torch.stack(prices)
        score = expected_BL - price_BL
        if min(caps) < BLOCK_SIZE:
            limit = torch.tensor(caps, device=score.device)
            score = score.masked_fill(self._arange_L > limit.unsqueeze(1), float("-inf"))
        lengths: list[int] = (score.argmax(-1) + 1).tolist()
        fallback: list[str | None] = [None] * len(caps)
        fixed = self.fixed_length(batch_size)
        # NaN in any hazard reaches the last expectation.
        for i, last in enumerate(expected_BL[:, -1].tolist()):
            broken = None if math.isfinite(last) else "draft signals are not finite"
            reason = self.static_reason or broken
            if reason is not None:
                lengths[i], fallback[i] = min(fixed, caps[i]), reason
        return Selection(lengths, expected_BL, price_BL, fallback)

    def correct(
        self,
        experts_RK: torch.Tensor,
        expected_L: torch.Tensor,
        price_L: torch.Tensor,
        *,
        selected: int,
        lam: float,
        num_experts: int,
    ) -> int:
        """Length of one request after the first router saw its rows.

        Scores `E(k) - lam (T(k) + c (predicted distinct experts given the observed - their mean))`
        for every k up to the rows at hand and takes the best; `paper` looks at L and L + 1 only.

        Args:
            experts_RK: int64, layer 0's experts of the first L + 1 rows (fewer at the cap).
            expected_L, price_L: rows of the `Selection`, fp64 [16].
            selected: L.
            lam: tokens/us.
            num_experts: of a layer.
        """
        rows = experts_RK.shape[0]
        seen = torch.zeros(rows, num_experts, device=experts_RK.device).scatter_(1, experts_RK, 1.0)
        distinct = seen.cummax(0).values.sum(1)
        surplus = (distinct - self._first_mean_L[:rows]).mul_(self._expert_price_L[:rows])
        score = expected_L[:rows] - price_L[:rows] - surplus.mul_(lam)
        first = selected if self.correction == "paper" else 1
        best = int(score[first - 1 :].argmax()) + first
        return best


class DraftSwitch:
    """Whether one request goes on drafting: plain decoding where drafts do not pay.

    Keeps a discounted estimate of tokens and time of drafted rounds. Where their rate falls below
    plain decoding's, drafting pauses; it is tried again after a pause that doubles, so the trials
    cost a bounded share of the time.

    Args:
        lam: fitted long-run throughput, tokens/us, the starting point.
    """

    PRIOR_TOKENS = 12.0
    MEMORY_ROUNDS = 24
    FIRST_PAUSE, LONGEST_PAUSE, TRIAL_ROUNDS = 24, 384, 3

    def __init__(self, lam: float) -> None:
        self.lam_fit = lam
        self._tokens = self.PRIOR_TOKENS
        self._time_us = self.PRIOR_TOKENS / lam
        self._pause_left = 0
        self._next_pause = self.FIRST_PAUSE
        self._trial_left = 0

    @property
    def drafted_rate(self) -> float:
        """Estimated tokens/us of drafted rounds of this request."""
        return self._tokens / self._time_us

    @property
    def drafting(self) -> bool:
        """Whether the next round drafts."""
        return self._pause_left == 0

    def lam(self, plain_us: float) -> float:
        """Price of time for this request: its own rate, never below plain decoding's."""
        return max(self.drafted_rate, 1.0 / plain_us)

    def after_draft(self, expected: float, emitted: int, round_us: float, plain_us: float) -> None:
        """Learn from a drafted round.

        Args:
            expected: E(L) that the policy saw; emitted: tokens it really brought.
            round_us: predicted time of the round; plain_us: of a round without a draft pass.
        """
        keep = 1.0 - 1.0 / self.MEMORY_ROUNDS
        # The calibrated expectation has less noise than one outcome, the outcome has no bias.
        self._tokens = self._tokens * keep + 0.5 * (expected + emitted)
        self._time_us = self._time_us * keep + round_us
        if self._trial_left > 0:
            self._trial_left -= 1
            if self._trial_left > 0:
                return
        if self.drafted_rate * plain_us < 1.0:
            self._pause_left = self._next_pause
            self._next_pause = min(2 * self._next_pause, self.LONGEST_PAUSE)
        else:
            self._next_pause = self.FIRST_PAUSE

    def after_plain(self) -> None:
        """Count a round of the pause; at its end a short trial starts from a fresh estimate."""
        self._pause_left -= 1
        if self._pause_left == 0:
            self._trial_left = self.TRIAL_ROUNDS
            self._tokens, self._time_us = (
                self.PRIOR_TOKENS / 4,
                self.PRIOR_TOKENS / 4 / self.lam_fit,
            )
