"""Which projections take the kernel, and with which tiles: by shape, rows and architecture."""

from __future__ import annotations

from hybridspec.kernels.skinny_linear.tiles import MAX_ROWS, Tiles, row_tile

# Outputs of the first weight and of the second one in the same launch (0 without), inputs.
Shape = tuple[int, int, int]

# sm_90: {shape: {rows of a program: tiles}}, of Qwen3.5-35B-A3B and its DFlash drafter on one
# device. All tiles of a shape have one order of summation, so that bits do not tell how many rows
# ran together.
SM90: dict[Shape, dict[int, Tiles]] = {
    # in_proj_qkvz with in_proj_ba of a Gated DeltaNet layer.
    (12288, 64, 2048): {16: Tiles(32, 64, 6, parts=2)},
    # out_proj, o_proj; the drafter's o_proj.
    (2048, 0, 4096): {16: Tiles(16, 128, 6, parts=4), 32: Tiles(16, 128, 4, parts=4)},
    # Router.
    (256, 0, 2048): {16: Tiles(16, 64, 8, parts=4), 32: Tiles(16, 128, 4, parts=4)},
    # Drafter: gate_up_proj, qkv_proj, down_proj, fc.
    (12288, 0, 2048): {16: Tiles(94, 128, 6, warps=8), 32: Tiles(94, 128, 5)},
    (5120, 0, 2048): {16: Tiles(39, 64, 12)},
    (2048, 0, 6144): {16: Tiles(16, 128, 6, parts=4), 32: Tiles(16, 128, 4, parts=4)},
    (2048, 0, 10240): {16: Tiles(16, 128, 6, parts=4), 32: Tiles(16, 128, 4, parts=4)},
}
# What the captured engine fuses, measured there; an engine that runs the shared expert beside the
# routed ones has another product to hide, so these are no entries for it.
SM90_FUSED: dict[Shape, dict[int, Tiles]] = {
    # in_proj_qkvz over in_proj_ba.
    (12352, 0, 2048): {
        16: Tiles(94, 128, 6, warps=8),
        32: Tiles(94, 128, 5),
        64: Tiles(94, 128, 4),
    },
    # Router over the shared expert's gate and up and its own gate.
    (1344, 0, 2048): {16: Tiles(11, 128, 4, parts=4), 32: Tiles(16, 128, 4, parts=4)},
    # The shared expert's down_proj.
    (2048, 0, 512): {
        16: Tiles(16, 128, 1, parts=4, warps=8),
        32: Tiles(16, 128, 1, parts=4),
    },
}


def tiles_for(
    num_rows: int,
    outputs: int,
    inputs: int,
    architecture: int,
    *,
    beside: int = 0,
    fused: bool = False,
) -> Tiles | None:
    """Tiles where the kernel was faster than cuBLAS; None: leave the projection to cuBLAS.

    Args:
        num_rows: rows of x.
        outputs, inputs: shape of the weight.
        architecture: compute capability, 90 for an H200.
        beside: outputs of a second weight in the same launch.
        fused: whether the weight may be one of those that the captured engine fuses.
    """
    if architecture != 90 or not 1 <= num_rows <= MAX_ROWS:
        return None
    shape = outputs, beside, inputs
    by_rows = SM90.get(shape) or (SM90_FUSED.get(shape) if fused else None) or {}
    return by_rows.get(row_tile(num_rows))
