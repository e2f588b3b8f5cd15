"""Small-batch mixture-of-experts layer: two launches up to 16 rows, three beyond."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.small_moe.down import down
from hybridspec.kernels.small_moe.gate_up import gate_up
from hybridspec.kernels.small_moe.grouped_down import grouped_down
from hybridspec.kernels.small_moe.grouped_gate_up import grouped_gate_up
from hybridspec.kernels.small_moe.grouping import (
    MOST_EXPERTS,
    MOST_PAIRS,
    Groups,
    allocate_groups,
    group_pairs,
)
from hybridspec.kernels.small_moe.tiles import (
    MAX_ROWS,
    NARROW_ROWS,
    GroupedTiles,
    Tiles,
    grouped_tiles_for,
    padded_rows,
    tiles_for,
)


@dataclass(frozen=True)
class GroupedScratch:
    """What calls of more than `NARROW_ROWS` rows need besides `Scratch`.

    Attributes:
        groups: pairs by expert.
        partial_NH: fp32 [most rows * top_k, hidden]: what each pair adds to its row.
    """

    groups: Groups
    partial_NH: torch.Tensor


@dataclass(frozen=True)
class Scratch:
    """What one launch hands to the next; one serves all layers of a stream.

    Attributes:
        hidden_TKI: [most rows, top_k, width] bf16.
        experts: int32 [padded slots of most rows + 1].
        grouped: None where most rows are at most `NARROW_ROWS`.
    """

    hidden_TKI: torch.Tensor
    experts: torch.Tensor
    grouped: GroupedScratch | None = None


def allocate_scratch(
    most_rows: int,
    top_k: int,
    width: int,
    device: torch.device | str,
    *,
    hidden: int | None = None,
) -> Scratch:
    """Scratch for calls of at most `most_rows` rows.

    Args:
        hidden: needed where `most_rows` is beyond `NARROW_ROWS`.

    Raises:
        UsageError: more than `MAX_ROWS` rows, or `hidden` missing where it is needed.
    """
    if not 1 <= most_rows <= MAX_ROWS:
        raise UsageError(f"{most_rows} rows: the small-batch MoE takes 1..{MAX_ROWS}")
    grouped = None
    if most_rows > NARROW_ROWS:
        if hidden is None:
            raise UsageError(
                f"scratch for {most_rows} rows without a hidden size: pass hidden beyond "
                f"{NARROW_ROWS} rows"
            )
        pairs = most_rows * top_k
        partial_NH = torch.empty(pairs, hidden, dtype=torch.float32, device=device)
        grouped = GroupedScratch(allocate_groups(pairs, device), partial_NH)
    slots = _padded_slots(min(most_rows, NARROW_ROWS), top_k)
    return Scratch(
        torch.empty(most_rows, top_k, width, dtype=torch.bfloat16, device=device),
        torch.empty(slots + 1, dtype=torch.int32, device=device),
        grouped,
    )


def small_moe(
    x_TH: torch.Tensor,
    gate_up_EFH: torch.Tensor,
    down_EHI: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    scratch: Scratch,
    *,
    out: torch.Tensor | None = None,
    tiles: Tiles | GroupedTiles | None = None,
) -> torch.Tensor:
    """`out[t] = sum_k weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))`.

    e is ids[t, k]. No atomics: equal inputs give equal bits. Products accumulate in fp32; the
    weighted hidden values and the output are rounded to bf16. Only weights of experts that some row
    names are read. A slot whose id is outside 0..E-1 reads and adds nothing; one whose weight is 0
    adds exactly 0, even where its row holds NaN. Reads nothing on the host; safe to capture.

    Two launches up to 16 rows, three beyond. There a slot of weight 0 reads nothing either, and a
    row's bits depend on nothing but the row: neither on other rows nor on how many there are.

    Args:
        x_TH: bf16 [1..128 rows, hidden], contiguous like all arguments.
        gate_up_EFH: bf16 [experts, 2 * width, hidden]; rows 0..width-1 are the gate, then up.
        down_EHI: bf16 [experts, hidden, width].
        ids_TK: int32 [rows, top_k]. An expert twice in a row counts with both weights.
        weights_TK: fp32 [rows, top_k], already renormalised.
        scratch: from `allocate_scratch`, not shared between streams.
        out: bf16 [rows, hidden], not `x_TH`; allocated if None.
        tiles: default: those for this row count and device; `GroupedTiles` beyond 16 rows.

    Raises:
        UsageError: for shapes, dtypes or strides other than these.
    """
    if out is None:
        out = torch.empty_like(x_TH)
    if tiles is None:
        tiles = _default_tiles(x_TH.shape[0], x_TH.device)
    _check(x_TH, gate_up_EFH, down_EHI, ids_TK, weights_TK, out, scratch, tiles)
    num_rows, top_k = ids_TK.shape
    if isinstance(tiles, GroupedTiles):
        grouped = scratch.grouped
        assert grouped is not None
        hidden_NI = scratch.hidden_TKI.view(-1, down_EHI.shape[2])[: num_rows * top_k]
        programs = tiles.gate_up_programs * _multiprocessors(x_TH.device)
        group_pairs(ids_TK, weights_TK, grouped.groups, len(down_EHI), tiles)
        grouped_gate_up(x_TH, gate_up_EFH, weights_TK, grouped.groups, hidden_NI, tiles, programs)
        grouped_down(hidden_NI, down_EHI, grouped.groups, grouped.partial_NH, out, top_k, tiles)
        return out
    hidden_TKI = scratch.hidden_TKI[:num_rows]
    experts = scratch.experts[: _padded_slots(num_rows, top_k) + 1]
    gate_up(x_TH, gate_up_EFH, ids_TK, weights_TK, hidden_TKI, experts, tiles)
    down(hidden_TKI, down_EHI, ids_TK, experts, out, tiles)
    return out


def _default_tiles(num_rows: int, device: torch.device) -> Tiles | GroupedTiles:
    if num_rows <= NARROW_ROWS:
        return tiles_for(num_rows, _architecture(device))
    return grouped_tiles_for(_architecture(device))


def _padded_slots(num_rows: int, top_k: int) -> int:
    return 1 << (padded_rows(num_rows) * top_k - 1).bit_length()


@lru_cache(maxsize=8)
def _architecture(device: torch.device) -> int:
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(
    x_TH: torch.Tensor,
    gate_up_EFH: torch.Tensor,
    down_EHI: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    out_TH: torch.Tensor,
    scratch: Scratch,
    tiles: Tiles | GroupedTiles,
) -> None:
    if ids_TK.dim() != 2 or down_EHI.dim() != 3:
        raise UsageError("ids must be [rows, top_k] and down [experts, hidden, width]")
    num_rows, top_k = ids_TK.shape
    num_experts, hidden, width = down_EHI.shape
    if not 1 <= num_rows <= MAX_ROWS:
        raise UsageError(f"{num_rows} rows: the small-batch MoE takes 1..{MAX_ROWS}")
    if isinstance(tiles, GroupedTiles) != (num_rows > NARROW_ROWS):
        raise UsageError(
            f"{type(tiles).__name__} for {num_rows} rows: pass GroupedTiles beyond {NARROW_ROWS}, "
            "Tiles up to there"
        )
    expected = {
        "x": (x_TH, (num_rows, hidden), torch.bfloat16),
        "gate_up": (gate_up_EFH, (num_experts, 2 * width, hidden), torch.bfloat16),
        "down": (down_EHI, (num_experts, hidden, width), torch.bfloat16),
        "ids": (ids_TK, (num_rows, top_k), torch.int32),
        "weights": (weights_TK, (num_rows, top_k), torch.float32),
        "out": (out_TH, (num_rows, hidden), torch.bfloat16),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise UsageError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}: "
                f"pass contiguous {dtype} {shape}"
            )
    if out_TH.data_ptr() == x_TH.data_ptr():
        raise UsageError("out is x: the second launch would overwrite what the first still reads")
    if scratch.hidden_TKI.shape[0] < num_rows or scratch.hidden_TKI.shape[1:] != (top_k, width):
        raise UsageError(
            f"scratch holds {tuple(scratch.hidden_TKI.shape)}: allocate it for "
            f"[{num_rows}, {top_k}, {width}] or more rows"
        )
    if num_rows > NARROW_ROWS and (num_rows * top_k > MOST_PAIRS or num_experts > MOST_EXPERTS):
        raise UsageError(
            f"{num_rows} rows of {top_k} experts among {num_experts}: at most {MOST_PAIRS} pairs "
            f"and {MOST_EXPERTS} experts; split the rows"
        )
    partial_NH = None if scratch.grouped is None else scratch.grouped.partial_NH
    if num_rows > NARROW_ROWS and (partial_NH is None or partial_NH.shape[1] != hidden):
        raise UsageError(
            f"scratch for {num_rows} rows lacks sums of hidden size {hidden}: allocate it with "
            f"hidden={hidden} and as many rows"
        )
    divisors = {
        "width": (width, (tiles.gate_up_n, 16 * tiles.down_parts)),
        "hidden": (hidden, (tiles.gate_up_k, tiles.down_n)),
    }
    for name, (size, parts) in divisors.items():
        for part in parts:
            if size % part:
                raise UsageError(f"{name} {size} is not a multiple of {part}")
