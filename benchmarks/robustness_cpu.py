"""The server under 10,000 mixed requests with 3 in 10 torn out, and bundles under killed writers.

Uses the helpers of `tests/robustness`. The memory of the server's process is read after every
1,000 requests.

    OMP_NUM_THREADS=1 python benchmarks/robustness_cpu.py
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from results_file import machine, write_results

STEP = 1000


def main() -> None:
    """Load, kill, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    where = machine()
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "robustness"))
    rows, counts = mixed_load(arguments.requests, arguments.seed)
    kills = importlib.import_module("test_kill_and_restart")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills.kills(Path(folder) / "bundle", arguments.kills, arguments.seed)
    rows.append({"what": "killed writers", "kills": arguments.kills, "half_bundles": 0,
                 "seconds": round(time.monotonic() - began, 1)})  # fmt: skip
    memory = [row["memory_mib"] for row in rows if row["what"] == "mixed load"]
    later = memory[len(memory) // 5 :]
    summary = {
        "requests": sum(counts.values()),
        "aborted": counts["aborted"],
        "greedy_right": counts["greedy 200 right"],
        "unexpected": 0,
        "memory_start_mib": memory[0],
        "memory_after_a_fifth_mib": later[0],
        "memory_most_later_mib": max(later),
        "kills": arguments.kills,
        "half_bundles": 0,
    }
    path = write_results("robustness_cpu", rows=rows, summary=summary, seed=arguments.seed,
                         where=where, out=arguments.out)  # fmt: skip
    print(f"{path.name}: {summary}")


def mixed_load(requests: int, seed: int) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Rows of memory and outcomes; anything unexpected raises."""
    load, kit = (importlib.import_module(name) for name in ("test_mixed_load", "robustness_kit"))
    total: Counter[str] = Counter()
    with kit.serving() as server:
        truth = load.plain_texts(server)
        files = server.open_files()
        rows = [row_of(server, 0, 0.0, {})]
        began = time.monotonic()
        for turn in range(requests // STEP):
            counts = load.load(server, STEP, seed=seed + turn, truth=truth)
            load.check(counts, STEP)
            total.update(counts)
            done = (turn + 1) * STEP
            rows.append(row_of(server, done, time.monotonic() - began, counts))
            print(rows[-1], flush=True)
        load.check_idle(server, files)
    return rows, total


def row_of(server: Any, requests: int, seconds: float, counts: Any) -> dict[str, Any]:
    return {
        "what": "mixed load",
        "requests": requests,
        "seconds": round(seconds, 1),
        "memory_mib": round(server.memory_mib(), 1),
        "open_files": server.open_files(),
        "threads": server.threads(),
        "outcomes": dict(sorted(counts.items())),
    }


if __name__ == "__main__":
    main()
