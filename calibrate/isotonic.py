"""Isotonic knots: a monotone map from a score to a probability, kept as a few points."""

from __future__ import annotations

import numpy as np
from sklearn.isotonic import IsotonicRegression

from hybridspec.artifacts.tables import FloatArray
from hybridspec.calibrate.features import BoolArray

MAX_KNOTS = 64
MIN_ROWS_PER_KNOT = 25
MIN_SHARE_PER_KNOT = 0.02


def isotonic_knots(
    scores: FloatArray,
    labels: BoolArray,
    *,
    max_knots: int = MAX_KNOTS,
    min_rows: int | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Fit a non-decreasing map and keep it as knots for linear interpolation.

    Isotonic regression pools the rows into blocks of constant value. Neighbouring blocks are
    merged, lightest first, until each holds `min_rows` and there are at most `max_knots`; each
    block becomes one knot at its mean score. The value of a block of n rows with k accepted is (k +
    1/2) / (n + 1), so no finite sample claims certainty.

    Args:
        scores: float64 [N] in [0, 1], predicted by a model that has not seen these rows.
        labels: bool [N].
        max_knots: most knots kept.
        min_rows: fewest rows behind a knot; by default 25 or 2 % of all rows, whichever is more:
            smaller blocks follow noise.

    Returns:
        knots_x, strictly increasing, and knots_y, non-decreasing, both float64 [2..max_knots].
    """
    if min_rows is None:
        min_rows = max(MIN_ROWS_PER_KNOT, int(MIN_SHARE_PER_KNOT * scores.size))
    order = np.argsort(scores, kind="stable")
    x, y = scores[order], labels[order].astype(np.float64)
    fitted = IsotonicRegression(y_min=0.0, y_max=1.0).fit_transform(x, y)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(fitted) > 0) + 1])
    counts = np.diff(np.append(starts, x.size)).astype(np.float64)
    blocks = np.stack([counts, np.add.reduceat(x, starts), np.add.reduceat(y, starts)], axis=1)
    blocks = _merge(blocks, max_knots, min_rows)
    knots_x = np.clip(blocks[:, 1] / blocks[:, 0], 0.0, 1.0)
    knots_y = np.maximum.accumulate((blocks[:, 2] + 0.5) / (blocks[:, 0] + 1.0))
    distinct = np.concatenate([[True], np.diff(knots_x) > 0])
    knots_x, knots_y = knots_x[distinct], knots_y[distinct]
    if knots_x.size < 2:
        # Scores that say nothing: one probability everywhere.
        return np.array([0.0, 1.0]), np.full(2, knots_y[-1])
    return knots_x, knots_y


def _merge(blocks: FloatArray, max_knots: int, min_rows: int) -> FloatArray:
    rows = [tuple(block) for block in blocks]
    while len(rows) > 1:
        lightest = min(range(len(rows)), key=lambda index: rows[index][0])
        if len(rows) <= max_knots and rows[lightest][0] >= min_rows:
            break
        neighbours = [index for index in (lightest - 1, lightest + 1) if 0 <= index < len(rows)]
        # The neighbour of nearer value: merging it moves the map least.
        other = min(neighbours, key=lambda index: abs(_mean(rows[index]) - _mean(rows[lightest])))
        first, second = sorted((lightest, other))
        rows[first : second + 1] = [
            tuple(a + b for a, b in zip(rows[first], rows[second], strict=True))
        ]
    return np.asarray(rows)


def _mean(block: tuple[float, ...]) -> float:
    return block[2] / block[0]
