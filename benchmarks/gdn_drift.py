"""Drift of recurrent states over rounds of verify and commit, beside plain fp32 decoding.

    python benchmarks/gdn_drift.py [--rounds 200] [--limit 200]

Chains of `tests/gdn_chains.py` at the full shape: random lengths and acceptance, float64 beside
them with the same rows, and the accepted rows one after the other in plain fp32, as decoding
without drafts runs them. Errors are relative, the worst head's, medians of each quarter of rounds.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from results_file import gpu, machine, write_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

FORMS: dict[str, Any] = importlib.import_module("gdn_cases").FORMS
Chain: Any = importlib.import_module("gdn_chains").Chain

SHAPE = {"key_heads": 16, "value_heads": 32, "dim": 128, "batch": 2}
REGIMES = ("nodecay", "repeat", "normal", None)
SEED = 2


def quarters(errors: list[float]) -> list[float]:
    """Median of each quarter."""
    parts = torch.tensor(errors, dtype=torch.float64).chunk(4)
    return [float(f"{float(part.median()):.3e}") for part in parts]


def measure(form: str, regime: str | None, rounds: int) -> dict[str, Any]:
    """One chain."""
    chain = Chain(
        torch.device("cuda"), FORMS[form], regime=regime, seed=SEED, beside_plain=True, **SHAPE
    )
    for _ in range(rounds):
        chain.round()
    return {
        "form": form,
        "regime": regime or "all in turn",
        "rounds": rounds,
        "state_error_quarters": quarters(chain.state_errors),
        "output_error_quarters": quarters(chain.output_errors),
        "plain_fp32_state_error_quarters": quarters(chain.plain_errors),
        "largest_state_error": max(chain.state_errors),
    }


def main() -> None:
    """Run all chains that the time allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--limit", type=float, default=200.0, metavar="S")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device: drift on a GPU is that of its tensor cores")
    where = {**machine(), **gpu()}
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    left_out = 0
    for regime in REGIMES:
        for form in FORMS:
            if time.monotonic() - began > options.limit:
                left_out += 1
                continue
            rows.append(measure(form, regime, options.rounds))
            print(f"[{time.monotonic() - began:6.1f} s]", rows[-1], flush=True)
    pairs = [
        ours / plain
        for row in rows
        for ours, plain in zip(
            row["state_error_quarters"], row["plain_fp32_state_error_quarters"], strict=True
        )
    ]
    summary = {
        "largest_state_error": max(row["largest_state_error"] for row in rows),
        "largest_quarter_over_plain_fp32": max(pairs),
        "left_out": left_out,
    }
    print(summary)
    write_results(
        "gdn_drift", rows=rows, summary=summary, seed=SEED, where=where,
        packages=("torch", "triton"), out=options.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
