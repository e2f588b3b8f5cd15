"""Small-batch mixture-of-experts layer in two launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.small_moe.down import down
from hybridspec.kernels.small_moe.gate_up import gate_up
from hybridspec.kernels.small_moe.tiles import MAX_ROWS, Tiles, padded_rows, tiles_for


@dataclass(frozen=True)
class Scratch:
    """What the first launch hands to the second; one serves all layers of a stream.

    Attributes:
        hidden_TKI: [most rows, top_k, width] bf16.
        experts: int32 [padded slots of most rows + 1].
    """

    hidden_TKI: torch.Tensor
    experts: torch.Tensor


def allocate_scratch(most_rows: int, top_k: int, width: int, device: torch.device | str) -> Scratch:
    """Scratch for calls of at most `most_rows` rows."""
    return Scratch(
        torch.empty(most_rows, top_k, width, dtype=torch.bfloat16, device=device),
        torch.empty(_padded_slots(most_rows, top_k) + 1, dtype=torch.int32, device=device),
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
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """`out[t] = sum_k weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))`.

    e is ids[t, k]. Two launches, no atomics: equal inputs give equal bits. Products accumulate in
    fp32; the weighted hidden values and the output are rounded to bf16. Only weights of experts
    that some row names are read. A slot whose id is outside 0..E-1 reads and adds nothing; one
    whose weight is 0 adds exactly 0, even where its row holds NaN. Reads nothing on the host; safe
    to capture.

    Args:
        x_TH: bf16 [1..16 rows, hidden], contiguous like all arguments.
        gate_up_EFH: bf16 [experts, 2 * width, hidden]; rows 0..width-1 are the gate, then up.
        down_EHI: bf16 [experts, hidden, width].
        ids_TK: int32 [rows, top_k]. An expert twice in a row counts with both weights.
        weights_TK: fp32 [rows, top_k], already renormalised.
        scratch: from `allocate_scratch`, not shared between streams.
        out: bf16 [rows, hidden], not `x_TH`; allocated if None.
        tiles: default: the measured ones for this row count and device.

    Raises:
        UsageError: for shapes, dtypes or strides other than these.
    """
    if out is None:
        out = torch.empty_like(x_TH)
    if tiles is None:
        tiles = tiles_for(x_TH.shape[0], _architecture(x_TH.device))
    _check(x_TH, gate_up_EFH, down_EHI, ids_TK, weights_TK, out, scratch, tiles)
    num_rows, top_k = ids_TK.shape
    hidden_TKI = scratch.hidden_TKI[:num_rows]
    experts = scratch.experts[: _padded_slots(num_rows, top_k) + 1]
    gate_up(x_TH, gate_up_EFH, ids_TK, weights_TK, hidden_TKI, experts, tiles)
    down(hidden_TKI, down_EHI, ids_TK, experts, out, tiles)
    return out


def _padded_slots(num_rows: int, top_k: int) -> int:
    return 1 << (padded_rows(num_rows) * top_k - 1).bit_length()


@lru_cache(maxsize=8)
def _architecture(device: torch.device) -> int:
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _check(
    x_TH: torch.Tensor,
    gate_up_EFH: torch.Tensor,
    down_EHI: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    out_TH: torch.Tensor,
    scratch: Scratch,
    tiles: Tiles,
) -> None:
    if ids_TK.dim() != 2 or down_EHI.dim() != 3:
        raise UsageError("ids must be [rows, top_k] and down [experts, hidden, width]")
    num_rows, top_k = ids_TK.shape
    num_experts, hidden, width = down_EHI.shape
    if not 1 <= num_rows <= MAX_ROWS:
        raise UsageError(f"{num_rows} rows: the small-batch MoE takes 1..{MAX_ROWS}")
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
    divisors = {
        "width": (width, (tiles.gate_up_n, 16 * tiles.down_parts)),
        "hidden": (hidden, (tiles.gate_up_k, tiles.down_n)),
    }
    for name, (size, parts) in divisors.items():
        for part in parts:
            if size % part:
                raise UsageError(f"{name} {size} is not a multiple of {part}")
