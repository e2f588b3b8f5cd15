"""Time and memory of a replay as the trace grows: recorded rounds over and over, as new prompts.

Each size is read, replayed under all default policies and bootstrapped in a process of its own, so
that its peak memory is its own. Raw top-1 hazards: fitting is bounded and not what grows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from replay_lab import CURVE, TRACE
from results_file import machine, write_results

from hybridspec.costmodels.catalog import DEFAULT_POLICIES
from hybridspec.costmodels.prediction import load_price, predict
from hybridspec.costmodels.trace_stream import open_trace


def main() -> None:
    """Measure and write `results/replay_scale.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE, help="recorded rounds to repeat")
    parser.add_argument("--copies", default="2,16,64,793", help="how often, for each size")
    parser.add_argument("--out", type=Path, default=None, help="folder of the result file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(measure(arguments.child)))
        return
    where = machine()
    rows = []
    for copies in (int(part) for part in arguments.copies.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.parquet"
            repeat(arguments.trace, path, copies)
            done = subprocess.run(
                [sys.executable, __file__, "--child", str(path)],
                check=True,
                capture_output=True,
                text=True,
            )
            rows.append(json.loads(done.stdout) | {"file_mib": round(path.stat().st_size / 2**20)})
            print(rows[-1], flush=True)
    first, middle, last = rows[0], rows[-2], rows[-1]
    # Both of the larger sizes fill the bounded set of rounds that policies are fitted on.
    beyond = last["rounds"] - middle["rounds"]
    mib_each = (last["peak_mib"] - middle["peak_mib"]) / beyond
    second_each = (last["replay_s"] - middle["replay_s"]) / beyond
    summary = {
        "policies": len(DEFAULT_POLICIES),
        "seconds_smallest": first["replay_s"],
        "rounds_smallest": first["rounds"],
        "seconds_largest": last["replay_s"],
        "rounds_largest": last["rounds"],
        "peak_mib_largest": last["peak_mib"],
        "microseconds_a_round_beyond_fit": round(second_each * 1e6, 1),
        "bytes_a_round_beyond_fit": round(mib_each * 2**20, 1),
        # 1 where time grows as rounds do.
        "seconds_over_linear_largest": round(
            last["replay_s"] / middle["replay_s"] * middle["rounds"] / last["rounds"], 3
        ),
    }
    path = write_results(
        "replay_scale",
        rows=rows,
        summary=summary,
        seed=0,
        where=where,
        packages=("numpy", "pyarrow"),
        out=arguments.out,
    )
    print(f"{path.name}: {summary}")


def repeat(source: Path, path: Path, copies: int) -> None:
    """Write the rounds of `source` `copies` times, each time as other prompts."""
    table = pq.read_table(source).sort_by([("seq", "ascending"), ("round", "ascending")])
    place = table.schema.get_field_index("seq")
    step = int(pc.call_function("max", [table["seq"]]).as_py()) + 1
    with pq.ParquetWriter(path, table.schema) as writer:
        for copy in range(copies):
            numbers = pc.call_function("add", [table["seq"], pa.scalar(copy * step, pa.int32())])
            writer.write_table(table.set_column(place, table.schema.field(place), numbers))


def measure(path: Path) -> dict[str, Any]:
    """Replay a trace: seconds and peak memory of this process."""
    stream = open_trace(path)
    price = load_price(CURVE)
    start = time.monotonic()
    predict(stream, [price], DEFAULT_POLICIES, hazards="raw", split="all")
    seconds = time.monotonic() - start
    # Not ru_maxrss: across exec it remembers the parent.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak_kib = int(status.split("VmHWM:")[1].split()[0])
    return {
        "rounds": stream.num_rounds,
        "policies": len(DEFAULT_POLICIES),
        "replay_s": round(seconds, 2),
        "peak_mib": round(peak_kib / 1024, 1),
    }


if __name__ == "__main__":
    main()
