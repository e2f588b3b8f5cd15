"""Projections of few rows without bias, bound by reading the weights once."""

# Triton's decorators and constexprs are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.interpreter import dot
from hybridspec.kernels.skinny_linear.prefetch import prefetch_share, prefetch_to_l2
from hybridspec.kernels.skinny_linear.table import SM90, SM90_FUSED, Shape
from hybridspec.kernels.skinny_linear.tiles import MAX_ROWS, Tiles, row_tile


@triton.jit(do_not_specialize=["num_rows"])
def skinny_linear_kernel(
    p_x,
    p_weight,
    p_weight2,
    p_out,
    p_out2,
    p_partials,
    p_tickets,
    p_next,
    num_rows,
    stride_x,
    N: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PREFETCH: tl.constexpr,
    NEXT_BYTES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Grid (tiles of `COLUMNS` outputs, splits of the sum). See `skinny_linear_pair` for shapes."""
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    PIECE: tl.constexpr = K // SPLITS // PARTS
    # Cut into PARTS pieces, a weight row is PARTS rows of the left operand, and a row of x as many
    # columns of the right one. Of their product, entries of equal pieces are wanted: a wgmma takes
    # 64 rows, and a tile of 16 outputs has them with 4 pieces.
    o_np = tl.arange(0, BLOCK_N * PARTS)
    o_rp = tl.arange(0, ROWS * PARTS)
    o_k = tl.arange(0, BLOCK_K)
    row = o_rp // PARTS
    column = o_np // PARTS
    o_n = i_tile * COLUMNS + column
    valid = (column < COLUMNS) & (o_n < N + N2)
    o_first = i_split * (K // SPLITS)
    if N2 > 0:
        p_row = tl.where(o_n < N, p_weight + o_n * K, p_weight2 + (o_n - N) * K)
    else:
        p_row = p_weight + o_n * K
    p_row = p_row + (o_first + (o_np % PARTS) * PIECE)
    p_w = p_row[:, None] + o_k[None, :]
    p_xk = p_x + row[None, :] * stride_x + (o_first + (o_rp % PARTS) * PIECE)[None, :]
    p_xk = p_xk + o_k[:, None]
    if DEPENDENT:
        if PREFETCH > 0:
            # Weights are older than every kernel of the pass.
            prefetch_to_l2(p_row, tl.where(valid, PREFETCH * 128, 0))
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N * PARTS, ROWS * PARTS], tl.float32)
    for i_k in tl.range(0, PIECE // BLOCK_K, num_stages=STAGES):
        b_w = tl.load(p_w + i_k * BLOCK_K, mask=valid[:, None], other=0.0)
        b_x = tl.load(p_xk + i_k * BLOCK_K, mask=(row < num_rows)[None, :], other=0.0)
        acc = dot(b_w, b_x, acc)

    if NEXT_BYTES > 0:
        # After this program's last load, so that it takes no bandwidth from any of its own.
        i_program = i_split * tl.num_programs(0) + i_tile
        prefetch_share(p_next, i_program, NEXT_BYTES, PROGRAMS, THREADS)
    if PARTS > 1:
        o_part = tl.arange(0, PARTS)
        same_part = o_part[None, :, None, None] == o_part[None, None, None, :]
        acc = tl.where(same_part, tl.reshape(acc, [BLOCK_N, PARTS, ROWS, PARTS]), 0.0)
        acc = tl.sum(tl.sum(acc, 3), 1)
    o_row = tl.arange(0, ROWS)
    o_column = tl.arange(0, BLOCK_N)
    o_to = i_tile * COLUMNS + o_column
    if N2 > 0:
        p_to = tl.where(
            (o_to < N)[:, None],
            p_out + o_row[None, :] * N + o_to[:, None],
            p_out2 + o_row[None, :] * N2 + (o_to - N)[:, None],
        )
    else:
        p_to = p_out + o_row[None, :] * N + o_to[:, None]
    live = ((o_column < COLUMNS) & (o_to < N + N2))[:, None] & (o_row < num_rows)[None, :]
    if SPLITS == 1:
        tl.store(p_to, acc.to(p_out.dtype.element_ty), mask=live)
    else:
        p_part = p_partials + i_tile * (SPLITS * BLOCK_N * ROWS)
        p_part = p_part + o_row[None, :] * BLOCK_N + o_column[:, None]
        tl.store(p_part + i_split * (BLOCK_N * ROWS), acc)
        # All threads' stores come before the ticket that one thread takes.
        tl.debug_barrier()
        if tl.atomic_add(p_tickets + i_tile, 1, sem="acq_rel") == SPLITS - 1:
            # In the order of splits, whichever came last.
            total = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for i_other in tl.static_range(SPLITS):
                total += tl.load(p_part + i_other * (BLOCK_N * ROWS), cache_modifier=".cg")
            tl.store(p_to, total.to(p_out.dtype.element_ty), mask=live)
            tl.store(p_tickets + i_tile, 0)


@dataclass(frozen=True)
class Workspace:
    """Scratch of split sums: of one launch at a time, which leaves the tickets as it found them.

    Attributes:
        partials: fp32, one value for each output, row and split.
        tickets: int32, one for each tile of outputs; zeros between launches.
    """

    partials: torch.Tensor
    tickets: torch.Tensor

    @classmethod
    def create(
        cls, tiles: Tiles, num_rows: int, outputs: int, device: torch.device | str
    ) -> Workspace:
        """For launches of at most `num_rows` rows. Nothing is needed without splits."""
        grid = -(-outputs // tiles.columns)
        values = 0 if tiles.splits == 1 else grid * tiles.block_n * row_tile(num_rows)
        return cls(
            torch.empty(values * tiles.splits, dtype=torch.float32, device=device),
            torch.zeros(grid if values else 0, dtype=torch.int32, device=device),
        )


def skinny_linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    tiles: Tiles,
    *,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    next_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out[m, n] = sum_k x[m, k] * weight[n, k]` for 1..64 rows.

    One launch. Products accumulate in fp32 and are rounded once. Sums run in one order, which
    `tiles.parts` and `tiles.splits` decide: a row's bits depend on nothing else, neither on other
    rows nor on their number. Reads nothing on the host; safe to capture.

    Args:
        x_MK: bf16 [rows, inputs]; inputs are contiguous, rows may lie apart.
        weight_NK: bf16 [outputs, inputs], contiguous.
        tiles: `tiles.fits(inputs)`.
        workspace: for `tiles.splits` > 1; allocated if None, with one more launch. Not shared
            between streams.
        out: bf16 [rows, outputs], contiguous; allocated if None.
        next_weight: bf16, contiguous: asked into L2 at the end of the launch, for a projection that
            follows after launches that leave memory idle; not on architectures before sm_90.

    Raises:
        UsageError: for shapes, dtypes or strides other than these.
    """
    if out is None:
        out = x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0])
    _launch(x_MK, weight_NK, None, out, None, tiles, workspace, next_weight)
    return out


