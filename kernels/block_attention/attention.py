"""Attention of a decoding round's blocks over an engine's cache, split over the context."""

# Launch options and jit functions are outside what pyright can follow.
# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from hybridspec.errors import UsageError
from hybridspec.kernels.block_attention.combine import combine_kernel
from hybridspec.kernels.block_attention.pieces import pieces_kernel
from hybridspec.kernels.compilation import CompileCase

HEAD_DIMS = (64, 128, 256)
MAX_SPLITS = 64
MIN_SPLITS = 4
# Pieces of a context times requests of a batch: bounds the scratch, and a larger batch fills a GPU
# with fewer pieces each.
SPLITS_OF_A_BATCH = 256
# Programs of the first launch: about four for every multiprocessor of a large GPU, because short
# lengths leave most tiles idle. Those with nothing to do end at once, each still costs its start.
PROGRAMS = 512
MIN_DOT_ROWS = 16


@dataclass(frozen=True)
class Tiling:
    """Geometry of the two launches.

    Attributes:
        query_rows: rows x heads of a tile, a power of two.
        block_keys: keys of a step, a power of two.
        warps, stages: of the first launch.
        chunk: pieces that the second launch reads at a time, a power of two.
        combine_warps: of the second launch; one warp sums a chunk without a barrier.
    """

    query_rows: int = 64
    block_keys: int = 64
    warps: int = 4
    stages: int = 2
    chunk: int = 16
    combine_warps: int = 1


def default_tiling(dim: int, capability: tuple[int, int]) -> Tiling:
    """Geometry that ships for a head dimension and a compute capability."""
    if capability < (9, 0):
        return Tiling(query_rows=32, block_keys=32, stages=2 if dim > 128 else 3)
    # 64 rows of 256 spill, whatever the warps and steps. Tiles past the length cost next to
    # nothing, so that short lengths of a target gain too.
    return Tiling(query_rows=32 if dim > 128 else 64)


@cache
def _tiling_on(dim: int, device: torch.device) -> Tiling:
    capability = (9, 0) if device.type != "cuda" else torch.cuda.get_device_capability(device)
    return default_tiling(dim, capability)


