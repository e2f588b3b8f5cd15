"""What holds bit by bit and what holds statistically on this machine, reference engine on CPU.

Joint law: texts of three tokens under the point-mass rule for every combination of temperature,
nucleus and length rule of `tests/losslessness`, compared with the target's own law; the same test
with drafts accepted 2 percentage points too often. Prefixes: blocks of 16 rows whose later tokens
are changed, or which are cut to fewer rows, on the embedded pair.

    OMP_NUM_THREADS=1 python benchmarks/losslessness_cpu.py
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from results_file import machine, write_results

from hybridspec.artifacts.tables import BLOCK_SIZE

TESTS = Path(__file__).parent.parent / "tests"
BLOCKS = 40
KEEPS = (1, 2, 5, 9, 15)


def main() -> None:
    """Sample, compare, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000, help="texts of each combination")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = machine()
    sys.path[:0] = [str(TESTS / "losslessness"), str(TESTS / "reference")]
    laws = joint_laws(arguments.samples)
    prefixes = [prefix_row(dtype) for dtype in (torch.float32, torch.float64)]
    real = [row for row in laws if not row["planted"]]
    planted = [row for row in laws if row["planted"]]
    summary = {
        "law_combinations": len(real),
        "law_samples_each": arguments.samples,
        "law_smallest_p_value": min(row["p_value"] for row in real),
        "law_beyond_total_variation_limit": sum(
            row["total_variation"] > row["total_variation_limit"] for row in real
        ),
        "law_least_power_against_planted_bias": min(row["power"] for row in planted),
        "law_planted_bias": planted[0]["bias"],
        "law_planted_combinations": len(planted),
        "law_planted_largest_p_value": max(row["p_value"] for row in planted),
        "law_planted_caught": sum(row["p_value"] < row["level"] for row in planted),
    }
    for row in prefixes:
        summary |= {
            f"prefix_{row['dtype']}_{k}": v for k, v in row.items() if k not in ("what", "dtype")
        }
    path = write_results(
        "losslessness_cpu",
        rows=[*laws, *prefixes],
        summary=summary,
        seed=0,
        where=where,
        packages=("torch", "numpy", "scipy"),
        out=arguments.out,
    )
    print(f"{path.name}: {summary}")


def joint_laws(samples: int) -> list[dict[str, Any]]:
    """One row a combination, and one a planted bias."""
    kit: Any = importlib.import_module("law_kit")
    cases: Any = importlib.import_module("test_joint_law")
    rows = []
    for params in cases.PARAMS:
        conditional = kit.shaped(params)
        expected, other = kit.law(conditional), kit.law(kit.biased(conditional, cases.BIAS))
        shared = {
            "what": "joint law of three tokens",
            "temperature": params.temperature,
            "top_p": params.top_p,
            "texts_possible": int((expected > 0).sum()),
            "samples": samples,
            "level": cases.LEVEL,
        }
        tries: list[tuple[str, Any, dict[str, Any]]] = [
            (name, length, {}) for name, length in cases.LENGTHS.items()
        ]
        biased = {"accept": kit.accept_too_often(cases.BIAS)}
        tries.append(("fixed 16", kit.fixed(BLOCK_SIZE), biased))
        for name, length, options in tries:
            began = time.monotonic()
            fit = kit.fit_to(kit.sample_counts(params, length, samples, **options), expected)
            row = shared | {
                "lengths": name,
                "planted": bool(options),
                "p_value": fit.p_value,
                "total_variation": fit.total_variation,
                "total_variation_limit": fit.limit,
                "seconds": round(time.monotonic() - began, 1),
            }
            if options:
                row["bias"] = cases.BIAS
                row["power"] = kit.power(expected, other, samples, level=cases.LEVEL)
            print(row, flush=True)
            rows.append(row)
    return rows


def prefix_row(dtype: torch.dtype) -> dict[str, Any]:
    """How many prefixes keep every bit of their logits, and the largest difference otherwise."""
    kit: Any = importlib.import_module("test_causal_prefix")
    runner = kit.Runner(dtype)
    counts = dict.fromkeys(("blocks", "first_router_same_bits", "given_routes_same_bits"), 0)
    counts |= {"own_routes_same_bits": 0, "other_length_same_bits": 0}
    worst_tokens = worst_length = 0.0
    for seed in range(BLOCKS):
        tokens, others = (runner.tokens(BLOCK_SIZE, seed=s) for s in (seed, 10_000 + seed))
        for keep in KEEPS:
            changed = [*tokens[:keep], *others[keep:]]
            full, other, short = (runner.run(t) for t in (tokens, changed, tokens[:keep]))
            runner.force_routes(seed)
            given, given_other = runner.run(tokens), runner.run(changed)
            runner.free_routes()
            same = torch.equal(full.residual[:keep], other.residual[:keep])
            counts["blocks"] += 1
            counts["first_router_same_bits"] += same
            counts["given_routes_same_bits"] += torch.equal(
                given.logits[:keep], given_other.logits[:keep]
            )
            counts["own_routes_same_bits"] += torch.equal(full.logits[:keep], other.logits[:keep])
            counts["other_length_same_bits"] += torch.equal(full.logits[:keep], short.logits)
            worst_tokens = max(worst_tokens, _apart(full.logits[:keep], other.logits[:keep]))
            worst_length = max(worst_length, _apart(full.logits[:keep], short.logits))
    return {
        "what": "prefix of a block",
        "dtype": str(dtype).removeprefix("torch."),
        **counts,
        "other_tokens_largest_difference_logits": worst_tokens,
        "other_length_largest_difference_logits": worst_length,
    }


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


if __name__ == "__main__":
    main()
