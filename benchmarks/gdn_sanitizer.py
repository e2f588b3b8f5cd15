"""Every GDN kernel once or twice in small ragged shapes, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python benchmarks/gdn_sanitizer.py
compute-sanitizer --tool racecheck python benchmarks/gdn_sanitizer.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from gdn_kit import make_inputs, poisoned_factors  # pyright: ignore[reportMissingImports]

from hybridspec.kernels.gdn.block import verify_block
from hybridspec.kernels.gdn.commit import ConvWindows, commit
from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.gdn.pending import Pending, advance, flush
from hybridspec.kernels.gdn.sequential import verify_sequential

SIZES = (2, 4, 128, 128)


def run(rows: int, dependent: bool) -> bool:
    """All forms on three requests, one of them padding; whether every state is finite."""
    device, batch = torch.device("cuda"), 3
    key_heads, value_heads, key_dim, value_dim = SIZES
    generator = torch.Generator().manual_seed(rows)
    inputs = make_inputs(generator, batch, rows, *SIZES, device=device)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([rows, 3, rows - 2], dtype=torch.int32, device=device)
    accepted = lengths - 1
    state = torch.randn(1, 4, value_heads, value_dim, key_dim, device=device)
    out = torch.empty(batch, rows, value_heads, value_dim, dtype=torch.bfloat16, device=device)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    windows = ConvWindows(
        torch.randn(1, 4, channels, 3, device=device).bfloat16(),
        torch.randn(1, batch, rows, channels, device=device).bfloat16(),
    )

    def call(factors: Factors) -> list[Any]:
        return [*inputs.tensors(), state[0], slots, lengths, factors, 0, out]

    for value_block, warps in ((16, 1), (32, 2)):
        tuning: dict[str, Any] = {
            "value_block": value_block,
            "warps": warps,
            "dependent_launch": dependent,
        }
        factors = poisoned_factors(1, batch, *SIZES, device)
        verify_block(*call(factors), key_heads=key_heads, **tuning)
        commit(state, slots, accepted, factors, windows=windows, dependent_launch=dependent)
        factors = poisoned_factors(1, 2 * batch, *SIZES, device)
        pending = Pending.allocate(batch, device=device)
        for _ in range(2):
            verify_block(*call(factors), key_heads=key_heads, pending=pending, **tuning)
            advance(pending, slots, accepted)
        flush(state, slots, factors, pending)
    factors = poisoned_factors(1, batch, *SIZES, device)
    verify_sequential(*call(factors), key_heads=key_heads, dependent_launch=dependent)
    torch.cuda.synchronize()
    return bool(torch.isfinite(state).all())


def main() -> int:
    if not torch.cuda.is_available():
        print("error: no CUDA device; run this on a GPU, under compute-sanitizer", file=sys.stderr)
        return 4
    finite = all([run(rows, dependent) for rows in (5, 16) for dependent in (False, True)])
    print("done", finite)
    return 0 if finite else 1


if __name__ == "__main__":
    sys.exit(main())
