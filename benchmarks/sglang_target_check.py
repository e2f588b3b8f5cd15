"""The target half of the plugin inside SGLang's own classes: correct first, fast second.

No engine and no weights: pools, attention backend and expert blocks of the installed SGLang are
made as an engine makes them, once with its snapshots and once with our half installed. Verification
and commit are compared with SGLang's verification, scatter and plain decoding over ragged rounds,
eager and in CUDA graphs; masked passes must leave every row that counts bit-identical.

    python benchmarks/sglang_target_check.py [--quick] [--limit SECONDS] [--only STAGE ...]
        [--out FILE]

Timing of experts is of SGLang's default tile sizes unless SGLANG_MOE_CONFIG_DIR names tuned ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent))

# What `--quick` runs: under a minute with compiles.
QUICK = ("gdn_rounds_dependent", "gdn_graphs_1_4", "experts_mask", "experts_graph", "model")
TINY = {"hidden": 128, "width": 64, "experts": 16, "top_k": 4}


def time_us(work: Callable[[], Any], repeats: int = 30) -> float:
    """Median of device times."""
    import torch

    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def stages_of(device_type: str) -> dict[str, Any]:
    """Stages that run on this device; without a GPU, tiny sizes in Triton's interpreter."""
    import torch
    from sglang_target import experts, gdn, model
    from sglang_target.engine import Shape

    device = torch.device(device_type)
    if device_type == "cpu":
        return {
            "experts_mask": lambda report: experts.mask(report, device, TINY),
            "experts_correction": lambda report: experts.correction(report, device, TINY),
            "model": lambda report: model.rows(
                report,
                device,
                Shape(layers=4, key_heads=1, value_heads=2, dim=64, requests=2),
                experts=16,
                hidden=128,
                width=64,
                requests=1,
            ),
        }
    shape, full = Shape(layers=8), Shape()
    return {
        "gdn_rounds_plain": lambda r: gdn.rounds(r, shape, device, dependent=False),
        "gdn_rounds_dependent": lambda r: gdn.rounds(r, shape, device, dependent=None),
        "gdn_graphs_1_4": lambda r: gdn.graphs(r, shape, device, (1, 4)),
        "gdn_graphs_2_8": lambda r: gdn.graphs(r, shape, device, (2, 8)),
        "model": lambda r: model.rows(r, device, Shape(layers=4)),
        "gdn_decode": lambda r: gdn.decode(r, shape, device),
        "experts_mask": lambda r: experts.mask(r, device),
        "experts_graph": lambda r: experts.in_graph(r, device),
        "experts_correction": lambda r: experts.correction(r, device),
        "experts_small": lambda r: experts.small(r, device),
        "gdn_half_heads": lambda r: gdn.rounds(
            r, Shape(layers=4, key_heads=8, value_heads=16), device, dependent=None
        ),
        "gdn_timing": lambda r: gdn.timing(r, full, device, time_us),
        "experts_timing": lambda r: experts.timing(r, device, time_us),
        "memory": lambda r: gdn.memory(r, full, device),
    }


def main() -> int:
    """Run the stages; 0 where all passed, 4 without what is needed, 5 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds, no stage after it")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--only", nargs="*", default=[], help="stages, default all")
    parser.add_argument("--out", type=Path, help="JSON of what was found, kept after every stage")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes in Triton's interpreter")
    options = parser.parse_args()
    import torch

    if not (torch.cuda.is_available() or options.cpu):
        print("no CUDA device; run it on a GPU, or with --cpu and TRITON_INTERPRET=1")
        return 4
    try:
        import sglang  # pyright: ignore
    except ImportError as error:
        print(f"sglang cannot be imported ({error}); install sglang==0.5.16")
        return 4
    print(f"sglang {sglang.__version__}, torch {torch.__version__}", flush=True)
    from sglang_target.stages import Report

    stages = stages_of("cpu" if options.cpu else "cuda")
    wanted = options.only or (QUICK if options.quick else tuple(stages))
    unknown = [name for name in wanted if name not in stages]
    if unknown:
        print(f"no stage {', '.join(unknown)}; there are {', '.join(stages)}")
        return 2
    chosen = {name: stages[name] for name in wanted}
    with torch.inference_mode():
        return 0 if Report(options.out, options.limit).run(chosen) else 5


if __name__ == "__main__":
    raise SystemExit(main())