def num_splits(batch: int) -> int:
    """Most pieces of a context in a batch of so many requests, a power of two."""
    rounded_up = 1 << (batch - 1).bit_length()
    return max(MIN_SPLITS, min(MAX_SPLITS, SPLITS_OF_A_BATCH // rounded_up))


@dataclass(frozen=True)
class Scratch:
    """Pieces between the two launches, for one attention at a time.

    Attributes:
        sums, peaks: fp32, one of each row, head and piece.
        parts: fp32, D of each row, head and piece.
        batch: most requests.
        rows_and_heads: rows x heads of a request.
        dim: D.
    """

    sums: torch.Tensor
    peaks: torch.Tensor
    parts: torch.Tensor
    batch: int
    rows_and_heads: int
    dim: int

    @classmethod
    def allocate(
        cls, batch: int, rows: int, heads: int, dim: int, device: torch.device | str
    ) -> Scratch:
        """For any batch up to `batch`."""
        pieces = rows * heads * _most_pieces(batch)
        # Everything that is read has been written in the same round.
        small = torch.empty(2, pieces, device=device)
        parts = torch.empty(pieces * dim, device=device)
        return cls(small[0], small[1], parts, batch, rows * heads, dim)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.sums.nbytes + self.peaks.nbytes + self.parts.nbytes


def _most_pieces(batch: int) -> int:
    """Most pieces of all requests of one batch, over all sizes up to `batch`."""
    return max(size * num_splits(size) for size in range(1, batch + 1))


def attend(
    q_RHD: torch.Tensor,
    keys_SGD: torch.Tensor,
    values_SGD: torch.Tensor,
    table_XP: torch.Tensor,
    requests_B: torch.Tensor,
    starts_B: torch.Tensor,
    scratch: Scratch,
    out_RHD: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    lengths_B: torch.Tensor | None = None,
    tiling: Tiling | None = None,
    dependent_launch: bool = False,
) -> None:
    """Write the attention of every row of every block. Two launches, nothing read on the host.

    Args:
        q_RHD: bf16 or fp32 queries [B x rows, heads, D], any row stride.
        keys_SGD, values_SGD: pools of that dtype [slots, kv heads, D], any slot stride, which hold
            the block's own keys and values at the slots of positions start .. start + rows - 1.
        table_XP: int32 slots of the positions of every request of the engine.
        requests_B: int32 or int64, row of `table_XP` of each request.
        starts_B: int32 or int64, tokens before the block.
        scratch: for as many requests, rows, heads and D.
        out_RHD: [B x rows, heads, D], any row stride; zeros in rows at or past the length.
        scale: of the scores.
        causal: row t sees positions up to start + t; else every row sees all rows of the block,
            those past the length too.
        lengths_B: int, rows of each request that count; None: all of them. With `causal` keys and
            values of rows past the length are not read.
        tiling: geometry; by default what ships for this GPU.
        dependent_launch: programmatic dependent launch (sm_90 and later). Starts, requests and
            lengths must have been written before the kernel ahead began.

    Raises:
        UsageError: shapes or layouts that do not fit together.
    """
    batch = starts_B.shape[0]
    total_rows, heads, dim = q_RHD.shape
    kv_heads = keys_SGD.shape[1]
    _check(q_RHD, keys_SGD, values_SGD, table_XP, requests_B, batch, scratch, out_RHD)
    rows = total_rows // batch
    tiling = tiling or _tiling_on(dim, q_RHD.device)
    grouped = heads // kv_heads * rows
    block_m = min(tiling.query_rows, max(MIN_DOT_ROWS, triton.next_power_of_2(grouped)))
    tiles = triton.cdiv(grouped, block_m)
    splits = num_splits(batch)
    spread = max(1, PROGRAMS // (kv_heads * tiles * batch))
    lengths_or_starts = starts_B if lengths_B is None else lengths_B
    launch: dict[str, Any] = {"DEPENDENT": dependent_launch}
    if dependent_launch:
        launch["launch_pdl"] = True
    pieces_kernel[(kv_heads * tiles, batch, min(splits, spread))](
        q_RHD,
        keys_SGD,
        values_SGD,
        table_XP,
        requests_B,
        starts_B,
        lengths_or_starts,
        scratch.sums,
        scratch.peaks,
        scratch.parts,
        scale * math.log2(math.e),
        q_RHD.stride(0),
        keys_SGD.stride(0),
        values_SGD.stride(0),
        table_XP.stride(0),
        ROWS=rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_keys,
        TILES=tiles,
        SPLITS=splits,
        CAUSAL=causal,
        MASKED=lengths_B is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch,
    )
    combine_kernel[(heads, total_rows)](
        scratch.sums,
        scratch.peaks,
        scratch.parts,
        starts_B,
        lengths_or_starts,
        out_RHD,
        out_RHD.stride(0),
        ROWS=rows,
        HEADS=heads,
        D=dim,
        BLOCK_N=tiling.block_keys,
        SPLITS=splits,
        CHUNK=min(tiling.chunk, splits),
        CAUSAL=causal,
        MASKED=lengths_B is not None,
        num_warps=tiling.combine_warps,
        **launch,
    )


def _check(
    q_RHD: torch.Tensor,
    keys_SGD: torch.Tensor,
    values_SGD: torch.Tensor,
    table_XP: torch.Tensor,
    requests_B: torch.Tensor,
    batch: int,
    scratch: Scratch,
    out_RHD: torch.Tensor,
) -> None:
    total_rows, heads, dim = q_RHD.shape
    if dim not in HEAD_DIMS or heads % keys_SGD.shape[1]:
        raise UsageError(
            f"{heads} heads of {dim} over {keys_SGD.shape[1]} key-value heads; heads must be a "
            f"multiple of them and D one of {HEAD_DIMS}"
        )
    if keys_SGD.shape[1:] != values_SGD.shape[1:] or keys_SGD.shape[2] != dim:
        raise UsageError(
            f"pools of {tuple(keys_SGD.shape)} and {tuple(values_SGD.shape)} for queries of {dim}; "
            "both must be [slots, kv heads, D]"
        )
    if q_RHD.dtype != keys_SGD.dtype or q_RHD.dtype != values_SGD.dtype:
        raise UsageError(
            f"queries are {q_RHD.dtype}, pools {keys_SGD.dtype} and {values_SGD.dtype}; "
            "give all of them one dtype"
        )
    for name, tensor in (("q", q_RHD), ("k", keys_SGD), ("v", values_SGD), ("out", out_RHD)):
        if tensor.stride(2) != 1 or tensor.stride(1) != dim:
            raise UsageError(
                f"{name} has strides {tensor.stride()}; heads must follow one another: [.., H, D] "
                "contiguous in the last two"
            )
    if batch < 1 or total_rows % batch or requests_B.shape[0] != batch:
        raise UsageError(
            f"{total_rows} rows, {batch} starts and {requests_B.shape[0]} requests; give each "
            "request as many rows"
        )
    if table_XP.dtype != torch.int32 or table_XP.stride(1) != 1:
        raise UsageError(
            f"the table of slots is {table_XP.dtype} with strides {table_XP.stride()}; it must be "
            "int32 and contiguous along positions"
        )
    held = (scratch.rows_and_heads, scratch.dim)
    if scratch.batch < batch or held != (total_rows // batch * heads, dim):
        raise UsageError(
            f"scratch for {scratch.batch} requests of {held}; this pass has {batch} of "
            f"{(total_rows // batch * heads, dim)}: allocate it for the largest batch"
        )


_POINTERS = {
    "p_q": "*bf16",
    "p_keys": "*bf16",
    "p_values": "*bf16",
    "p_table": "*i32",
    "p_requests": "*i64",
    "p_starts": "*i64",
    "p_lengths": "*i32",
    "p_sums": "*fp32",
    "p_peaks": "*fp32",
    "p_parts": "*fp32",
    "scale": "fp32",
}


def compile_cases() -> list[CompileCase]:
    """A target's and a drafter's shape, one request and a batch, before Hopper and from there."""
    found = []
    for architecture in (80, 90):
        for name, heads, kv_heads, dim, causal in (
            ("target", 16, 2, 256, True),
            ("drafter", 32, 4, 128, False),
            ("drafter_64", 16, 4, 64, False),
        ):
            tiling = default_tiling(dim, (architecture // 10, architecture % 10))
            for splits in (64, 16):
                case = f"{name}_s{splits}_sm{architecture}"
                found += _cases(case, heads, kv_heads, dim, causal, splits, tiling, architecture)
    return found


def _cases(
    name: str,
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool,
    splits: int,
    tiling: Tiling,
    architecture: int,
) -> Sequence[CompileCase]:
    rows, dependent = 16, architecture >= 90
    common = {
        "ROWS": rows,
        "HEADS": heads,
        "D": dim,
        "BLOCK_N": tiling.block_keys,
        "SPLITS": splits,
        "CAUSAL": causal,
        "MASKED": causal,
        "DEPENDENT": dependent,
    }
    pieces = {
        **common,
        "KV_HEADS": kv_heads,
        "BLOCK_M": tiling.query_rows,
        "TILES": triton.cdiv(heads // kv_heads * rows, tiling.query_rows),
    }
    combine = {**common, "CHUNK": min(tiling.chunk, splits)}
    strides = {f"stride_{x}": "i32" for x in ("q", "key", "value", "table")}
    kept = ("p_sums", "p_peaks", "p_parts", "p_starts", "p_lengths")
    return [
        CompileCase(
            name=f"pieces_{name}",
            kernel=pieces_kernel,
            signature={**_POINTERS, **strides, **dict.fromkeys(pieces, "constexpr")},
            constexprs=pieces,
            divisible_by_16=frozenset(strides),
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            dependent_launch=dependent,
            architectures=(architecture,),
        ),
        CompileCase(
            name=f"combine_{name}",
            kernel=combine_kernel,
            signature={
                **{key: _POINTERS[key] for key in kept},
                "p_out": "*bf16",
                "stride_out": "i32",
                **dict.fromkeys(combine, "constexpr"),
            },
            constexprs=combine,
            divisible_by_16=frozenset(("stride_out",)),
            num_warps=tiling.combine_warps,
            dependent_launch=dependent,
            architectures=(architecture,),
        ),
    ]
