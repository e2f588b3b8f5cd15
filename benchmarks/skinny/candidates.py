"""Shapes of dense projections, and the few launch configurations that are worth timing at each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hybridspec.kernels.skinny_linear.tiles import Tiles

SHARED_BYTES = 220 * 1024


@dataclass(frozen=True)
class Projection:
    """One kind of projection of Qwen3.5-35B-A3B or its drafter on one device.

    Attributes:
        outputs, beside, inputs: of the weight, and of a second one in the same launch.
        layers: how many a round runs.
        cuts: (columns, parts, splits) to try.
    """

    name: str
    outputs: int
    beside: int
    inputs: int
    layers: int
    cuts: tuple[tuple[int, int, int], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Key of the table."""
        return self.outputs, self.beside, self.inputs

    @property
    def weight_bytes(self) -> int:
        """Of both weights, bf16."""
        return 2 * (self.outputs + self.beside) * self.inputs


WIDE = ((94, 1, 1), (47, 1, 1), (32, 2, 1))
NARROW = ((64, 1, 4), (32, 2, 2), (16, 4, 1))
SGLANG = (
    Projection("in_proj_qkvz + in_proj_ba", 12288, 64, 2048, 30, WIDE),
    Projection("out_proj, o_proj", 2048, 0, 4096, 48, (*NARROW, (128, 1, 8))),
    Projection("router", 256, 0, 2048, 40, ((16, 4, 1), (8, 8, 1), (64, 1, 16), (32, 2, 8))),
    Projection("qkv_proj with gate", 9216, 0, 2048, 10, ((70, 1, 1), (35, 1, 1), (24, 2, 1))),
    Projection("drafter gate_up_proj", 12288, 0, 2048, 8, WIDE),
    Projection("drafter qkv_proj", 5120, 0, 2048, 8, ((39, 1, 1), (20, 2, 1), (78, 1, 2))),
    Projection("drafter down_proj", 2048, 0, 6144, 8, (*NARROW, (128, 1, 8))),
    Projection("drafter fc", 2048, 0, 10240, 1, NARROW),
)
# What the captured engine of `hybridspec/reference/gpu` fuses: its other projections are above.
CAPTURED = (
    Projection("qkvz and ba in one", 12352, 0, 2048, 30, WIDE),
    Projection("router, shared gate and up", 1344, 0, 2048, 40,
               ((11, 4, 1), (16, 4, 1), (22, 2, 1), (32, 2, 2), (64, 1, 4))),
    Projection("shared down", 2048, 0, 512, 40, ((16, 4, 1), (32, 2, 1), (64, 1, 1), (32, 2, 2))),
    Projection("drafter context keys and values", 8192, 0, 2048, 1, ((63, 1, 1), (32, 2, 1))),
)  # fmt: skip
ENGINES = {"sglang": SGLANG, "captured": CAPTURED}

# Projections of a layer in turn, and microseconds of other launches between them in a profile of a
# verified block of one request; memory is nearly idle there.
TURNS = (
    ("in_proj_qkvz + in_proj_ba", "out_proj, o_proj", 13),
    ("qkv_proj with gate", "out_proj, o_proj", 13),
    ("drafter qkv_proj", "out_proj, o_proj", 13),
    ("out_proj, o_proj", "router", 3),
)


def candidates(projection: Projection, row_tile: int) -> list[Tiles]:
    """At most ten; the first cut also with 8 warps, and with dependent launches at 16 rows."""
    plain = [
        tiles
        for columns, parts, splits in projection.cuts
        if (tiles := deepest(projection, row_tile, columns, parts, splits)) is not None
    ]
    found = list(plain)
    if row_tile == 16:
        found += [dataclasses.replace(tiles, dependent=True) for tiles in plain[:2]]
        for tiles in plain[:2]:
            piece = projection.inputs // tiles.splits // tiles.parts
            lines = min(4, piece // 64)
            found.append(dataclasses.replace(tiles, dependent=True, prefetch=lines))
        found.append(dataclasses.replace(plain[0], warps=8))
        # Half the step at the same depth in bytes.
        half = deepest(projection, row_tile, *projection.cuts[0], block_k=64)
        found += [half] if half is not None else []
    return list(dict.fromkeys(found))


def deepest(
    projection: Projection,
    row_tile: int,
    columns: int,
    parts: int,
    splits: int,
    block_k: int | None = None,
) -> Tiles | None:
    """Tiles whose pipeline fills the shared memory of the programs that a multiprocessor gets."""
    programs = -(-(projection.outputs + projection.beside) // columns) * splits
    share = SHARED_BYTES // max(1, -(-programs // 132))
    piece = projection.inputs // splits // parts
    for step in (block_k,) if block_k else (128, 64):
        if piece % step:
            continue
        tiles = Tiles(columns, step, 1, parts=parts, splits=splits)
        stages = min(share // ((tiles.block_n + row_tile) * parts * step * 2), piece // step, 12)
        if stages >= min(4, piece // step):
            return dataclasses.replace(tiles, stages=stages)
    return None
