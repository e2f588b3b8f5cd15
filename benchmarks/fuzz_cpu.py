"""The rollback fuzzer on the reference engine: as it is, and with each known fault planted.

Plays random histories on the embedded pair in float64 and compares with plain decoding after every
operation; then plants the faults of `tests/fuzz/fault_kit.py` one by one and measures how long each
takes to be found and to be shrunk.

    OMP_NUM_THREADS=1 python benchmarks/fuzz_cpu.py
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from results_file import machine, write_results

from hybridspec.artifacts.digest import model_digest
from hybridspec.demo.assets import require
from hybridspec.fuzz.history_file import Setting
from hybridspec.fuzz.reference_adapter import ReferenceAdapter
from hybridspec.fuzz.run import Report, fuzz

MOST_SECONDS_A_FAULT = 120.0


def main() -> None:
    """Fuzz, plant, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2500, help="of the engine as it is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = machine()
    target, drafter, _ = require()
    adapter = ReferenceAdapter(target, drafter)
    facts = adapter.facts
    setting = Setting(
        facts.name,
        facts.dtype,
        model_digest(target),
        model_digest(drafter),
        facts.max_requests,
        facts.max_context,
    )
    report = run(adapter, setting, seed=arguments.seed, rounds=arguments.rounds, seconds=None)
    clean = {
        "engine": facts.name,
        "dtype": facts.dtype,
        "max_requests": facts.max_requests,
        "max_context_tokens": facts.max_context,
        "prefix_cache": facts.prefix_cache,
        "rounds": report.rounds,
        "histories": report.histories,
        "seconds": round(report.seconds, 1),
        "violations": int(report.finding is not None),
        **{name: count for name, count in sorted(report.tally.counts.items()) if name != "rounds"},
        **{f"largest_difference_{part}": worst for part, worst in report.tally.worst.items()},
    }
    print(clean, flush=True)
    rows: list[dict[str, Any]] = [{"planted": None, **clean}]
    rows += [plant(adapter, setting, fault, arguments.seed) for fault in known_faults()]
    planted = rows[1:]
    found = [row for row in planted if row["found"]]
    summary = {
        "rounds": clean["rounds"],
        "seconds": clean["seconds"],
        "violations": clean["violations"],
        "tokens": clean["tokens"],
        "largest_difference": max(report.tally.worst.values()),
        "tolerance": max(facts.tolerance.values()),
        "planted_faults": len(planted),
        "planted_faults_found": len(found),
        "slowest_found_s": max(row["found_s"] for row in found),
        "slowest_found_and_shrunk_s": max(row["found_and_shrunk_s"] for row in found),
        "most_operations": max(row["operations"] for row in found),
    }
    path = write_results(
        "fuzz_cpu",
        rows=rows,
        summary=summary,
        seed=arguments.seed,
        where=where,
        packages=("torch",),
        out=arguments.out,
    )
    print(f"{path.name}: {summary}")


def run(
    adapter: ReferenceAdapter, setting: Setting, *, seed: int, rounds: int, seconds: float | None
) -> Report:
    """One run of the fuzzer; what it finds is in the report."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        fuzz(
            adapter,
            setting,
            report,
            seed=seed,
            rounds=rounds,
            seconds=seconds,
            folder=Path(folder),
        )
    return report


def known_faults() -> tuple[Any, ...]:
    """The faults that the tests plant too."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "fuzz"))
    return importlib.import_module("fault_kit").FAULTS


def plant(adapter: ReferenceAdapter, setting: Setting, fault: Any, seed: int) -> dict[str, Any]:
    """Plant one fault and measure the hunt."""
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        report = run(adapter, setting, seed=seed, rounds=1_000_000, seconds=MOST_SECONDS_A_FAULT)
    finding = report.finding
    row = {
        "planted": fault.name,
        "found": finding is not None,
        "found_s": round(report.seconds, 2),
        "found_and_shrunk_s": round(time.monotonic() - began, 2),
        "rounds": report.rounds,
        "kind": None if finding is None else finding.violation.kind,
        "operations": None if finding is None else len(finding.history),
        "minimal": None if finding is None else finding.minimal,
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
