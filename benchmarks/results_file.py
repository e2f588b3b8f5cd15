"""Result files of benchmarks: what was run, where, with what, and the numbers as they stand."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, usable cores and memory of this machine."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "load_average_1min_at_start": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Commit of the working tree, marked where it is not clean.

    `HYBRIDSPEC_COMMIT` comes first: it says what was sent to a machine that has no history, or an
    older one.
    """
    sent = os.environ.get("HYBRIDSPEC_COMMIT")
    if sent:
        return sent
    root = Path(__file__).parent.parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def gpu() -> dict[str, Any]:
    """The CUDA device that measurements ran on, with the driver and its multiprocessors."""
    import torch

    device = torch.cuda.get_device_properties(0)
    return {
        "gpu": device.name,
        "gpu_memory_gib": round(device.total_memory / 2**30, 1),
        "multiprocessors": device.multi_processor_count,
        "l2_mib": round(device.L2_cache_size / 2**20, 1),
        "cuda": str(torch.version.cuda),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python, this project (installed or not) and `packages`."""
    from hybridspec import __version__

    found = {"python": platform.python_version(), "hybridspec": __version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_results(
    name: str,
    *,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    seed: int,
    where: Mapping[str, Any],
    packages: Sequence[str] = ("torch", "numpy"),
    out: Path | None = None,
) -> Path:
    """Write `NAME.json` and return its path.

    Args:
        rows: one object a measurement, units in key names.
        summary: the keys that people look for, plain numbers.
        where: `machine()` as it was when the run began.
    """
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    # Where the file went is this machine's business.
    arguments = ["DIR" if out and argument == str(out) else argument for argument in sys.argv[1:]]
    content = {
        "script": Path(sys.argv[0]).name,
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "commit": commit(),
        "machine": dict(where),
        "versions": versions(packages),
        "seed": seed,
        "rows": list(rows),
        "summary": dict(summary),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