def skinny_linear_pair(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    weight2_LK: torch.Tensor,
    tiles: Tiles,
    *,
    workspace: Workspace | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two projections of the same rows in one launch; arguments and bits as in `skinny_linear`."""
    if out is None:
        rows = x_MK.shape[0]
        out = (
            x_MK.new_empty(rows, weight_NK.shape[0]),
            x_MK.new_empty(rows, weight2_LK.shape[0]),
        )
    _launch(x_MK, weight_NK, weight2_LK, out[0], out[1], tiles, workspace, next_weight)
    return out


def _launch(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    weight2_LK: torch.Tensor | None,
    out_MN: torch.Tensor,
    out2_ML: torch.Tensor | None,
    tiles: Tiles,
    workspace: Workspace | None,
    next_weight: torch.Tensor | None,
) -> None:
    _check(x_MK, weight_NK, out_MN, tiles)
    if weight2_LK is not None and out2_ML is not None:
        _check(x_MK, weight2_LK, out2_ML, tiles)
    num_rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0]
    outputs2 = 0 if weight2_LK is None else weight2_LK.shape[0]
    grid = -(-(outputs + outputs2) // tiles.columns)
    if workspace is None:
        workspace = Workspace.create(tiles, num_rows, outputs + outputs2, x_MK.device)
    partials, tickets = workspace.partials, workspace.tickets
    if tiles.splits > 1:
        values = grid * tiles.splits * tiles.block_n * row_tile(num_rows)
        if partials.numel() < values or tickets.numel() < grid:
            raise UsageError(
                f"the workspace holds {partials.numel()} values and {tickets.numel()} tickets, the "
                f"launch takes {values} and {grid}: create it for these tiles and rows"
            )
    if next_weight is not None:
        _check_next(next_weight)
    skinny_linear_kernel[(grid, tiles.splits)](
        x_MK,
        weight_NK,
        weight_NK if weight2_LK is None else weight2_LK,
        out_MN,
        out_MN if out2_ML is None else out2_ML,
        partials if tiles.splits > 1 else out_MN,
        tickets if tiles.splits > 1 else out_MN,
        weight_NK if next_weight is None else next_weight,
        num_rows,
        x_MK.stride(0),
        N=outputs,
        N2=outputs2,
        K=inputs,
        ROWS=row_tile(num_rows),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **constexprs_of(tiles, grid, 0 if next_weight is None else next_weight.nbytes),
        **({"launch_pdl": True} if tiles.dependent else {}),
    )


def constexprs_of(tiles: Tiles, grid: int, next_bytes: int) -> dict[str, int | bool]:
    """Constants of the kernel that the tiles decide; `grid` tiles of outputs."""
    return {
        "COLUMNS": tiles.columns,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "PARTS": tiles.parts,
        "SPLITS": tiles.splits,
        "STAGES": tiles.stages,
        "DEPENDENT": tiles.dependent,
        "PREFETCH": tiles.prefetch,
        "NEXT_BYTES": next_bytes,
        "PROGRAMS": grid * tiles.splits,
        "THREADS": 32 * tiles.warps,
    }


def _check(x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MN: torch.Tensor, tiles: Tiles) -> None:
    if x_MK.ndim != 2 or not 1 <= x_MK.shape[0] <= MAX_ROWS:
        raise UsageError(f"x is {tuple(x_MK.shape)}: pass [1..{MAX_ROWS} rows, inputs]")
    num_rows, inputs = x_MK.shape
    if x_MK.dtype != torch.bfloat16 or x_MK.stride(1) != 1:
        raise UsageError(
            f"x is {x_MK.dtype} with strides {x_MK.stride()}: pass bfloat16 with contiguous inputs"
        )
    if weight_NK.ndim != 2 or weight_NK.shape[1] != inputs or not weight_NK.is_contiguous():
        raise UsageError(
            f"the weight is {tuple(weight_NK.shape)} with strides {weight_NK.stride()}: pass "
            f"contiguous [outputs, {inputs}]"
        )
    shape = (num_rows, weight_NK.shape[0])
    if tuple(out_MN.shape) != shape or not out_MN.is_contiguous():
        raise UsageError(f"out is {tuple(out_MN.shape)}: pass contiguous {shape}")
    if weight_NK.dtype != torch.bfloat16 or out_MN.dtype != torch.bfloat16:
        raise UsageError(f"weight {weight_NK.dtype} and out {out_MN.dtype}: pass bfloat16")
    if weight_NK.numel() >= 1 << 31 or num_rows * max(x_MK.stride(0), shape[1]) >= 1 << 31:
        raise UsageError("offsets past 2^31 elements: split the weight")
    if not tiles.fits(inputs):
        raise UsageError(
            f"{inputs} inputs are not a multiple of {tiles.splits} splits x {tiles.parts} parts x "
            f"{tiles.block_k}"
        )


def _check_next(weight: torch.Tensor) -> None:
    aligned = weight.data_ptr() % 16 == 0 and weight.nbytes % 16 == 0
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or not aligned:
        raise UsageError(
            f"the next weight is {weight.dtype} {tuple(weight.shape)} with strides "
            f"{weight.stride()}: pass contiguous bfloat16, in multiples of 16 bytes"
        )
    if weight.nbytes >= 1 << 31:
        raise UsageError(f"the next weight has {weight.nbytes} bytes; pass a part of it")


def compile_cases() -> list[CompileCase]:
    """Every entry of the table, alone and with the next weight asked for."""
    return [
        compile_case(shape, rows, tiles, next_bytes)
        for shape, by_rows in (SM90 | SM90_FUSED).items()
        for rows, tiles in by_rows.items()
        for next_bytes in ((0, 2 * 2048 * 4096) if shape in SM90 else (0,))
    ]


def compile_case(shape: Shape, rows: int, tiles: Tiles, next_bytes: int = 0) -> CompileCase:
    """One launch configuration on sm_90; `rows` of a program."""
    outputs, outputs2, inputs = shape
    grid = -(-(outputs + outputs2) // tiles.columns)
    constexprs = {"N": outputs, "N2": outputs2, "K": inputs, "ROWS": rows}
    constexprs |= constexprs_of(tiles, grid, next_bytes)
    names = ("p_x", "p_weight", "p_weight2", "p_out", "p_out2")
    signature = {
        **dict.fromkeys(names, "*bf16"),
        "p_partials": "*fp32" if tiles.splits > 1 else "*bf16",
        "p_tickets": "*i32" if tiles.splits > 1 else "*bf16",
        "p_next": "*bf16",
        "num_rows": "i32",
        "stride_x": "i32",
        **dict.fromkeys(constexprs, "constexpr"),
    }
    return CompileCase(
        f"{shape} rows={rows} {tiles} next={next_bytes}",
        skinny_linear_kernel,
        signature,
        constexprs,
        divisible_by_16=frozenset({"stride_x"}),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        dependent_launch=tiles.dependent,
        architectures=(90,),
    )
