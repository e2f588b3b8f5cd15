"""Everything about a bundle folder that can be checked without a model: see `verify_folder`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridspec.artifacts.bundle import Bundle, load_bundle
from hybridspec.artifacts.manifest import PART_NAMES
from hybridspec.artifacts.tables import StepCostTable
from hybridspec.errors import BundleError, QualityGate

FALLING_COST = "falling-cost"
SMALL_FALL = 0.01


@dataclass(frozen=True)
class Verified:
    """A bundle that passed.

    Attributes:
        bundle: as loaded.
        checks: what was checked, a phrase each.
        warnings: what a user should know and may accept.
    """

    bundle: Bundle
    checks: tuple[str, ...]
    warnings: tuple[str, ...]


def verify_folder(folder: Path, *, allow: Collection[str] = ()) -> Verified:
    """Checks manifest, paths, digests, schemas, values and the shape of the costs.

    Args:
        folder: of the bundle.
        allow: `falling-cost` lowers that refusal to a warning.

    Raises:
        BundleError: whatever is missing, damaged, of another version, impossible or a link.
        QualityGate: costs that fall beyond their spread when rows are added.
    """
    bundle = load_bundle(folder)
    warnings = list(bundle.warnings) + _check_files(folder, bundle)
    checks = [
        f"manifest {bundle.manifest.schema_version}, content ids",
        f"{len(bundle.manifest.entries())} files: digests, schemas, values, no links",
    ]
    if bundle.cost is not None:
        warnings += check_costs(bundle.cost.step, allow=allow)
        checks.append("costs do not fall when rows are added")
    for part, command in (("calibration", "calibrate"), ("cost", "profile-latency")):
        if getattr(bundle, part) is None:
            warnings.append(
                f"there is no {part} part; a policy needs both: run `hybridspec {command} "
                f"--out {folder}` for this pair"
            )
    return Verified(bundle, tuple(checks), tuple(warnings))


def _check_files(folder: Path, bundle: Bundle) -> list[str]:
    """Refuses links anywhere inside; warns of files that the manifest does not name."""
    named = {entry.path for entry in bundle.manifest.entries()}
    strangers = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise BundleError(
                f"{path} is a link; a bundle holds plain files and folders: replace it by what it "
                "points to, or remove it"
            )
        if inside.split("/")[0] in PART_NAMES and path.is_file() and inside not in named:
            strangers.append(inside)
    if strangers:
        return [
            f"{len(strangers)} files are not in the manifest and unused, such as {strangers[0]}"
        ]
    return []


def check_costs(step: StepCostTable, *, allow: Collection[str] = ()) -> list[str]:
    """Finds costs that fall when rows are added.

    Returns:
        warnings: falls of over 1 % inside the spread, and plain decoding slower than a drafted
        round of one row.

    Raises:
        QualityGate: the p90 of a length lies below the p10 of the one before, so that noise does
            not explain the fall; unless `falling-cost` is allowed.
    """
    warnings = []
    for i, batch in enumerate(step.batch_sizes.tolist()):
        for j, context in enumerate(step.context_tokens.tolist()):
            where = f"batch {batch}, context {context}"
            middle, low, high = (
                values[i, j]
                for values in (step.latency_us, step.latency_p10_us, step.latency_p90_us)
            )
            beyond = np.flatnonzero(high[2:] < low[1:-1]) + 2
            falls = np.flatnonzero(middle[2:] < (1.0 - SMALL_FALL) * middle[1:-1]) + 2
            if beyond.size:
                at = int(beyond[0])
                message = (
                    f"{where}: length {at} costs {middle[at]:.0f} us, less than length {at - 1} "
                    f"({middle[at - 1]:.0f} us) by more than the spread of both"
                )
                if FALLING_COST not in allow:
                    raise QualityGate(
                        f"{message}; costs must not fall when rows are added: measure again on a "
                        f"quiet machine, or pass --allow {FALLING_COST} if a faster kernel tier "
                        "begins there"
                    )
                warnings.append(message)
            elif falls.size:
                at = int(falls[0])
                warnings.append(
                    f"{where}: length {at} is {1 - middle[at] / middle[at - 1]:.1%} faster than "
                    f"length {at - 1}, inside the spread"
                )
            if middle[0] > middle[1]:
                warnings.append(f"{where}: plain decoding is slower than a drafted round of 1 row")
    return warnings
