"""What `hybridspec bundle verify` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridspec.artifacts.bundle import Bundle
from hybridspec.artifacts.identity import check_field_names, check_identity
from hybridspec.artifacts.verify import FALLING_COST, verify_folder
from hybridspec.cli._options import DtypeName
from hybridspec.cli._output import Output
from hybridspec.errors import UsageError


@dataclass(frozen=True)
class Request:
    """The command line of `hybridspec bundle verify`."""

    bundle: Path
    here: bool
    target: Path | None
    drafter: Path | None
    dtype: DtypeName
    device: str
    threads: int | None
    allow: tuple[str, ...]


def verify(request: Request, output: Output) -> None:
    """Check a bundle, and whether it fits here if that is asked for."""
    check_field_names(request.allow, also=(FALLING_COST,))
    if request.drafter is not None and request.target is None:
        raise UsageError("--drafter is given without --target: add --target DIR")
    if not request.here:
        _refuse_without_here(request)
    verified = verify_folder(request.bundle, allow=request.allow)
    checks, warnings = list(verified.checks), list(verified.warnings)
    if request.here:
        warnings += _check_here(verified.bundle, request)
        bundle = verified.bundle
        # What is not there was compared with nothing.
        fits = ["this machine and engine"] if bundle.cost is not None else []
        fits += ["this pair"] if bundle.calibration is not None else []
        checks.append(f"fits {' and '.join(fits)}")
    for warning in warnings:
        output.warn(warning)
    count = f", with {len(warnings)} warning(s)" if warnings else ""
    output.result(
        "\n".join([f"{request.bundle}: good{count}", *(f"  {check}" for check in checks)]),
        {
            "content_id": verified.bundle.content_id,
            "checks": checks,
            "warnings": warnings,
            "here": request.here,
        },
    )


def _refuse_without_here(request: Request) -> None:
    given = {
        "--threads": request.threads is not None,
        "--device": request.device != "auto",
        "--dtype": request.dtype != "auto",
    }
    if surplus := [name for name, is_given in given.items() if is_given]:
        raise UsageError(
            f"{surplus[0]} says what the bundle is compared with here, and without --here nothing "
            f"is: add --here, or leave {surplus[0]} out"
        )


def _check_here(bundle: Bundle, request: Request) -> list[str]:
    from hybridspec.pair import calibration_identity, cost_identity, pair_folders, place

    threads = request.threads
    if threads is None and bundle.cost is not None:
        # Costs hold for the thread count they were measured with, and serve takes it from there.
        threads = bundle.cost.identity.threads
    folders = pair_folders(request.target, request.drafter)
    placement = place(device=request.device, dtype=request.dtype, threads=threads)
    warnings: list[str] = []
    if bundle.calibration is not None:
        saved = bundle.calibration.identity
        current = calibration_identity(
            folders,
            dtype=placement.dtype,
            temperature=saved.temperature,
            top_p=saved.top_p,
            prompts_digest=None,
        )
        warnings += check_identity(saved, current, allow=request.allow)
    if bundle.cost is not None:
        measured = bundle.cost.identity
        machine = cost_identity(folders, placement, max_batch=measured.max_batch)
        warnings += check_identity(measured, machine, allow=request.allow)
    return warnings
