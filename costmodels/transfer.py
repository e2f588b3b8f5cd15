"""Costs of another machine from a few cells measured there: a ratio between anchors, no more.

One machine's latency over another's is not constant (a single factor errs by tens of percent), but
it bends slowly inside one memory class. So the logarithm of the ratio is taken at anchors and
interpolated piecewise linearly in the logarithm of the rows; what the anchors do not bracket is
dropped, and each anchor predicted from the others says how wrong the cells between them may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridspec.artifacts.identity import CostIdentity
from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, IntArray, StepCostTable
from hybridspec.costmodels.anchors import Anchors, cell
from hybridspec.errors import BundleError, NotEnoughData, QualityGate

MIN_ANCHORS = 4
MAX_ERROR = 0.15
MIN_INTERVAL = 0.01
_SAME = (
    ("engine", "another engine runs other kernels"),
    ("dtype", "another type moves other bytes"),
    ("quantization", "other weights move other bytes"),
    ("architecture_digest", "another target does other work"),
    ("drafter_architecture_digest", "another drafter does other work"),
    ("tp_size", "communication and expert counts change with it"),
    ("backends", "other kernels have other curves"),
    ("graph_tiers", "steps lie elsewhere"),
)


@dataclass(frozen=True)
class CurveTransfer:
    """One curve as transferred.

    Attributes:
        latency_us: float64 [n].
        half_width: half width of the interval of cells between anchors, in ln(latency).
        left_out: float64 [anchors], ln(predicted / measured) of each anchor from the others; the
            two ends keep the ratio of their neighbour.
    """

    latency_us: FloatArray
    half_width: float
    left_out: FloatArray

    @property
    def inner_errors(self) -> FloatArray:
        """Relative errors of the anchors that others bracket, float64 [anchors - 2]."""
        errors: FloatArray = np.abs(np.expm1(self.left_out[1:-1]))
        return errors


def transfer_curve(
    rows: FloatArray, source_us: FloatArray, anchor_index: IntArray, anchor_us: FloatArray
) -> CurveTransfer:
    """Transfers one curve over a count of rows (verify lengths, tokens or batches).

    The interval is the largest error of an anchor that was left out, at least 1 %. Leaving one out
    doubles the gap to its neighbours, so on average this is wide enough: see the coverage in
    `benchmarks/results/transfer_error.json`.

    Args:
        rows: float64 [n], strictly increasing from above 0.
        source_us: float64 [n], the source machine's latency.
        anchor_index: int64 [k], increasing, which of the `n` were measured on the target.
        anchor_us: float64 [k], their latency there.

    Raises:
        NotEnoughData: fewer than 4 anchors, or ends that no anchor covers.
        QualityGate: an anchor inside is missed by more than 15 % (see `check_errors`).
    """
    if anchor_index.size < MIN_ANCHORS:
        raise NotEnoughData(
            f"{anchor_index.size} anchors on a curve of {rows.size} points; at least {MIN_ANCHORS} "
            "are needed (one factor for all is refused: it errs by tens of percent): measure more"
        )
    if anchor_index[0] != 0 or anchor_index[-1] != rows.size - 1:
        raise NotEnoughData(
            f"anchors cover {rows[anchor_index[0]]:g} to {rows[anchor_index[-1]]:g} rows of a "
            f"curve from {rows[0]:g} to {rows[-1]:g}; nothing is extrapolated: measure both ends"
        )
    place = np.log(rows)
    ratio = np.log(anchor_us / source_us[anchor_index])
    left_out = leave_one_out(place[anchor_index], ratio)
    # The product keeps equal machines exactly equal: exp(0) is 1.
    latency_us = source_us * np.exp(np.interp(place, place[anchor_index], ratio))
    latency_us[anchor_index] = anchor_us
    half_width = max(float(np.abs(left_out).max()), MIN_INTERVAL)
    return CurveTransfer(latency_us, half_width, left_out)


def leave_one_out(place: FloatArray, value: FloatArray) -> FloatArray:
    """Returns predicted minus measured value of each point, interpolated from the others.

    Args:
        place: float64 [k >= 2], strictly increasing.
        value: float64 [k] or [k, m].

    Returns:
        float64 of the shape of `value`; an end is predicted by its neighbour.
    """
    errors = np.empty_like(value)
    for index in range(place.size):
        kept = np.delete(np.arange(place.size), index)
        errors[index] = _interpolate(place[index : index + 1], place[kept], value[kept])[0]
    return errors - value


def check_transferable(source: CostIdentity, target: CostIdentity) -> None:
    """Refuses machines between which a ratio says nothing.

    Raises:
        BundleError: another engine, type, model, parallelism or backend; another or an unknown
            memory class, another GPU vendor, a slice of a GPU.
    """
    for name, reason in _SAME:
        before, now = getattr(source, name), getattr(target, name)
        if before != now:
            raise BundleError(
                f"{name}: the source was measured with {before!r}, the anchors with {now!r}; "
                f"{reason}: profile the target machine in full"
            )
    classes = (source.memory_class, target.memory_class)
    if classes[0] != classes[1] or "unknown" in classes:
        raise BundleError(
            f"memory_class: {source.device} has {classes[0]!r}, {target.device} has "
            f"{classes[1]!r}; a transfer needs one known class, across classes it is no better "
            "than interpolating the anchors: profile the target machine in full"
        )
    slices = ["mig" in identity.device.split("-") for identity in (source, target)]
    vendors = [identity.device.split("-")[0] for identity in (source, target)]
    if any(slices) and source.device != target.device:
        raise BundleError(
            f"device: {source.device} and {target.device}: a slice of a GPU shares its memory "
            "with others: profile it in full"
        )
    if source.memory_class != "ram" and vendors[0] != vendors[1]:
        raise BundleError(
            f"device: {source.device} and {target.device} are of two vendors, whose kernels "
            "differ: profile the target machine in full"
        )


@dataclass(frozen=True)
class TableTransfer:
    """A step cost table as transferred.

    Attributes:
        table: costs of the target machine; p10 and p90 hold the interval of transferred cells.
        measured: bool [B, C, 17], cells that are anchors.
        errors: float64 [n], relative errors of anchors inside their curve, left out in turn.
        half_width: the largest half width along the verify length, in ln(latency).
        dropped: what the anchors do not bracket, a sentence each.
    """

    table: StepCostTable
    measured: np.ndarray
    errors: FloatArray
    half_width: float
    dropped: tuple[str, ...]


def transfer_table(source: StepCostTable, anchors: Anchors) -> TableTransfer:
    """Transfers a step cost table to the machine of the anchors.

    Anchors lie on cells of the table, at every pair of some of its batch sizes and contexts, each
    with length 0 and at least 4 of the lengths 1..16, both ends among them. Between anchored
    batches and contexts the log ratio is linear in ln(batch) and ln(1 + context).

    Raises:
        BundleError: an anchor that is no cell of the table.
        NotEnoughData: a curve with too few anchors or open ends.
        QualityGate: anchors left out are missed by more than 15 % (90 % quantile).
    """
    batches, contexts = np.unique(anchors.batch_sizes), np.unique(anchors.context_tokens)
    b_at = _places(source.batch_sizes, batches, "batch size")
    c_at = _places(source.context_tokens, contexts, "context")
    rows = np.arange(1, BLOCK_SIZE + 1, dtype=np.float64)
    shape = (batches.size, contexts.size, BLOCK_SIZE + 1)
    ratio, draft_ratio = np.empty(shape), np.empty(shape[:2])
    width, errors = np.empty(shape[:2]), []
    for i, batch in enumerate(batches.tolist()):
        for j, context in enumerate(contexts.tolist()):
            found = cell(anchors, batch=batch, context_tokens=context)
            curve = source.latency_us[b_at[i], c_at[j]]
            ratio[i, j, 0] = np.log(found.latency_us[0] / curve[0])
            moved = transfer_curve(rows, curve[1:], found.lengths[1:] - 1, found.latency_us[1:])
            ratio[i, j, 1:] = np.log(moved.latency_us / curve[1:])
            draft_ratio[i, j] = np.log(found.draft_us / source.draft_us[b_at[i], c_at[j]])
            width[i, j] = moved.half_width
            errors.append(moved.inner_errors)
    joined = np.concatenate(errors)
    check_errors(joined)

    kept_b = slice(b_at[0], b_at[-1] + 1)
    kept_c = slice(c_at[0], c_at[-1] + 1)
    between = (
        _spread_over(np.log(batches), ratio),
        _spread_over(np.log1p(contexts), ratio, axis=1),
    )
    cells = [np.log(source.batch_sizes[kept_b]), np.log1p(source.context_tokens[kept_c])]
    known = [np.log(batches), np.log1p(contexts)]
    all_ratio = _bilinear(cells, known, ratio)
    all_draft = _bilinear(cells, known, draft_ratio)
    all_width = _bilinear(cells, known, width)[:, :, None]
    off_batch = ~np.isin(source.batch_sizes[kept_b], batches)[:, None, None]
    off_context = ~np.isin(source.context_tokens[kept_c], contexts)[None, :, None]
    # Errors along the three axes add as independent ones do.
    total = np.sqrt(all_width**2 + (off_batch * between[0]) ** 2 + (off_context * between[1]) ** 2)
    old = source.latency_us[kept_b, kept_c]
    latency = old * np.exp(all_ratio)
    low = latency * (source.latency_p10_us[kept_b, kept_c] / old) * np.exp(-total)
    high = latency * (source.latency_p90_us[kept_b, kept_c] / old) * np.exp(total)
    measured = np.zeros(latency.shape, dtype=bool)
    place = (
        np.searchsorted(source.batch_sizes[kept_b], anchors.batch_sizes),
        np.searchsorted(source.context_tokens[kept_c], anchors.context_tokens),
        anchors.lengths,
    )
    for into, values in (
        (latency, anchors.latency_us),
        (low, anchors.latency_p10_us),
        (high, anchors.latency_p90_us),
        (measured, True),
    ):
        into[place] = values
    table = StepCostTable(
        batch_sizes=source.batch_sizes[kept_b].copy(),
        context_tokens=source.context_tokens[kept_c].copy(),
        latency_us=latency,
        latency_p10_us=low,
        latency_p90_us=high,
        draft_us=source.draft_us[kept_b, kept_c] * np.exp(all_draft),
        # How much of an expert is memory traffic is the machine's own: without its own measurement
        # there is none to carry.
        expert_slope_us=anchors.expert_slope_us,
        expert_slope_r2=anchors.expert_slope_r2,
    )
    return TableTransfer(
        table, measured, joined, float(width.max()), _dropped(source, kept_b, kept_c)
    )


def check_errors(errors: FloatArray) -> None:
    """Refuses a transfer whose own anchors say that it does not hold.

    Args:
        errors: float64 [n], relative errors of anchors predicted from the others.

    Raises:
        QualityGate: the 90 % quantile is over 15 %.
    """
    high = float(np.quantile(errors, 0.9))
    if high > MAX_ERROR:
        raise QualityGate(
            f"anchors predicted from the other anchors are off by {high:.1%} (90 % quantile of "
            f"{errors.size}); at most {MAX_ERROR:.0%} can be used: the machines differ too much "
            "in this range; measure more anchors or profile the target machine in full"
        )


def _places(grid: IntArray, wanted: IntArray, name: str) -> IntArray:
    missing = sorted(set(wanted.tolist()) - set(grid.tolist()))
    if missing:
        raise BundleError(
            f"anchor at {name} {missing[0]}; the source has {grid.tolist()} and nothing is "
            "extrapolated: measure anchors on its grid"
        )
    places: IntArray = np.searchsorted(grid, wanted).astype(np.int64)
    return places


def _interpolate(at: FloatArray, place: FloatArray, value: FloatArray) -> FloatArray:
    """Piecewise linear along axis 0, ends held: `value` [k, ...] -> [n, ...]."""
    flat = value.reshape(place.size, -1)
    columns = [np.interp(at, place, flat[:, column]) for column in range(flat.shape[1])]
    found: FloatArray = np.stack(columns, axis=1).reshape(at.size, *value.shape[1:])
    return found


def _bilinear(at: list[FloatArray], known: list[FloatArray], value: FloatArray) -> FloatArray:
    first = _interpolate(at[0], known[0], value)
    return np.swapaxes(_interpolate(at[1], known[1], np.swapaxes(first, 0, 1)), 0, 1)


def _spread_over(place: FloatArray, ratio: FloatArray, *, axis: int = 0) -> float:
    """Largest error of a batch or context that is left out, in ln(latency); 0 for a single one."""
    if place.size < 2:
        return 0.0
    moved = np.moveaxis(ratio, axis, 0)
    return float(np.abs(leave_one_out(place, moved)).max())


def _dropped(source: StepCostTable, kept_b: slice, kept_c: slice) -> tuple[str, ...]:
    sentences = []
    for name, grid, kept in (
        ("batch sizes", source.batch_sizes, kept_b),
        ("contexts", source.context_tokens, kept_c),
    ):
        gone = sorted(set(grid.tolist()) - set(grid[kept].tolist()))
        if gone:
            sentences.append(
                f"{name} {gone} are left out: no anchors bracket them, and nothing is extrapolated"
            )
    return tuple(sentences)
