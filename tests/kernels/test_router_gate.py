"""The gate's product in parts, and the router that adds them."""

from __future__ import annotations

import pytest
import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.router import naive
from hybridspec.kernels.router.gate import allocate_partials, gate, takes
from hybridspec.kernels.router.router import router

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def inputs(
    rows: int, experts: int, hidden: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + experts)
    x = torch.randn(rows, hidden, generator=generator).bfloat16()
    weight = (torch.randn(experts, hidden, generator=generator) * hidden**-0.5).bfloat16()
    return x.to(device), weight.to(device)


@pytest.mark.parametrize(
    ("rows", "experts", "hidden"), [(16, 256, 512), (1, 32, 256), (5, 48, 1024)]
)
def test_parts_add_up(device: torch.device, rows: int, experts: int, hidden: int) -> None:
    x, weight = inputs(rows, experts, hidden, device)
    out = torch.full((hidden // 256, 16, experts), float("nan"), device=device)
    parts = gate(x, weight, out=out)
    assert parts.shape == (hidden // 256, rows, experts)
    assert parts.data_ptr() == out.data_ptr()
    assert bool(out[:, rows:].isnan().all()), "rows that are not there are left alone"
    for i, part in enumerate(parts):
        cut = slice(256 * i, 256 * (i + 1))
        wanted = x[:, cut].double() @ weight[:, cut].double().T
        assert float((part.double() - wanted).abs().max()) < 3e-6


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [(16, None), (7, None), (16, [3]), (16, [0])],
    ids=["plain", "seven", "masked", "inactive"],
)
def test_router_rounds_the_sum_once(
    device: torch.device, rows: int, lengths: list[int] | None
) -> None:
    x, weight = inputs(rows, 64, 1024, device)
    parts = gate(x, weight)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    lengths_B = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
    logits = total.bfloat16()
    kept = torch.full((rows, 6), -777, dtype=torch.int32, device=device)
    found = router(parts, 6, lengths_B=lengths_B, kept_RK=kept)
    wanted = naive.router(logits.double(), 6, lengths_B=lengths_B)
    assert torch.equal(found[0], wanted[0])
    assert float((found[1] - wanted[1]).abs().max()) < 2e-6
    assert torch.equal(kept, naive.router(logits.double(), 6)[0])


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    x, weight = inputs(16, 64, 512, device)
    together = gate(x, weight)
    for row in (0, 15):
        assert torch.equal(gate(x[row : row + 1], weight)[:, 0], together[:, row])
    x[1] = float("nan")
    assert bool(gate(x, weight)[:, [0, *range(2, 16)]].isfinite().all())


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = inputs(4, 32, 512, device)
    assert takes(x, weight)
    for bad_x, bad_weight in (
        (x.float(), weight),
        (x.repeat(5, 1), weight),
        (x, weight[:24]),
        (x[:, :384], weight[:, :384]),
        (x[:, :256], weight),
        (x[0], weight),
        (x, weight.T),
    ):
        assert not takes(bad_x, bad_weight)
        with pytest.raises(UsageError, match="multiple of 16 experts"):
            gate(bad_x, bad_weight)
    partials = allocate_partials(weight)
    assert partials.shape == (2, 16, 32)
    for bad in (partials[:1], partials[:, :3], partials.double(), partials[..., :16], partials[0]):
        with pytest.raises(UsageError, match="partial sums"):
            gate(x, weight, out=bad)
    with pytest.raises(UsageError, match="contiguous"):
        gate(x, weight, out=partials.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(UsageError, match="partial sums"):
        router(partials.repeat(9, 1, 1), 4)
    with pytest.raises(UsageError, match="partial sums"):
        router(partials.bfloat16(), 4)
