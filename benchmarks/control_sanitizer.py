"""The small kernels of a round in small ragged shapes, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python benchmarks/control_sanitizer.py FAMILY
compute-sanitizer --tool racecheck python benchmarks/control_sanitizer.py FAMILY

FAMILY: features, accept, argmax, select, round_control, route_mask, router, hazard_trees,
small_moe, small_moe_grouped, skinny_linear, block_attention, kv_append, conv_window.
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
    """Eight experts, rows from 1 to 16."""
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


def argmax() -> bool:
    """Three ragged blocks of two chunks a row, twice with one scratch."""
    from hybridspec.kernels.accept.argmax import ArgmaxScratch, argmax_of_blocks

    logits = torch.randn(48, 9001, device=DEVICE).bfloat16()
    lengths = torch.tensor([16, 0, 5], dtype=torch.int32, device=DEVICE)
    scratch = ArgmaxScratch.create(3, DEVICE)
    out = torch.full((48,), -7, dtype=torch.int64, device=DEVICE)
    for _ in range(2):
        argmax_of_blocks(logits, lengths, scratch, out=out.fill_(-7))
    largest = logits[:16].max(1, keepdim=True).values
    return torch.equal(logits[:16].gather(1, out[:16, None]), largest)


def round_control() -> bool:
    """Finish, limit, record and recall of five requests in a shuffled order of slots."""
    from hybridspec.kernels.round_control.finish import finish_lengths
    from hybridspec.kernels.round_control.limit import limit_acceptance
    from hybridspec.kernels.round_control.record import LastRounds, recall_rounds, record_round

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    lengths, rows = ints(0, 0, 0, 0, 0), ints(0, 0, 0, 0, 0)
    fallback, verified = ints(0, 1, 0, 2, 0), ints(0, 0, 0, 0, 0)
    finish_lengths(
        ints(4, 16, 1, 9, 3), fallback, ints(16, 9, 16, 0, 5), ints(0, 0, 7, 0, 0),
        lookahead=2, out=(lengths, rows),
    )  # fmt: skip
    candidates = torch.randint(500, (5, 16), device=DEVICE)
    limit_acceptance(candidates, lengths, next_BT=torch.empty_like(candidates))
    slots, last = ints(7, 0, 3, 5, 1), LastRounds.allocate(8, DEVICE)
    counters = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    emitted = torch.randint(500, (5, 16), device=DEVICE)
    record_round(
        lengths, fallback, lengths, counters, verified, emitted_BT=emitted, slots_B=slots, last=last
    )
    found = torch.empty_like(emitted), torch.empty_like(lengths), torch.empty_like(lengths)
    recall_rounds(slots, last, out=found)
    return torch.equal(found[0], emitted) and torch.equal(found[1], lengths)


def router() -> bool:
    """Logits with a stride and a mask, then the gate's partial sums of five rows."""
    from hybridspec.kernels.router.gate import gate
    from hybridspec.kernels.router.router import router as route

    lengths = torch.tensor([3, 0, 16], dtype=torch.int32, device=DEVICE)
    for experts, top_k in ((256, 8), (200, 6)):
        logits = torch.randn(48, experts + 8, device=DEVICE).bfloat16()[:, :experts]
        route(logits, top_k, lengths_B=lengths)
    x = torch.randn(5, 512, device=DEVICE).bfloat16()
    weight = torch.randn(256, 512, device=DEVICE).bfloat16()
    ids, weights = route(gate(x, weight), 8)
    return bool(weights.isfinite().all()) and bool((ids < 256).all())


def skinny_linear() -> bool:
    """One projection and a pair, rows with a stride, with and without splits."""
    from hybridspec.kernels.skinny_linear.linear import Workspace, skinny_linear_pair
    from hybridspec.kernels.skinny_linear.linear import skinny_linear as project
    from hybridspec.kernels.skinny_linear.tiles import Tiles

    x = torch.randn(5, 1024 + 8, device=DEVICE).bfloat16()[:, :1024]
    first, second = (torch.randn(n, 1024, device=DEVICE).bfloat16() for n in (320, 64))
    right = True
    for splits in (1, 4):
        tiles = Tiles(64, 128, 8, splits=splits)
        workspace = Workspace.create(tiles, 5, 384, DEVICE)
        for _ in range(2):
            out = project(x, first, tiles, workspace=workspace)
            beside = skinny_linear_pair(x, first, second, tiles, workspace=workspace)
            right = right and torch.equal(out, beside[0]) and bool(beside[1].isfinite().all())
    return right


def block_attention() -> bool:
    """Ragged contexts in a pool of NaN: a target's causal blocks and a drafter's whole ones."""
    from block_attention_kit import Case  # pyright: ignore[reportMissingImports]

    right = True
    for heads, kv_heads, dim, causal in ((16, 2, 256, True), (32, 4, 128, False)):
        case = Case(DEVICE, [0, 65, 700], heads=heads, kv_heads=kv_heads, dim=dim)
        lengths = case.lengths(16, 0, 5) if causal else None
        right = right and bool(case.run(causal=causal, lengths_B=lengths).isfinite().all())
    return right


def kv_append() -> bool:
    """Three layers, three blocks, slots of rows that are not written out of range."""
    from hybridspec.kernels.kv_append.append import Caches, append

    keys, values = (torch.randn(3, 48, 2, 64, device=DEVICE).bfloat16() for _ in range(2))
    pools = [torch.zeros(90, 2, 64, device=DEVICE).bfloat16() for _ in range(6)]
    rows = torch.tensor([5, 0, 16], dtype=torch.int32, device=DEVICE)
    places = torch.randperm(90, device=DEVICE)[:48].view(3, 16)
    places[0, 5:] = places[1] = 1 << 40
    append(keys, values, Caches.of(pools[:3], pools[3:]), places, rows)
    return torch.equal(pools[0][places[2]], keys[0, 32:])


def small_moe_grouped() -> bool:
    """Eight experts, more rows than the narrow form takes, one dropped route."""
    from hybridspec.kernels.small_moe.moe import allocate_scratch
    from hybridspec.kernels.small_moe.moe import small_moe as moe

    gate_up = torch.randn(8, 256, 256, device=DEVICE).bfloat16()
    down = torch.randn(8, 256, 128, device=DEVICE).bfloat16()
    scratch = allocate_scratch(128, 2, 128, DEVICE, hidden=256)
    for rows in (33, 64, 128):
        x = torch.randn(rows, 256, device=DEVICE).bfloat16()
        weights, ids = torch.rand(rows, 8, device=DEVICE).topk(2)
        ids[rows // 2, 0] = -1
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


# fmt: off
CHECKS = (
    features, accept, argmax, select, round_control, route_mask, router, hazard_trees,
    small_moe, small_moe_grouped, skinny_linear, block_attention, kv_append, conv_window,
)
# fmt: on
FAMILIES: dict[str, Callable[[], bool]] = {check.__name__: check for check in CHECKS}


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
