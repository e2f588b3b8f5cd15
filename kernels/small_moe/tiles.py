"""Tile sizes of the launches, by number of rows and architecture."""

from __future__ import annotations

from dataclasses import dataclass

# Rows that a call takes.
MAX_ROWS = 128
# Up to these rows two launches compute all rows side by side: they are the columns of the first
# launch's product. Beyond, pairs of row and expert are grouped by expert in front of both.
NARROW_ROWS = 16
# Rows up to which an engine's verify passes take it. Up to 16 it beat SGLang's tuned kernels by
# 5 %. At 32 it did where most rows are masked, as in those passes, by 14 % to 22 % in the later of
# two runs; with all rows live it was 0 % to 2 % ahead there.
MEASURED_ROWS = 32
# Experts, hidden size, expert width and experts a row for which that was measured, and on what.
MEASURED_SHAPE = (256, 2048, 512, 8)
MEASURED_ARCHITECTURE = 90


@dataclass(frozen=True)
class Tiles:
    """Launch configuration of one row count up to `NARROW_ROWS`.

    Attributes:
        gate_up_n: columns of the expert width a program of the first launch computes. It reads as
            many rows of gate and of up.
        gate_up_k: hidden elements a pipeline stage of the first launch holds.
        gate_up_stages: pipeline depth of the first launch.
        down_n: hidden columns a program of the second launch computes.
        down_parts: pieces that the expert width is cut into, so that `down_n * down_parts` rows
            fill a wgmma.
        down_stages: pipeline depth of the second launch, an expert a stage.
        dependent: programmatic dependent launch (compute capability 9.0 and later).
    """

    gate_up_n: int
    gate_up_k: int
    gate_up_stages: int
    down_n: int
    down_parts: int
    down_stages: int
    dependent: bool


@dataclass(frozen=True)
class GroupedTiles:
    """Launch configuration beyond `NARROW_ROWS` rows: one for all row counts.

    A row's bits then do not depend on how many rows a call has.

    Attributes:
        item_rows: rows of one expert that are computed together, 8 or 16; an expert of more rows
            is several items.
        gate_up_n, gate_up_k, gate_up_stages: as in `Tiles`.
        gate_up_programs: programs of the gate-up launch a multiprocessor.
        gate_up_fused: their pipelines run on from one item to the next (fused loops).
        down_n, down_parts, down_stages: as in `Tiles`; a stage is an item.
        dependent: programmatic dependent launch (compute capability 9.0 and later).
    """

    item_rows: int
    gate_up_n: int
    gate_up_k: int
    gate_up_stages: int
    gate_up_programs: int
    gate_up_fused: bool
    down_n: int
    down_parts: int
    down_stages: int
    dependent: bool


def grouped_tiles_for(architecture: int) -> GroupedTiles:
    """Tiles beyond `NARROW_ROWS` rows on compute capability `architecture`. Not measured yet."""
    if architecture < 90:
        return GroupedTiles(16, 32, 128, 3, 2, False, 16, 4, 3, False)
    return GroupedTiles(8, 32, 64, 10, 2, False, 16, 4, 6, True)


def padded_rows(num_rows: int) -> int:
    """Rows that the second launch computes: a power of two, at least 4."""
    return max(4, 1 << (num_rows - 1).bit_length())


def tiles_for(num_rows: int, architecture: int) -> Tiles:
    """Tiles for `num_rows` rows on compute capability `architecture` (90 for an H200).

    sm_90 as measured on an H200. sm_80, not measured, has 164 KB of shared memory against 228 KB
    and no wgmma: fewer stages.
    """
    if architecture < 90:
        return Tiles(32, 128, 3, 16, 4, 3, False)
    if num_rows == 1:
        # 128 programs, one a multiprocessor: the deepest pipeline.
        return Tiles(32, 128, 6, 16, 4, 4, True)
    if num_rows == 2:
        # 256 programs: three fit a multiprocessor, so all of them run at once.
        return Tiles(32, 64, 6, 16, 4, 4, True)
    return Tiles(32, 64, 10, 16, 4, 6 if num_rows <= 8 else 4, True)
