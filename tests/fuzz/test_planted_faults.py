"""Each planted fault is found, shrunk to a few operations, and its file fails again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fault_kit import FAULTS, Fault

from hybridspec.fuzz.history_file import Setting, read_finding
from hybridspec.fuzz.play import play
from hybridspec.fuzz.reference_adapter import ReferenceAdapter
from hybridspec.fuzz.run import SHRINK_SECONDS, Report, fuzz

# Until a fault is found and its history is small; from any seed its history may take longer.
MOST_SECONDS, PATIENT_SHRINK_SECONDS = 120.0, 240.0
SETTING = Setting("reference", "float64", "target", "drafter", 3, 560)


@pytest.fixture(scope="module")
def adapter(random_folders: tuple[Path, Path]) -> ReferenceAdapter:
    return ReferenceAdapter(*random_folders)


def hunt(
    adapter: ReferenceAdapter,
    folder: Path,
    *,
    seed: int,
    rounds: int = 2000,
    shrink_seconds: float = SHRINK_SECONDS,
) -> Report:
    report = Report()
    fuzz(
        adapter,
        SETTING,
        report,
        seed=seed,
        rounds=rounds,
        seconds=MOST_SECONDS,
        folder=folder,
        shrink_seconds=shrink_seconds,
    )
    return report


def check(
    adapter: ReferenceAdapter,
    fault: Fault,
    folder: Path,
    seed: int,
    shrink_seconds: float = SHRINK_SECONDS,
) -> None:
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        report = hunt(adapter, folder, seed=seed, shrink_seconds=shrink_seconds)
        most = max(shrink_seconds - SHRINK_SECONDS, 0.0) + MOST_SECONDS
        assert time.monotonic() - began < most
        assert report.seconds < MOST_SECONDS
        assert report.finding is not None
        assert report.path is not None
        assert report.finding.violation.kind in fault.kinds
        assert report.finding.minimal
        assert len(report.finding.history) <= fault.operations
        finding = read_finding(report.path)
        assert finding == report.finding
        assert play(adapter, finding.history) == finding.violation
    assert play(adapter, finding.history) is None, "the fault is gone, so must be the violation"


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if not fault.long], ids=lambda fault: fault.name
)
def test_planted_fault_is_found(adapter: ReferenceAdapter, fault: Fault, tmp_path: Path) -> None:
    check(adapter, fault, tmp_path, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_found_from_any_seed(
    adapter: ReferenceAdapter, fault: Fault, seed: int, tmp_path: Path
) -> None:
    check(adapter, fault, tmp_path, seed, PATIENT_SHRINK_SECONDS)


def test_engine_as_it_is_passes(adapter: ReferenceAdapter, tmp_path: Path) -> None:
    report = hunt(adapter, tmp_path, seed=0, rounds=150)
    assert report.finding is None
    assert not list(tmp_path.iterdir())
    counts = report.tally.counts
    for name in (
        "request_rounds_without_drafts",
        "request_rounds_cut_at_first_router",
        "joins_behind_earlier_text",
        "leaves",
        "aborts",
        "crossings_of_64",
        "crossings_of_256",
    ):
        assert counts[name] > 0, name
    parts = {"kv_keys", "kv_values", "conv_window", "recurrent_state", "logits"}
    assert set(report.tally.worst) == parts
