"""Argmax of verified rows: what torch chooses, ties and NaN included."""

from __future__ import annotations

import pytest
import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.accept.argmax import CHUNK, ArgmaxScratch, argmax_of_blocks
from hybridspec.kernels.round_control.limit import limit_acceptance

POISON = -77
LENGTHS = [[16], [1], [4, 0, 7], [2, 16]]


def naive(logits_RV: torch.Tensor, lengths: list[int]) -> list[int]:
    """Row by row: the first NaN, else the first of the largest."""
    found = []
    for i, row in enumerate(logits_RV.double().cpu()):
        if i % 16 >= max(lengths[i // 16], 1):
            found.append(0)
            continue
        nan = row.isnan().nonzero()
        best = nan if len(nan) else (row == row.max()).nonzero()
        found.append(int(best[0]))
    return found


def run(logits_RV: torch.Tensor, lengths: list[int], scratch: ArgmaxScratch | None = None):
    device = logits_RV.device
    scratch = scratch or ArgmaxScratch.create(len(lengths), device)
    out = torch.full((len(logits_RV),), POISON, dtype=torch.int64, device=device)
    column = torch.tensor(lengths, dtype=torch.int32, device=device)
    return argmax_of_blocks(logits_RV, column, scratch, out=out).tolist()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("vocab", [1, 50, CHUNK, CHUNK + 3, 2 * CHUNK + 1])
def test_first_largest_of_every_verified_row(
    lengths: list[int], vocab: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Few values: nearly every row has ties, within a chunk and across chunks.
    logits = torch.randint(-3, 3, (16 * len(lengths), vocab), generator=generator).float()
    assert run(logits.to(device), lengths) == naive(logits, lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_strided_rows(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(32, 1000, generator=generator).to(dtype).to(device)
    logits = wide[:, 8:905]
    assert run(logits, [5, 16]) == naive(logits, [5, 16])


def test_zeros_infinities_and_nan(device: torch.device) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [
        [-1.0, -0.0, 0.0, -0.0],
        [-1.0, 0.0, -0.0, 0.0],
        [-inf, -inf, -inf, -inf],
        [-inf, -3e38, -inf, -3e38],
        [1.0, inf, nan, nan],
        [nan, inf, 1.0, nan],
        [-nan, inf, 1.0, -inf],
        [3.0, 3.0, -nan, inf],
        [-1e-45, -2e-45, 1e-45, 0.0],
    ]
    logits = torch.zeros(16, 4)
    logits[: len(rows)] = torch.tensor(rows)
    lengths = [len(rows)]
    assert run(logits.to(device), lengths) == naive(logits, lengths)
    # The index of torch on this device, which the engine takes.
    assert (
        run(logits.to(device), lengths)[: len(rows)]
        == (torch.argmax(logits.to(device), -1).tolist()[: len(rows)])
    )


def test_rows_past_the_length_are_not_read(device: torch.device) -> None:
    logits = torch.full((32, 40), float("nan"))
    generator = torch.Generator().manual_seed(9)
    logits[:3] = torch.randn(3, 40, generator=generator)
    logits[16:17] = torch.randn(1, 40, generator=generator)
    found = run(logits.to(device), [3, -5])
    assert found == naive(logits, [3, -5])
    assert found[3:16] == [0] * 13


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_candidates_end_at_the_length(lengths: list[int], device: torch.device) -> None:
    count = len(lengths)
    logits = torch.randn(16 * count, 60, generator=torch.Generator().manual_seed(5))
    column = torch.tensor(lengths, dtype=torch.int32, device=device)
    candidates, expected = (
        torch.arange(16 * count, device=device).view(count, 16).clone() for _ in range(2)
    )
    limit_acceptance(expected, column)
    scratch = ArgmaxScratch.create(count, device)
    found = argmax_of_blocks(logits.to(device), column, scratch, candidates_BT=candidates)
    assert found.tolist() == naive(logits, lengths)
    assert torch.equal(candidates, expected)


def test_scratch_serves_any_number_of_launches(device: torch.device) -> None:
    scratch = ArgmaxScratch.create(2, device)
    for seed, lengths in enumerate([[16, 16], [1, 3], [16, 2]]):
        logits = torch.randn(32, CHUNK + 9, generator=torch.Generator().manual_seed(seed))
        logits -= 10.0 * seed
        assert run(logits.to(device), lengths, scratch) == naive(logits, lengths)
    assert scratch.tickets_R.eq(0).all()


def test_refusals(device: torch.device) -> None:
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    scratch = ArgmaxScratch.create(1, device)
    for logits in (
        torch.zeros(15, 4),
        torch.zeros(16, 4, dtype=torch.float64),
        torch.zeros(4, 16).T,
    ):
        with pytest.raises(UsageError, match="logits are"):
            argmax_of_blocks(logits.to(device), lengths, scratch)
    logits = torch.zeros(16, 4, device=device)
    for candidates in (torch.zeros(16, 1), torch.zeros(1, 16), torch.zeros(16, 1).T.long()[:, :8]):
        with pytest.raises(UsageError, match="candidates are"):
            argmax_of_blocks(logits, lengths, scratch, candidates_BT=candidates.to(device))
    two = torch.ones(2, dtype=torch.int32, device=device)
    with pytest.raises(UsageError, match="scratch is for 16 rows"):
        argmax_of_blocks(torch.zeros(32, 4, device=device), two, scratch)
