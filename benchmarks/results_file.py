"""Result files of benchmarks: what was run, where, with what, and the numbers as they stand."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
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
    """Commit of the working tree, marked where it is not clean."""
    root = Path(__file__).parent.parent
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() or "unknown"


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
    content = {
        "script": Path(sys.argv[0]).name,
        "command": "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit(),
        "machine": dict(where),
        "versions": {
            "python": platform.python_version(),
            "hybridspec": version("hybridspec"),
            **{package: version(package) for package in packages},
        },
        "seed": seed,
        "rows": list(rows),
        "summary": dict(summary),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
