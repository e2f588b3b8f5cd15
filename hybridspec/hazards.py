"""Hazard models that a policy serves: the table of a bundle, or its boosted trees.

One interface. A table reads the signals of a draft alone. Trees also read the block and what the
request emitted, so a request carries a history of its own from its first token on: `start` makes
it, `observe` follows it, and it goes away with its request, whatever the others do.

Shape suffixes: B requests, D = 15 drafts, T trees, K nodes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from hybridspec.artifacts.bundle import CalibrationPart
from hybridspec.artifacts.tables import (
    NUM_DRAFTS,
    TABLE,
    TREES,
    FloatArray,
    HazardKind,
    HazardTable,
    ThroughputTable,
)
from hybridspec.artifacts.trees import CONTEXT_FEATURES, DISTILLED_METHOD, LEAF, TreeTable
from hybridspec.calibrate.context import block_features
from hybridspec.calibrate.history import (
    HISTORY_NAMES,
    MOVING_WEIGHT,
    EmittedText,
    History,
    expected_accepted,
)
from hybridspec.errors import UsageError


class RequestHistory:
    """What the rounds of one request leave behind for the hazards of its next one.

    The run-time twin of `calibrate.history.request_history`: the same float32 operations in the
    same order, so that a model sees in service what it saw in its fit.

    Args:
        emitted: tokens emitted so far, the anchor of the next round the last of them.
    """

    def __init__(self, emitted: Sequence[int]) -> None:
        self._text = EmittedText()
        self._mean_surprise = np.float32(0.0)
        self._rounds = 0
        self._expected_L: np.ndarray | None = None
        for token in emitted:
            self._text.emit(token)

    @property
    def anchor(self) -> int:
        """Newest emitted token."""
        return self._text.newest

    def observe(self, emitted: Sequence[int], *, accepted: int, verify_length: int) -> None:
        """Take in a finished round.

        Args:
            emitted: its tokens, the anchor of the next round the last of them.
            accepted: drafts accepted.
            verify_length: rows verified; 0 for a round without a draft pass.
        """
        for token in emitted:
            self._text.emit(token)
        expected, self._expected_L = self._expected_L, None
        if verify_length == 0 or expected is None:
            return
        surprise = np.float32(accepted) - expected[verify_length - 1]
        # A broken signal says nothing, and must not stay in the mean.
        if np.isfinite(surprise):
            self._mean_surprise += MOVING_WEIGHT * (surprise - self._mean_surprise)
        self._rounds += 1

    def drafted(self, expected_L: np.ndarray, block: Sequence[int]) -> tuple[list[float], ...]:
        """Keep what the drafter expects of a block until it is observed; what its past says of it.

        A block that is drafted again replaces the one before.

        Args:
            expected_L: float32 [16], of `expected_accepted`.
            block: its 15 drafts.

        Returns:
            the columns of `HISTORY_NAMES`, `seen_length` and `successor` of the block.
        """
        self._expected_L = expected_L
        # No model reads the last surprise alone.
        columns = [0.0, float(self._mean_surprise), self._rounds, self._text.num_tokens - 1]
        return columns, *self._text.look_up(block)


class ServedHazards(Protocol):
    """Probability that each draft is accepted, given that those before it were."""

    kind: HazardKind
    """As a bundle remembers what its throughput was fitted with."""

    def describe(self) -> str:
        """What is served, in a few words."""
        ...

    def start(self, emitted: Sequence[int]) -> RequestHistory | None:
        """History of a request that has emitted these tokens; None if the model needs none."""
        ...

    def hazards(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
        draft_tokens_BD: torch.Tensor | None,
        histories: Sequence[RequestHistory | None] | None,
    ) -> list[list[float]]:
        """Hazards of every draft [B][15]; NaN where a signal is not finite."""
        ...


class TableHazards:
    """The hazard table of a bundle: a logistic score, then a piecewise line.

    Args:
        table: as fitted.
        device: where `tensor` computes.
    """

    kind: HazardKind = TABLE

    def __init__(self, table: HazardTable, device: torch.device | str = "cpu") -> None:
        def place(values: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, dtype=np.float64), device=device)

        self._method = table.method
        self._weights = [float(w) for w in table.weights_F]
        self._bias_D = place(table.position_bias_D)
        # Each piece between two knots as offset + slope x.
        slopes = np.diff(table.knots_y) / np.diff(table.knots_x)
        self._piece_slope = place(slopes)
        self._piece_offset = place(table.knots_y[:-1] - slopes * table.knots_x[:-1])
        self._inner_knots = place(table.knots_x[1:-1])
        self._host_tables = tuple(
            values.tolist()
            for values in (self._bias_D, self._inner_knots, self._piece_offset, self._piece_slope)
        )
        self._knot_range = (float(table.knots_x[0]), float(table.knots_x[-1]))

    def describe(self) -> str:
        """The method of the table."""
        return f"hazard table {self._method}"

    def start(self, emitted: Sequence[int]) -> RequestHistory | None:
        """None: a table reads no history."""
        return None

    def tensor(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
    ) -> torch.Tensor:
        """Hazards where the signals are, fp64 [B, 15]."""
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

    def hazards(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
        draft_tokens_BD: torch.Tensor | None = None,
        histories: Sequence[RequestHistory | None] | None = None,
    ) -> list[list[float]]:
        """`tensor` as one plain loop: on 15 numbers in host memory the price of a library call,
        cold after a forward pass, is several of its iterations.
        """
        low, high = self._knot_range
        log_p1, neg_log_1m_p1, entropy, margin, log_context = self._weights
        bias, knots, offsets, slopes = self._host_tables
        found = []
        rows = zip(p1_BD.tolist(), p2_BD.tolist(), entropy_BD.tolist(), strict=True)
        for tokens, (p1_D, p2_D, entropy_D) in zip(context_tokens, rows, strict=True):
            context = log_context * math.log1p(tokens)
            hazard_D = []
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
                hazard_D.append(offsets[piece] + slopes[piece] * x)
            found.append(hazard_D)
        return found


class TreeHazards:
    """Boosted trees of a bundle, walked side by side for all drafts of a round on the host.

    Args:
        trees: over `CONTEXT_FEATURES`.

    Raises:
        UsageError: trees over other features, which cannot be computed here.
    """

    kind: HazardKind = TREES

    def __init__(self, trees: TreeTable) -> None:
        if trees.feature_names != CONTEXT_FEATURES:
            raise UsageError(
                f"the trees read {len(trees.feature_names)} features, from "
                f"{trees.feature_names[0]!r} on; this version computes {len(CONTEXT_FEATURES)}: "
                "calibrate again"
            )
        leaf = trees.feature_K == LEAF
        nodes = np.arange(trees.feature_K.size)
        self._depth = trees.depth
        self._root_T = trees.root_T
        # A leaf leads to itself, so that no lane branches.
        self._feature_K = np.where(leaf, 0, trees.feature_K)
        self._threshold_K = np.where(leaf, np.inf, trees.threshold_K).astype(np.float32)
        self._left_K = np.where(leaf, nodes, trees.left_K)
        self._value_K = trees.value_K
        self._baseline = trees.baseline

    def describe(self) -> str:
        """Their number."""
        return f"{self._root_T.size} boosted trees"

    def start(self, emitted: Sequence[int]) -> RequestHistory | None:
        """History of a request that has emitted these tokens."""
        return RequestHistory(emitted)

    def hazards(
        self,
        p1_BD: torch.Tensor,
        p2_BD: torch.Tensor,
        entropy_BD: torch.Tensor,
        context_tokens: Sequence[int],
        draft_tokens_BD: torch.Tensor | None,
        histories: Sequence[RequestHistory | None] | None,
    ) -> list[list[float]]:
        """Hazards of every draft [B][15].

        Args:
            p1_BD, p2_BD, entropy_BD: draft signals [B, 15].
            context_tokens: not read.
            draft_tokens_BD: int64 [B, 15].
            histories: one of `start` a request.

        Raises:
            UsageError: drafts or a history are missing.
        """
        if draft_tokens_BD is None or histories is None or None in histories:
            raise UsageError("trees need the drafts and the history of every request: pass both")
        p1, p2, entropy = (
            values.detach().to("cpu", torch.float32).numpy()
            for values in (p1_BD, p2_BD, entropy_BD)
        )
        drafts = draft_tokens_BD.cpu().numpy()
        expected = expected_accepted(p1)
        columns, seen, successor, anchor = [], [], [], []
        for i, (history, block) in enumerate(zip(histories, drafts.tolist(), strict=True)):
            assert history is not None
            request, lengths, verdicts = history.drafted(expected[i], block)
            columns.append(request)
            seen.append(lengths)
            successor.append(verdicts)
            anchor.append(history.anchor)
        features = block_features(
            p1_RD=p1,
            p2_RD=p2,
            entropy_RD=entropy,
            anchor=np.asarray(anchor),
            draft_tokens_RD=drafts,
            history=History(
                np.asarray(columns, dtype=np.float32).reshape(-1, len(HISTORY_NAMES)),
                np.asarray(seen, dtype=np.float32),
                np.asarray(successor, dtype=np.float32),
            ),
        )
        hazards = self._walk(features.reshape(-1, features.shape[-1])).reshape(p1.shape)
        broken = ~(np.isfinite(p1) & np.isfinite(p2) & np.isfinite(entropy))
        hazards[broken] = np.nan
        return [row.tolist() for row in hazards]

    def _walk(self, features_NF: np.ndarray) -> FloatArray:
        """What `TreeTable.predict` says, all trees at once; the same sums in the same order."""
        width = features_NF.shape[1]
        flat = features_NF.ravel()
        row = (np.arange(len(features_NF)) * width)[:, None]
        node = np.broadcast_to(self._root_T, (len(features_NF), self._root_T.size))
        for _ in range(self._depth):
            right = flat[row + self._feature_K[node]] > self._threshold_K[node]
            node = self._left_K[node] + right
        parts = np.empty((len(features_NF), self._root_T.size + 1))
        parts[:, 0], parts[:, 1:] = self._baseline, self._value_K[node]
        hazards: FloatArray = 1.0 / (1.0 + np.exp(-np.cumsum(parts, axis=1)[:, -1]))
        return hazards


def served_hazards(
    part: CalibrationPart, throughput: ThroughputTable, *, device: torch.device | str = "cpu"
) -> tuple[ServedHazards, str | None]:
    """The best model that a bundle can be served with, and why it is not a better one.

    Args:
        part: of a loaded bundle.
        throughput: of the same bundle; lengths are right only by the model it was fitted with.
        device: where a table is evaluated.

    Returns:
        the trees where there are some and the throughput is theirs, else the table; and a reason
        to say aloud where the table stands in for trees, else None.
    """
    table = TableHazards(part.hazard, device)
    if part.trees is not None and throughput.hazard == TREES:
        return TreeHazards(part.trees), None
    if part.trees is not None:
        return table, (
            "the throughput was fitted with the hazard table, so the table is served and not the "
            "boosted trees beside it: fit it again with `hybridspec calibrate --from-trace`"
        )
    if part.hazard.method == DISTILLED_METHOD:
        return table, (
            "the bundle lacks the boosted trees that its hazard table was distilled from, so the "
            "table is served: calibrate again with --model boosted"
        )
    return table, None
