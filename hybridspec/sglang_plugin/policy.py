"""The policy on the device: a bundle's tables packed for select, or a fixed length and why.

Drafting always goes on: a bundle that is missing, damaged or of another pair or machine costs
speed, never an answer, so each of these is a warning and a fixed length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hybridspec.errors import BundleError, HybridSpecError, UsageError

if TYPE_CHECKING:
    import torch

    from hybridspec.artifacts.bundle import Bundle
    from hybridspec.artifacts.identity import CalibrationIdentity, CostIdentity
    from hybridspec.kernels.hazard_trees.ensemble import DeviceTrees
    from hybridspec.kernels.select.tables import DeviceTables

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DevicePolicy:
    """What the drafter's graph needs to choose lengths.

    Attributes:
        tables: packed tables; None: every round takes `fixed_length`.
        trees: packed trees, where the bundle has them and the configuration takes them.
        batch_sizes, tokens_per_us: price of time by batch size, empty without tables.
        fixed_length: rows of every round without tables.
        correction: `off` without tables or without routing.
        lookahead: rows beyond the length up to the first router, 0 without correction.
        note: one sentence for the log: what chooses the lengths.
        warnings: what the operator should know.
        static: whether the tables are kept at their best fixed lengths.
    """

    tables: DeviceTables | None
    trees: DeviceTrees | None
    batch_sizes: tuple[int, ...]
    tokens_per_us: tuple[float, ...]
    fixed_length: int
    correction: str
    lookahead: int
    note: str
    warnings: tuple[str, ...] = ()
    static: bool = False

    def price(self, batch_size: int) -> float:
        """Price of time of a batch in tokens/us: of the next measured size, of the largest beyond.

        0 without tables, where no length is chosen by price.
        """
        if not self.batch_sizes:
            return 0.0
        index = int(np.searchsorted(self.batch_sizes, batch_size))
        return self.tokens_per_us[min(index, len(self.batch_sizes) - 1)]


def fixed_policy(length: int, reason: str) -> DevicePolicy:
    """Every round verifies `length` rows."""
    return DevicePolicy(
        None, None, (), (), length, "off", 0, f"{reason}: every round verifies {length} rows"
    )


def load_policy(
    folder: Path,
    *,
    current: Callable[[Bundle], tuple[CalibrationIdentity, CostIdentity]],
    device: torch.device | str,
    fixed_length: int,
    correction: str,
    lookahead: int,
    use_trees: bool = True,
    allow: Sequence[str] = (),
) -> DevicePolicy:
    """The policy of a bundle, or a fixed length with the reason as a warning.

    Args:
        current: identities of what runs here; what it refuses counts as another pair's bundle.
        fixed_length: where the bundle cannot even name its best fixed length.
        allow: fields of the identities that may differ.
    """
    try:
        from hybridspec.artifacts.bundle import load_bundle

        bundle = load_bundle(folder)
        _require_parts(bundle)
    except (HybridSpecError, ImportError) as error:
        return _with_warning(fixed_policy(fixed_length, f"bundle {folder} is not used"), str(error))
    warnings = list(bundle.warnings)
    mismatch = None
    try:
        warnings += _compare(bundle, current(bundle), allow)
    except HybridSpecError as error:
        mismatch = str(error)
    try:
        policy = pack_policy(
            bundle, device=device, correction=correction, lookahead=lookahead, use_trees=use_trees
        )
    except HybridSpecError as error:
        return _with_warning(fixed_policy(fixed_length, f"bundle {folder} is not used"), str(error))
    if use_trees and policy.trees is None and _has_trees(bundle):
        warnings.append(
            "the throughput was fitted with the hazard table, so the table is served and not the "
            "boosted trees beside it: fit it again with `hybridspec calibrate --from-trace`"
        )
    if mismatch is not None:
        assert policy.tables is not None
        policy.tables.set_static()
        warnings.append(mismatch)
        note = f"bundle {folder} is of another pair or machine: its best fixed length by batch size"
        return replace(
            policy,
            correction="off",
            lookahead=0,
            note=note,
            warnings=tuple(warnings),
            static=True,
        )
    note = f"bundle {folder}: 1 to 16 rows a round, router correction {policy.correction}"
    if policy.trees is not None:
        note += ", hazards by trees"
    return replace(policy, note=note, warnings=tuple(warnings))


def pack_policy(
    bundle: Bundle,
    *,
    device: torch.device | str,
    correction: str,
    lookahead: int,
    use_trees: bool = True,
) -> DevicePolicy:
    """Pack a bundle's tables for the kernels.

    Raises:
        UsageError: tables that do not fit the kernels.
    """
    from hybridspec.artifacts.tables import TREES
    from hybridspec.kernels.hazard_trees.ensemble import FEATURES, pack_trees
    from hybridspec.kernels.select.tables import pack_tables

    calibration, cost = bundle.calibration, bundle.cost
    assert calibration is not None
    assert cost is not None
    assert cost.throughput is not None
    hazard, routing, throughput = calibration.hazard, calibration.routing, cost.throughput
    tables = pack_tables(
        weights_F=hazard.weights_F,
        position_bias_D=hazard.position_bias_D,
        knots_x=hazard.knots_x,
        knots_y=hazard.knots_y,
        batch_sizes=cost.step.batch_sizes,
        context_tokens=cost.step.context_tokens,
        latency_us=cost.step.latency_us,
        tokens_per_us=throughput.tokens_per_us,
        best_fixed_length=throughput.best_fixed_length,
        first_mean_L=None if routing is None else routing.first_mean_L,
        slope_L=None if routing is None else routing.slope_L,
        expert_slope_us=cost.step.expert_slope_us,
        device=device,
    )
    trees = None
    # A price that was fitted with the table's hazards is not the fixed point of the trees'.
    priced = throughput.hazard == TREES
    if use_trees and priced and (found := calibration.trees) is not None:
        if found.feature_names != FEATURES:
            raise UsageError(
                f"trees read {', '.join(found.feature_names)}; the kernel computes "
                f"{', '.join(FEATURES)}: calibrate again, or set hazards to table"
            )
        trees = pack_trees(
            baseline=found.baseline,
            root_T=found.root_T,
            feature_K=found.feature_K,
            threshold_K=found.threshold_K,
            left_K=found.left_K,
            value_K=found.value_K,
            depth=found.depth,
            device=device,
        )
    correction = "off" if routing is None else correction
    return DevicePolicy(
        tables=tables,
        trees=trees,
        batch_sizes=tuple(int(size) for size in throughput.batch_sizes),
        tokens_per_us=tuple(float(lam) for lam in throughput.tokens_per_us),
        fixed_length=max(1, int(throughput.best_fixed_length[0])),
        correction=correction,
        lookahead=0 if correction == "off" else lookahead,
        note="",
    )


def report(policy: DevicePolicy) -> None:
    """Log what chooses the lengths, and the warnings."""
    for warning in policy.warnings:
        logger.warning("HYBRIDSPEC: %s", warning)
    logger.info("HYBRIDSPEC: %s", policy.note)


def _has_trees(bundle: Bundle) -> bool:
    return bundle.calibration is not None and bundle.calibration.trees is not None


def _require_parts(bundle: Bundle) -> None:
    if bundle.calibration is None or bundle.cost is None or bundle.cost.throughput is None:
        raise BundleError(
            f"{bundle.folder} lacks its calibration part, its cost part or their throughput; a "
            "policy needs all three: run `hybridspec calibrate` and `hybridspec profile-latency`"
        )


def _compare(
    bundle: Bundle,
    current: tuple[CalibrationIdentity, CostIdentity],
    allow: Sequence[str],
) -> list[str]:
    from hybridspec.artifacts.identity import check_identity

    assert bundle.calibration is not None
    assert bundle.cost is not None
    return [
        *check_identity(bundle.calibration.identity, current[0], allow=allow),
        *check_identity(bundle.cost.identity, current[1], allow=allow),
    ]


def _with_warning(policy: DevicePolicy, warning: str) -> DevicePolicy:
    return replace(policy, warnings=(warning,))
