"""Launch configurations of few-row projections."""

from __future__ import annotations

from dataclasses import dataclass

from hybridspec.errors import UsageError

# Rows that one program computes: a wgmma takes this many columns without waste at each step.
ROW_TILES = (16, 32, 64)
MAX_ROWS = ROW_TILES[-1]
# Rows of the left operand of a wgmma.
WGMMA_ROWS = 64


@dataclass(frozen=True)
class Tiles:
    """How one launch cuts `out[M, N] = x[M, K] weight[N, K]^T`.

    Bits of the result depend on `parts` and `splits` alone.

    Attributes:
        columns: outputs that one program computes, any number; the program's block is the next
            power of two, whose rest is masked and not read.
        block_k: inputs that a pipeline stage holds, of every part.
        stages: pipeline depth.
        parts: pieces that a weight row is cut into, so that few outputs fill a wgmma; a power of
            two.
        splits: programs that share a sum over inputs; the last one to finish adds theirs up.
        warps: 4 or 8.
        dependent: programmatic dependent launch (compute capability 9.0 and later).
        prefetch: lines of 128 bytes of every piece of a weight row that are asked into L2 before
            the wait for the kernel ahead; dependent launches only. A power of two, or 0.
    """

    columns: int
    block_k: int
    stages: int
    parts: int = 1
    splits: int = 1
    warps: int = 4
    dependent: bool = False
    prefetch: int = 0

    def __post_init__(self) -> None:
        if self.columns < 1 or self.stages < 1 or self.splits < 1:
            raise UsageError(f"{self}: columns, stages and splits are at least 1")
        for name, value in (("block_k", self.block_k), ("parts", self.parts)):
            if value < 1 or value & (value - 1):
                raise UsageError(f"{name} {value} is not a power of two")
        if self.block_k < 16:
            raise UsageError(f"block_k {self.block_k}: a tensor-core step takes 16 inputs")
        if self.prefetch and not self.dependent:
            raise UsageError("prefetch without a dependent launch: there is no wait to hide it in")
        if self.prefetch & (self.prefetch - 1):
            raise UsageError(f"prefetch {self.prefetch} is not a power of two")

    @property
    def block_n(self) -> int:
        """Outputs of a program's block, masked ones included."""
        return 1 << (self.columns - 1).bit_length()

    @property
    def order(self) -> tuple[int, int]:
        """What decides the order of summation, and with it bits."""
        return self.parts, self.splits

    def fits(self, inputs: int) -> bool:
        """Whether a sum over this many inputs can be cut so."""
        piece, rest = divmod(inputs, self.splits * self.parts)
        return rest == 0 and piece % self.block_k == 0 and 64 * self.prefetch <= piece


def row_tile(num_rows: int) -> int:
    """Rows that a program computes for `num_rows` rows, masked ones included."""
    for tile in ROW_TILES:
        if num_rows <= tile:
            return tile
    raise UsageError(f"{num_rows} rows: few-row projections take 1..{MAX_ROWS}")
