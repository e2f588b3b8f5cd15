"""From round samples to the step cost table, refusing samples that cannot carry one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from sklearn.isotonic import isotonic_regression

from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, IntArray, StepCostTable
from hybridspec.costmodels.expert import ExpertSlope
from hybridspec.costmodels.measure import MIN_SWEEPS
from hybridspec.costmodels.probe import rows_expected
from hybridspec.costmodels.sweep import STEP_SAMPLES_SCHEMA, StepCase, check_rows
from hybridspec.errors import BundleError, NotEnoughData, QualityGate

DRIFT_WARN = 0.10
DRIFT_REFUSE = 0.25
SPREAD_WARN = 1.5
_QUIET = (
    "close other programs, fix the clocks, raise --repeats or, on a CPU with several engine "
    "threads, set --threads 1, then measure again"
)


@dataclass(frozen=True)
class StepFit:
    """A cost table and what its samples were like.

    Attributes:
        table: medians by batch, context and length.
        readings_per_case: fewest readings of any cell.
        smoothed: cells whose median moved by pooling, all within their noise.
        worst_drift: largest change of a cell's median between the halves of the measurement.
        warnings: findings that do not forbid the table.
    """

    table: StepCostTable
    readings_per_case: int
    smoothed: int
    worst_drift: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Samples:
    batch_sizes: IntArray
    contexts: IntArray
    total_us: dict[StepCase, FloatArray]  # readings in the order of the repeats
    draft_us: dict[StepCase, FloatArray]
    parts_us: dict[StepCase, FloatArray]  # draft + verify + commit, parts not timed apart left out

    def curves(self) -> Iterator[tuple[int, int, list[StepCase]]]:
        """Yields the indices and the 17 cases of each batch and context."""
        for row, batch in enumerate(self.batch_sizes.tolist()):
            for column, context in enumerate(self.contexts.tolist()):
                lengths = range(BLOCK_SIZE + 1)
                yield row, column, [StepCase(batch, context, length) for length in lengths]


def fit_step_costs(samples: pa.Table, *, expert: ExpertSlope | None = None) -> StepFit:
    """Fits the table: medians as measured, with 10 and 90 % quantiles.

    The latency must not fall when a row is added; where it does by no more than the noise of the
    medians, neighbours are pooled (weighted isotonic regression over L = 1..16). Rises are never
    smoothed, so steps between graph tiers stay steps, and a fall beyond the noise stays as it was
    measured, with a warning.

    Args:
        samples: a table of `STEP_SAMPLES_SCHEMA`.
        expert: the slope to store; None, or one that is not usable, stores 0.

    Raises:
        NotEnoughData: a cell without samples, or with fewer than 5.
        QualityGate: rows other than asked for, a draft pass in a round of length 0 (or none in a
            drafted one), times that are not positive, or a machine that drifted by over 25 %.
    """
    data = _read(samples)
    worst_drift, warnings = _check_drift(data)
    shape = (data.batch_sizes.size, data.contexts.size, BLOCK_SIZE + 1)
    median, low, high = np.empty(shape), np.empty(shape), np.empty(shape)
    draft = np.empty(shape[:2])
    smoothed = 0
    for row, column, cases in data.curves():
        readings = [data.total_us[case] for case in cases]
        quantiles = np.stack([np.quantile(values, [0.1, 0.5, 0.9]) for values in readings], axis=1)
        low[row, column], median[row, column], high[row, column] = quantiles
        spread = high[row, column] - low[row, column]
        noise = _median_noise(spread, median[row, column], [v.size for v in readings])
        pooled, falls = pool_within_noise(median[row, column, 1:], noise[1:])
        smoothed += int(np.count_nonzero(pooled != median[row, column, 1:]))
        median[row, column, 1:] = pooled
        draft[row, column] = np.median(np.concatenate([data.draft_us[c] for c in cases[1:]]))
        where = f"batch {cases[0].batch}, context {cases[0].context_tokens}"
        warnings += [
            f"{where}: length {length + 1} is {fall:.1%} faster than {length}, beyond the noise "
            "(a faster kernel tier, or a disturbance); kept as measured"
            for length, fall in falls
        ]
        if median[row, column, 0] > median[row, column, 1]:
            warnings.append(
                f"{where}: a round without drafting takes longer than a drafted one with 1 row; "
                "plain decoding may lack its own graph"
            )
    warnings += _spread_warnings(data, low, high) + _part_warnings(data)
    priced = expert is not None and expert.usable
    if expert is not None:
        warnings += expert.warnings
    table = StepCostTable(
        batch_sizes=data.batch_sizes,
        context_tokens=data.contexts,
        latency_us=median,
        latency_p10_us=np.minimum(low, median),
        latency_p90_us=np.maximum(high, median),
        draft_us=draft,
        expert_slope_us=expert.slope_us if expert is not None and priced else 0.0,
        expert_slope_r2=expert.r2 if expert is not None else 0.0,
    )
    fewest = min(values.size for values in data.total_us.values())
    return StepFit(table, fewest, smoothed, worst_drift, tuple(warnings))


def pool_within_noise(
    median_L: FloatArray, noise_L: FloatArray
) -> tuple[FloatArray, list[tuple[int, float]]]:
    """Pools falls of a curve that its noise explains.

    Args:
        median_L: float64 [16], medians of lengths 1..16.
        noise_L: float64 [16], how far each median may be off.

    Returns:
        The curve, and the falls that remain as (length before the fall, share).
    """
    isotonic = isotonic_regression(median_L, sample_weight=1.0 / noise_L**2)
    pooled = np.array(median_L)
    edges = np.flatnonzero(np.diff(isotonic) > 0) + 1
    for block in np.split(np.arange(median_L.size), edges):
        falls = bool(np.any(np.diff(median_L[block]) < 0))
        if falls and np.all(np.abs(isotonic[block] - median_L[block]) <= noise_L[block]):
            pooled[block] = isotonic[block]
    shares = -np.diff(pooled) / pooled[:-1]
    return pooled, [(int(i) + 1, float(shares[i])) for i in np.flatnonzero(shares > 1e-12)]


def _median_noise(spread_us: FloatArray, median_us: FloatArray, counts: list[int]) -> FloatArray:
    """Returns about three standard errors of each median, at least 1 % of it.

    The p10-p90 band of a normal sample is 2.56 sigma wide, a median's error 1.25 sigma / sqrt(n).
    """
    errors: FloatArray = 3.0 * 1.25 * spread_us / 2.56 / np.sqrt(np.asarray(counts))
    return np.maximum(errors, 0.01 * median_us)


def _read(samples: pa.Table) -> _Samples:
    missing = [name for name in STEP_SAMPLES_SCHEMA.names if name not in samples.column_names]
    if missing:
        raise BundleError(f"step samples lack the columns {missing}: measure again")
    columns = {
        name: samples.column(name).to_numpy(zero_copy_only=False)
        for name in STEP_SAMPLES_SCHEMA.names
    }
    order = np.argsort(columns["repeat"], kind="stable")
    rows_of: dict[StepCase, list[int]] = {}
    keys = ("batch", "context_tokens", "verify_length")
    for row in order.tolist():
        case = StepCase(*(int(columns[name][row]) for name in keys))
        rows_of.setdefault(case, []).append(row)
        asked = rows_expected(batch=case.batch, verify_length=case.verify_length)
        check_rows(asked, int(columns["rows_run"][row]), case=case)
    parts = sum(
        np.nan_to_num(columns[name].astype(np.float64))
        for name in ("draft_us", "verify_us", "commit_us")
    )
    data = _Samples(
        batch_sizes=np.unique(columns["batch"]).astype(np.int64),
        contexts=np.unique(columns["context_tokens"]).astype(np.int64),
        total_us={case: columns["total_us"][rows] for case, rows in rows_of.items()},
        draft_us={case: columns["draft_us"][rows] for case, rows in rows_of.items()},
        parts_us={case: np.asarray(parts)[rows] for case, rows in rows_of.items()},
    )
    _check_complete(data)
    _check_times(data)
    return data


def _check_complete(data: _Samples) -> None:
    wanted = [case for _, _, cases in data.curves() for case in cases]
    few = [case for case in wanted if data.total_us.get(case, np.empty(0)).size < MIN_SWEEPS]
    if few or not wanted:
        raise NotEnoughData(
            f"{len(few)} of {len(wanted)} cells have fewer than {MIN_SWEEPS} samples"
            + (f" (first: {few[0]})" if few else "")
            + "; every batch needs every context and every length 0..16: measure again"
        )


def _check_times(data: _Samples) -> None:
    for case, total in data.total_us.items():
        if not np.all(np.isfinite(total) & (total > 0)):
            raise QualityGate(f"{case} has a time that is not above 0 us: measure again")
        draft = data.draft_us[case]
        drafted = case.verify_length > 0
        if not np.all((draft > 0) if drafted else (draft == 0)):
            raise QualityGate(
                f"{case} spent {float(np.max(draft)):g} us drafting; "
                + ("a drafted round needs a timed draft pass" if drafted else "it must not draft")
                + ": the engine did not run the round that was asked for"
            )


def _check_drift(data: _Samples) -> tuple[float, list[str]]:
    """Compares medians of the first and last half of the repeats.

    An odd count shares its middle reading, so that one outlier cannot move either half. A whole
    curve that moved (its median cell) means that the machine changed while it was measured; a
    single cell must move twice as far to be refused, as few repeats make it jumpy.
    """
    worst, warnings = 0.0, []
    for _, _, cases in data.curves():
        drift = np.asarray([_half_change(data.total_us[case]) for case in cases])
        where = f"batch {cases[0].batch}, context {cases[0].context_tokens}"
        whole, single = float(np.median(drift)), float(drift.max())
        worst = max(worst, single)
        if whole > DRIFT_REFUSE or single > 2 * DRIFT_REFUSE:
            worst_length, most = int(drift.argmax()), 2 * DRIFT_REFUSE
            one = f"{single:.0%} at the worst length {worst_length} (at most {most:.0%})"
            half = f"{whole:.0%} or more at half of the lengths (at most {DRIFT_REFUSE:.0%})"
            figures = (one, half) if single > 2 * DRIFT_REFUSE else (half, one)
            raise QualityGate(
                f"{where}: medians of the first and second half of the repeats differ by "
                f"{' and by '.join(figures)}: {_QUIET}"
            )
        if np.any(drift > DRIFT_WARN):
            lengths = np.flatnonzero(drift > DRIFT_WARN).tolist()
            warnings.append(
                f"{where}: lengths {lengths} changed by up to {single:.0%} between the halves of "
                f"the measurement (good is under {DRIFT_WARN:.0%}): {_QUIET}"
            )
    return worst, warnings


def _half_change(readings: FloatArray) -> float:
    half = (readings.size + 1) // 2
    first, second = np.median(readings[:half]), np.median(readings[-half:])
    return float(abs(second - first) / np.median(readings))


def _spread_warnings(data: _Samples, low: FloatArray, high: FloatArray) -> list[str]:
    ratio = high / low
    wide = int(np.count_nonzero(ratio > SPREAD_WARN))
    if wide == 0:
        return []
    row, column, length = np.unravel_index(int(ratio.argmax()), ratio.shape)
    return [
        f"{wide} of {ratio.size} cells spread by more than {SPREAD_WARN:g}x from p10 to p90 (worst "
        f"{float(ratio.max()):.2f}x at batch {int(data.batch_sizes[row])}, context "
        f"{int(data.contexts[column])}, length {int(length)}): {_QUIET}"
    ]


def _part_warnings(data: _Samples) -> list[str]:
    over = [
        case
        for case, parts in data.parts_us.items()
        if np.median(parts) > 1.1 * np.median(data.total_us[case])
    ]
    if not over:
        return []
    return [
        f"{len(over)} cells have parts that sum to more than their whole (first: {over[0]}): "
        "the parts are timed by another clock; only the whole is used"
    ]
