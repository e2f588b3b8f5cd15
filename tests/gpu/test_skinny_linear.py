"""Few-row projections at their real shapes: errors, bits, graphs, dependent launches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hybridspec.kernels.skinny_linear.linear import Workspace, skinny_linear, skinny_linear_pair
from hybridspec.kernels.skinny_linear.table import SM90, SM90_FUSED, tiles_for
from hybridspec.kernels.skinny_linear.tiles import Tiles
from hybridspec.reference.gpu.projections import project

pytestmark = pytest.mark.gpu

NAN = float("nan")
# One rounding to bf16 is 1.7e-3 of the norm.
TOLERANCE = 3e-3
CASES = [
    pytest.param(shape, rows, id=f"{shape[0]}+{shape[1]}x{shape[2]}-{rows}")
    for shape, by_rows in (SM90 | SM90_FUSED).items()
    for rows in by_rows
]
SPLIT = Tiles(64, 128, 8, splits=4)


@pytest.fixture(scope="module", autouse=True)
def seed(cuda: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("tiles are for compute capability 9.0")
    torch.manual_seed(0)


def random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()


class Case:
    """Weights of a shape, scratch for its tiles."""

    def __init__(self, shape: tuple[int, int, int], rows: int, device: torch.device) -> None:
        outputs, beside, inputs = shape
        tiles = tiles_for(rows, outputs, inputs, 90, beside=beside, fused=True)
        assert tiles is not None
        self.tiles = tiles
        self.first, self.second = random(device, outputs, inputs), random(device, beside, inputs)
        self.workspace = Workspace.create(tiles, rows, outputs + beside, device)
        self.workspace.partials.fill_(NAN)

    def __call__(self, x: torch.Tensor, tiles: Tiles | None = None) -> torch.Tensor:
        """Both outputs side by side, into poisoned memory; tickets must come back as zeros."""
        tiles = tiles or self.tiles
        out = x.new_full((len(x), len(self.first)), NAN)
        out2 = x.new_full((len(x), len(self.second)), NAN)
        if len(self.second):
            pair = self.first, self.second
            skinny_linear_pair(x, *pair, tiles, workspace=self.workspace, out=(out, out2))
        else:
            skinny_linear(x, self.first, tiles, workspace=self.workspace, out=out)
        assert not self.workspace.tickets.any()
        return torch.cat([out, out2], 1)

    def error(self, found: torch.Tensor, x: torch.Tensor) -> float:
        wanted = x.double() @ torch.cat([self.first, self.second]).double().T
        return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("shape", "rows"), CASES)
def test_matches_float64(cuda: torch.device, shape: tuple[int, int, int], rows: int) -> None:
    case = Case(shape, rows, cuda)
    for count in {1, rows // 2 + 1, rows - 1, rows}:
        x = random(cuda, count, shape[2])
        assert case.error(case(x), x) < TOLERANCE


@pytest.mark.parametrize(("shape", "rows"), CASES)
def test_bits_of_a_row_depend_on_no_other_row(
    cuda: torch.device, shape: tuple[int, int, int], rows: int
) -> None:
    case = Case(shape, rows, cuda)
    x = random(cuda, rows, shape[2])
    together = case(x)
    assert torch.equal(case(x), together)
    for alone in (0, rows - 1):
        assert torch.equal(case(x[alone : alone + 1])[0], together[alone])
    x[0] = NAN
    assert torch.equal(case(x)[1:], together[1:])


@pytest.mark.parametrize("shape", [s for s in SM90 if len(SM90[s]) > 1], ids=str)
def test_bits_do_not_tell_the_number_of_rows(
    cuda: torch.device, shape: tuple[int, int, int]
) -> None:
    counts = sorted(SM90[shape])
    largest = Case(shape, counts[-1], cuda)
    x = random(cuda, counts[-1], shape[2])
    together = largest(x)
    for count in counts[:-1]:
        fewer = Case(shape, count, cuda)
        fewer.first, fewer.second = largest.first, largest.second
        assert torch.equal(fewer(x[:count]), together[:count])


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param(Tiles(94, 128, 4), id="plain"),
        pytest.param(Tiles(16, 64, 4, parts=4), id="parts"),
        pytest.param(SPLIT, id="splits"),
        pytest.param(Tiles(32, 64, 4, parts=2, splits=2), id="both"),
    ],
)
def test_rows_of_a_program_change_no_bit(cuda: torch.device, tiles: Tiles, rows: int) -> None:
    """One order of summation for every number of rows."""
    weight, x = random(cuda, 2048, 4096), random(cuda, rows, 4096)
    fewer = dataclasses.replace(tiles, stages=3)
    together = skinny_linear(x, weight, fewer)
    assert torch.equal(skinny_linear(x[:16].contiguous(), weight, tiles), together[:16])


@pytest.mark.parametrize(("shape", "rows"), CASES)
@pytest.mark.parametrize("prefetch", [0, 4])
def test_dependent_launch_changes_no_bit(
    cuda: torch.device, shape: tuple[int, int, int], rows: int, prefetch: int
) -> None:
    case = Case(shape, rows, cuda)
    x = random(cuda, rows, shape[2])
    wanted = case(x)
    dependent = dataclasses.replace(case.tiles, dependent=True, prefetch=prefetch)
    if not dependent.fits(shape[2]):
        pytest.skip("pieces are shorter than what would be prefetched")
    for _ in range(20):
        # Its rows come from the launch right ahead.
        assert torch.equal(case(x + 0, dependent), wanted)


@pytest.mark.parametrize("tiles", [Tiles(94, 128, 6), SPLIT, Tiles(47, 128, 5, warps=8)], ids=str)
def test_asking_for_the_next_weight_changes_nothing(cuda: torch.device, tiles: Tiles) -> None:
    """One that fills no whole chunk of any thread, and a large one."""
    x, weight = random(cuda, 16, 2048), random(cuda, 2048, 2048)
    wanted = skinny_linear(x, weight, tiles)
    for shape in ((3, 40), (2048, 4096)):
        later = random(cuda, *shape)
        before = later.clone()
        assert torch.equal(skinny_linear(x, weight, tiles, next_weight=later), wanted)
        assert torch.equal(later, before)


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
def test_a_graph_of_split_sums_replays(cuda: torch.device, dependent: bool) -> None:
    """A chain whose launches share one workspace, replayed with other rows."""
    tiles = dataclasses.replace(SPLIT, dependent=dependent)
    weights = [random(cuda, 2048, 2048) / 45 for _ in range(8)]
    workspace = Workspace.create(tiles, 16, 2048, cuda)
    x = random(cuda, 16, 2048)

    def chain() -> torch.Tensor:
        rows = x
        for weight in weights:
            rows = skinny_linear(rows, weight, tiles, workspace=workspace)
        return rows

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(50):
        x.copy_(random(cuda, 16, 2048))
        out.fill_(NAN)
        workspace.partials.fill_(NAN)
        graph.replay()
        assert not workspace.tickets.any()
        rows = x
        for weight in weights:
            rows = skinny_linear(rows, weight, SPLIT)
        assert torch.equal(out, rows)


@pytest.mark.parametrize("shape", [(12352, 2048), (1344, 2048), (2048, 512), (2048, 4096)])
def test_products_of_the_captured_engine(cuda: torch.device, shape: tuple[int, int]) -> None:
    weight = random(cuda, *shape)
    x = random(cuda, 16, shape[1])
    wanted = x.double() @ weight.double().T
    kept = x.new_full((16, shape[0]), NAN)
    project(x, weight, kept)
    for rows in (1, 2, 7, 16):
        out = x.new_full((rows, shape[0]), NAN)
        project(x[:rows], weight, out)
        assert (out.double() - wanted[:rows]).norm() < TOLERANCE * wanted[:rows].norm()
        # One row is cuBLAS's; from two on the bits are those of a whole block.
        assert rows == 1 or torch.equal(out, kept[:rows])
