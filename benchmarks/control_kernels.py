"""The small kernels of a round beside the model: draft features, select, correct, mask, accept.

Each part checks its kernels against their naive twins first and times them second, inside CUDA
graphs. The bars: features at most 1.25 times one read of the logits, select and correct together
at most 8 us, greedy acceptance at most 5 us.

    python benchmarks/control_kernels.py [--quick] [--out DIR] [--seed N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

import control_accept
import control_features
import control_select
from results_file import gpu, machine, write_results

Measure = Callable[..., tuple[list[dict[str, Any]], dict[str, Any]]]

PARTS: dict[str, Measure] = {
    "features": control_features.measure,
    "select": control_select.measure,
    "accept": control_accept.measure,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats and variants")
    parser.add_argument("--out", type=Path, help="folder of control_kernels.json")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device; these are GPU kernels: run this on a GPU", file=sys.stderr)
        return 4
    where = {**machine(), **gpu()}
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for name, measure in PARTS.items():
        began = time.perf_counter()
        generator = torch.Generator(device).manual_seed(options.seed)
        found, keys = measure(device, quick=options.quick, generator=generator)
        rows += [{"part": name, **row} for row in found]
        summary |= keys
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    path = write_results(
        "control_kernels",
        rows=rows,
        summary=summary,
        seed=options.seed,
        where=where,
        packages=("torch", "triton", "numpy"),
        out=options.out,
    )
    for key, value in summary.items():
        print(f"{key}: {value:.3g}" if isinstance(value, float) else f"{key}: {value}")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
