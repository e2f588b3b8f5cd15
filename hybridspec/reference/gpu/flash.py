"""Attention of a few new rows over a long contiguous cache: split over the context, then combined.

Two launches. A program of the first takes a few query rows of all heads that share a key-value head
and one piece of the context; how many pieces there are follows from the context on the device, so
one captured graph serves every context. The second joins the pieces and applies the output gate.
Rows past the length on the device load nothing and come out as zeros: a tile holds neighbouring
rows, so short lengths leave most tiles idle. Where pieces and tiles lie does not depend on how many
rows are verified: a row's bits are its own.
"""

# Launch options and jit functions are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.block_attention.softmax import softmax_step
from hybridspec.kernels.conv_window.taps import narrow
from hybridspec.kernels.dependent import wait_for_inputs
from hybridspec.kernels.interpreter import dot
from hybridspec.reference.gpu.launching import launch_options

BLOCK_KEYS = 64
MAX_QUERY_ROWS = 64
# Of layers whose lengths are on the device: 4 rows of 8 heads, as the graph of 4 rows has, so that
# a short length runs one tile. Every tile reads the keys, the later ones out of the L2 cache.
MASKED_QUERY_ROWS = 32
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _piece(total, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Positions of one piece: whole blocks, as even as they go."""
    return tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_N) * BLOCK_N


@triton.jit
def pieces_kernel(
    p_q,
    p_keys,
    p_values,
    p_starts,
    p_lengths,
    p_sums,
    p_peaks,
    p_parts,
    stride_cache,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (SPLITS, KV_HEADS x TILES, B); a tile holds all heads of a row before the next row's."""
    wait_for_inputs(DEPENDENT)
    i_split = tl.program_id(0)
    i_kv = tl.program_id(1) // TILES
    i_b = tl.program_id(2).to(tl.int64)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    o_m = tl.program_id(1) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < GROUP * ROWS
    row = o_m // GROUP
    if MASKED:
        length = tl.load(p_lengths + i_b)
        if tl.program_id(1) % TILES * BLOCK_M // GROUP >= length:
            return
        m_m = m_m & (row < length)
    o_head = (i_b * ROWS + row) * HEADS + i_kv * GROUP + o_m % GROUP
    o_d = tl.arange(0, D)
    start = tl.load(p_starts + i_b)
    total = start + ROWS
    piece = _piece(total, SPLITS, BLOCK_N)
    first = i_split * piece
    if first >= total:
        return
    last = tl.minimum(first + piece, total)
    b_q = tl.load(p_q + o_head[:, None] * D + o_d[None, :], mask=m_m[:, None], other=0.0)
    p_k = p_keys + i_b * stride_cache + i_kv * D
    p_v = p_values + i_b * stride_cache + i_kv * D
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_n in range(first, last, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        o_cache = o_n.to(tl.int64) * (KV_HEADS * D)
        b_k = tl.load(p_k + o_cache[None, :] + o_d[:, None], mask=m_n[None, :], other=0.0)
        b_v = tl.load(p_v + o_cache[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        score = dot(b_q, b_k, zero) * _LOG2_E
        seen = m_n[None, :] & m_m[:, None]
        if CAUSAL:
            seen = seen & (o_n[None, :] <= start + row[:, None])
        score = tl.where(seen, score, float("-inf"))
        peak, total_weight, acc = softmax_step(score, b_v, peak, total_weight, acc)
    o_part = o_head * SPLITS + i_split
    tl.store(p_peaks + o_part, peak, mask=m_m)
    tl.store(p_sums + o_part, total_weight, mask=m_m)
    tl.store(p_parts + o_part[:, None] * D + o_d[None, :], acc, mask=m_m[:, None])


@triton.jit
def combine_kernel(
    p_sums,
    p_peaks,
    p_parts,
    p_starts,
    p_lengths,
    p_gate,
    p_out,
    stride_gate,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    MASKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (B x ROWS, HEADS): the pieces of one head of one row."""
    wait_for_inputs(DEPENDENT)
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o_d = tl.arange(0, D)
    p_mine = p_out + (i_row * HEADS + i_head) * D + o_d
    # A condition of its own: the length must not be read where there is none.
    if MASKED:  # noqa: SIM102
        if i_row % ROWS >= tl.load(p_lengths + i_row // ROWS):
            tl.store(p_mine, tl.zeros([D], p_out.dtype.element_ty))
            return
    total = tl.load(p_starts + i_row // ROWS) + ROWS
    o_split = tl.arange(0, SPLITS)
    there = o_split * _piece(total, SPLITS, BLOCK_N) < total
    o_part = (i_row * HEADS + i_head) * SPLITS + o_split
    b_peak = tl.load(p_peaks + o_part, mask=there, other=float("-inf"))
    b_sum = tl.load(p_sums + o_part, mask=there, other=0.0)
    b_part = tl.load(p_parts + o_part[:, None] * D + o_d[None, :], mask=there[:, None], other=0.0)
    # Position 0 is in the first piece and every row sees it, so the highest peak is finite.
    b_share = tl.exp2(b_peak - tl.max(b_peak, 0))
    out = tl.sum(b_part * b_share[:, None], 0) / tl.sum(b_sum * b_share, 0)
    if GATED:
        gate = tl.load(p_gate + i_row * stride_gate + i_head * D + o_d).to(tl.float32)
        out = out / (1.0 + tl.exp(-gate))
    tl.store(p_mine, narrow(out, p_out.dtype.element_ty))


@dataclass(frozen=True)
class Pieces:
    """Scratch of one attention at a time.

    Attributes:
        sums, peaks: fp32 [rows x heads, splits]. parts: fp32 [rows x heads, splits, D].
    """

    sums: torch.Tensor
    peaks: torch.Tensor
    parts: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, heads: int, dim: int, splits: int, device: torch.device) -> Pieces:
        """For at most `rows` rows of all requests; `splits` is a power of two."""
        if splits & (splits - 1):
            raise UsageError(f"{splits} splits of the context; use a power of two")
        small = torch.zeros(2, rows * heads, splits, device=device)
        return cls(small[0], small[1], torch.zeros(rows * heads, splits, dim, device=device))


def piece_warps(block_m: int, dim: int) -> int:
    """Warps of a program: sums of 64 rows of 256 spill on four."""
    return 8 if block_m * dim > 8192 else 4


def attend(
    q_RHD: torch.Tensor,
    keys_BCGD: torch.Tensor,
    values_BCGD: torch.Tensor,
    starts_B: torch.Tensor,
    pieces: Pieces,
    out_RX: torch.Tensor,
    *,
    rows: int,
    causal: bool,
    lengths_B: torch.Tensor | None = None,
    query_rows: int | None = None,
    gate_RX: torch.Tensor | None = None,
) -> None:
    """Attention of `rows` new rows a request over its cache. Two launches, nothing on the host.

    Args:
        q_RHD: queries [B x rows, heads, D], rotated, softmax scale included.
        keys_BCGD, values_BCGD: caches that already hold the new rows at start .. start + rows - 1.
        starts_B: int32, tokens before row 0.
        causal: row t sees positions up to start + t; else every row sees all new rows.
        lengths_B: int32, rows of each request that count; None: all of them.
        query_rows: most query rows of a tile, a power of two of at least 16; by default 32 with
            lengths and 64 without. Fewer leave more tiles idle at short lengths; more read a long
            context less often.
        gate_RX: logits of the output gate [B x rows, heads x D], any row stride.
        out_RX: [B x rows, heads x D], written.
    """
    batch = starts_B.shape[0]
    _, heads, dim = q_RHD.shape
    kv_heads, splits = keys_BCGD.shape[2], pieces.sums.shape[1]
    grouped = heads // kv_heads * rows
    if query_rows is None:
        query_rows = MAX_QUERY_ROWS if lengths_B is None else MASKED_QUERY_ROWS
    block_m = min(query_rows, max(16, triton.next_power_of_2(grouped)))
    tiles = triton.cdiv(grouped, block_m)
    pieces_kernel[(splits, kv_heads * tiles, batch)](
        q_RHD,
        keys_BCGD,
        values_BCGD,
        starts_B,
        starts_B if lengths_B is None else lengths_B,
        pieces.sums,
        pieces.peaks,
        pieces.parts,
        keys_BCGD.stride(0),
        ROWS=rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_KEYS,
        TILES=tiles,
        SPLITS=splits,
        CAUSAL=causal,
        MASKED=lengths_B is not None,
        num_warps=piece_warps(block_m, dim),
        num_stages=2,
        **launch_options(q_RHD.device),
    )
    gate = out_RX if gate_RX is None else gate_RX
    combine_kernel[(batch * rows, heads)](
        pieces.sums,
        pieces.peaks,
        pieces.parts,
        starts_B,
        starts_B if lengths_B is None else lengths_B,
        gate,
        out_RX,
        gate.stride(0),
        ROWS=rows,
        HEADS=heads,
        D=dim,
        BLOCK_N=BLOCK_KEYS,
        SPLITS=splits,
        GATED=gate_RX is not None,
        MASKED=lengths_B is not None,
        num_warps=4,
        **launch_options(q_RHD.device),
    )
