"""The small kernels of a round in small ragged shapes, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python benchmarks/control_sanitizer.py FAMILY
compute-sanitizer --tool racecheck python benchmarks/control_sanitizer.py FAMILY

FAMILY: features, accept, select, route_mask, hazard_trees, small_moe, conv_window.
"""

from __future__ import annotations

# Arguments are spread from lists whose lengths a checker cannot see.
# pyright: reportCallIssue=false
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "kernels")]
DEVICE = torch.device("cuda")


def features() -> bool:
    """Two chunks a row, the second ragged, twice with one workspace; parts and their merge."""
    from hybridspec.kernels.draft_features.features import draft_features, row_parts
    from hybridspec.kernels.draft_features.shards import merge_shards
    from hybridspec.kernels.draft_features.split import Workspace

    logits = torch.randn(30, 9000, device=DEVICE).bfloat16()
    workspace = Workspace.create(30, 9000, torch.bfloat16, DEVICE)
    draft_features(logits, workspace=workspace)
    found = draft_features(logits, workspace=workspace)
    halves = [row_parts(half.contiguous()) for half in logits.split(4500, dim=1)]
    merge_shards(torch.stack(halves))
    return bool(found.entropy_R.isfinite().all())


def accept() -> bool:
    """Greedy and sampled, lengths from 0 to 16."""
    from hybridspec.kernels.accept.greedy import accept_greedy
    from hybridspec.kernels.accept.sampled import accept_sampled

    drafts = torch.randint(500, (4, 15), device=DEVICE)
    lengths = torch.tensor([0, 1, 7, 16], dtype=torch.int32, device=DEVICE)
    tokens = torch.cat([drafts, drafts[:, :1]], 1)
    tokens[:, 4] = 3
    accept_greedy(drafts, lengths, tokens)
    p = torch.randn(4, 16, 500, device=DEVICE).softmax(-1)
    coins = torch.rand(4, 16, device=DEVICE, dtype=torch.float64)
    accept_sampled(drafts, lengths, p, coins)
    return True


def select() -> bool:
    """Select alone and jointly, then correct, on tables of three batch sizes."""
    import select_kit as kit  # pyright: ignore[reportMissingImports]

    from hybridspec.kernels.select.correct import correct
    from hybridspec.kernels.select.joint import select_jointly
    from hybridspec.kernels.select.select import select as choose

    g, count = np.random.default_rng(0), 5
    tables = kit.random_tables(g, 1, DEVICE, knots=16, batches=3, contexts=5)
    signals = kit.random_signals(g, count, DEVICE)
    caps = kit.ints([16, 0, 5, 1, 16], DEVICE)
    inputs: list[Any] = [*signals, kit.ints([9, 90, 900, 0, 64], DEVICE), caps]
    inputs.append(kit.ints([3], DEVICE))
    select_jointly(*inputs, tables)
    chosen = choose(*inputs, tables)
    experts = kit.ints(g.integers(-1, 66, (count, 16, 4)), DEVICE)
    correct(experts, chosen, caps, tables, num_experts=64)
    return bool(chosen.expected_BL.isfinite().all())


def route_mask() -> bool:
    """Both ways, rows with a stride."""
    from hybridspec.kernels.route_mask.route_mask import route_mask as mask

    lengths = torch.tensor([3, 0, 16], dtype=torch.int32, device=DEVICE)
    for mode in ("alias", "drop"):
        ids = torch.randint(0, 256, (48, 10), device=DEVICE, dtype=torch.int32)[:, :8]
        mask(ids, torch.rand(48, 12, device=DEVICE)[:, :8], lengths, mode=mode)
    return True


def hazard_trees() -> bool:
    """Six rounds of five requests over eight slots."""
    import hazard_trees_kit as kit  # pyright: ignore[reportMissingImports]

    from hybridspec.kernels.hazard_trees.state import HistoryState
    from hybridspec.kernels.hazard_trees.trees import Hazards
    from hybridspec.kernels.hazard_trees.trees import hazard_trees as trees

    g = np.random.default_rng(1)
    table = kit.packed(kit.random_trees(1, trees=16, depth=4), DEVICE)
    state, out = HistoryState.allocate(8, DEVICE, entries=64), Hazards.allocate(5, DEVICE)
    for turn in range(6):
        trees(*kit.random_round(g, 5, 8, first=turn == 0).on(DEVICE), state, table, out=out)
    return bool(out.hazards_BD.isfinite().all())


def small_moe() -> bool:
    """Eight experts, rows from 1 to 16, one dropped route."""
    from hybridspec.kernels.small_moe.moe import allocate_scratch
    from hybridspec.kernels.small_moe.moe import small_moe as moe

    gate_up = torch.randn(8, 256, 256, device=DEVICE).bfloat16()
    down = torch.randn(8, 256, 128, device=DEVICE).bfloat16()
    scratch = allocate_scratch(16, 2, 128, DEVICE)
    for rows in (1, 5, 16):
        x = torch.randn(rows, 256, device=DEVICE).bfloat16()
        weights, ids = torch.rand(rows, 8, device=DEVICE).topk(2)
        out = torch.empty_like(x)
        moe(x, gate_up, down, ids.int(), weights, scratch, out=out)
    return bool(out.isfinite().all())


def conv_window() -> bool:
    """Prepare, verify and commit of three ragged requests, one of them padding."""
    from conv_window_kit import Gated  # pyright: ignore[reportMissingImports]

    from hybridspec.kernels.conv_window.prepare import prepare
    from hybridspec.kernels.conv_window.verify import verify

    case = Gated(DEVICE, 3, 16, 2, 4, 128)
    lengths = case.indices([16, 0, 5])
    raw = case.poisoned()
    prepare(
        *case.arguments(lengths), num_key_heads=2, head_dim=128, bias_C=case.bias_C,
        out=case.outputs(), raw_out=raw,
    )  # fmt: skip
    mixed = verify(*case.ungated(lengths), bias_C=case.bias_C, out=case.poisoned())
    return bool(mixed.isfinite().all())


FAMILIES: dict[str, Callable[[], bool]] = {
    f.__name__: f
    for f in (features, accept, select, route_mask, hazard_trees, small_moe, conv_window)
}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in FAMILIES:
        print(f"error: name one family of {', '.join(FAMILIES)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("error: no CUDA device; run this on a GPU, under compute-sanitizer", file=sys.stderr)
        return 4
    torch.manual_seed(0)
    right = FAMILIES[sys.argv[1]]()
    torch.cuda.synchronize()
    print(sys.argv[1], "done", right)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
