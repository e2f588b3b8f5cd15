"""Softmax router: the right experts in the right order, and rows past the length masked."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.router import naive
from hybridspec.kernels.router.router import router

Mode = Literal["alias", "drop"]
TOLERANCE = 2e-6  # of weights below 1 in fp32
LENGTHS = [[1], [16, 0, 5, 16], [0, 0, 3], [0, 0], [20, 2]]
LENGTH_IDS = ["one", "ragged", "inactive-first", "none-active", "longer-than-the-block"]


def logits_of(rows: int, experts: int, device: torch.device, *, seed: int = 0) -> torch.Tensor:
    """fp32 logits that bf16 holds exactly, with many ties."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, experts, generator=generator) * 2
    values[1::3] = values[1::3].round()
    values[2::7] = 0.0
    values[2::7, ::2] = -0.0
    return values.bfloat16().float().to(device)


def poisoned(rows: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((rows, top_k), -777, dtype=torch.int32, device=device)
    return ids, torch.full((rows, top_k), float("nan"), device=device)


def check(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    assert torch.equal(found[0], wanted[0])
    assert float((found[1].double() - wanted[1]).abs().max()) < TOLERANCE


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"),
    [(16, 256, 8), (1, 256, 8), (7, 60, 4), (3, 512, 10), (5, 128, 8), (9, 5, 5), (2, 33, 16)],
    ids=["full", "one-row", "sixty", "five-hundred", "two-a-program", "all", "widest"],
)
def test_equal_to_naive(
    device: torch.device, rows: int, experts: int, top_k: int, dtype: torch.dtype, renormalize: bool
) -> None:
    logits = logits_of(rows, experts, device).to(dtype)
    out = poisoned(rows, top_k, device)
    got = router(logits, top_k, renormalize=renormalize, out=out)
    assert got[0] is out[0]
    check(got, naive.router(logits.double(), top_k, renormalize=renormalize))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("experts", "top_k"), [(24, 6), (64, 8)])
@pytest.mark.parametrize("rows", [100, pytest.param(2500, marks=pytest.mark.slow)])
def test_tables_full_of_ties(
    device: torch.device, rows: int, experts: int, top_k: int, dtype: torch.dtype
) -> None:
    """Quarter steps, so that the choice hangs on ties; 10,000 rows in the four long cases."""
    generator = torch.Generator().manual_seed(experts + rows)
    values = (torch.randn(rows, experts, generator=generator) * 4).round() / 4
    logits = values.to(device, dtype)
    check(router(logits, top_k), naive.router(logits.double(), top_k))


@pytest.mark.parametrize("mode", ["alias", "drop"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=LENGTH_IDS)
def test_masks_as_the_mask_behind_a_router(
    device: torch.device, lengths: list[int], mode: Mode
) -> None:
    rows, keep = 16 * len(lengths), len(lengths) != 3
    experts, top_k = (256, 8) if len(lengths) == 1 else (60, 6)
    logits = logits_of(rows, experts, device, seed=rows).bfloat16()
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
    plain = naive.router(logits.double(), top_k)
    wanted = naive.router(logits.double(), top_k, lengths_B=lengths_B, mode=mode)
    out, kept = poisoned(rows, top_k, device), poisoned(rows, top_k, device)[0]
    got = router(
        logits, top_k, lengths_B=lengths_B, mode=mode, out=out, kept_RK=kept if keep else None
    )
    check(got, wanted)
    assert torch.equal(kept, plain[0] if keep else torch.full_like(kept, -777))


def test_rows_that_count_have_the_bits_of_an_unmasked_launch(device: torch.device) -> None:
    logits = logits_of(48, 256, device, seed=5).bfloat16()
    lengths = torch.tensor([3, 0, 12], dtype=torch.int32, device=device)
    live = (torch.arange(16, device=device)[None] < lengths[:, None]).flatten()
    full, masked = router(logits, 8), router(logits, 8, lengths_B=lengths)
    for before, after in zip(full, masked, strict=True):
        assert torch.equal(before[live], after[live])
    assert not masked[1][~live].any()


def test_other_blocks_and_strides(device: torch.device) -> None:
    logits = logits_of(24, 70, device, seed=2)[:, :60]
    lengths = torch.tensor([2, 12], dtype=torch.int32, device=device)
    got = router(logits, 4, lengths_B=lengths, rows_per_request=12)
    check(got, naive.router(logits.double(), 4, lengths_B=lengths, rows_per_request=12))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_finite(device: torch.device, dtype: torch.dtype) -> None:
    """NaN ranks last and shows in the weights; masked rows stay finite whatever they hold."""
    logits = logits_of(16, 256, device, seed=3).to(dtype)
    clean = router(logits, 8)
    logits[1, 7] = float("nan")
    logits[2, 9] = float("inf")
    logits[3, 10:] = float("-inf")
    logits[4] = float("nan")
    logits[5:] = float("nan")
    ids, weights = router(logits, 8)
    assert bool(((ids >= 0) & (ids < 256)).all())
    assert 7 not in ids[1].tolist()
    assert int(ids[2, 0]) == 9
    assert bool(weights[1:3].isnan().all())
    check((ids[3:4], weights[3:4]), naive.router(logits[3:4].double(), 8))
    assert torch.equal(ids[0], clean[0][0])
    assert torch.equal(weights[0], clean[1][0])
    length = torch.tensor([1], dtype=torch.int32, device=device)
    ids, weights = router(logits, 8, lengths_B=length)
    assert bool(weights.isfinite().all())
    assert bool((ids == ids[0]).all())


def test_too_few_experts_with_a_probability_repeat_with_weight_zero(device: torch.device) -> None:
    logits = torch.full((1, 64), float("-inf"), device=device)
    logits[0, [3, 40]] = torch.tensor([1.0, 1.0], device=device)
    ids, weights = router(logits, 4)
    assert ids[0, :2].tolist() == [3, 40]
    assert bool(((ids >= 0) & (ids < 64)).all())
    assert weights[0].tolist() == [0.5, 0.5, 0.0, 0.0]


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 17), min_size=1, max_size=4),
    st.integers(2, 80),
    st.integers(1, 8),
    st.sampled_from(["alias", "drop"]),
)
def test_any_lengths(lengths: list[int], experts: int, top_k: int, mode: Mode) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    top_k = min(top_k, experts)
    logits = logits_of(8 * len(lengths), experts, device, seed=experts).bfloat16()
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {"lengths_B": lengths_B, "mode": mode, "rows_per_request": 8}
    check(router(logits, top_k, **arguments), naive.router(logits.double(), top_k, **arguments))


def test_no_rows(device: torch.device) -> None:
    ids, weights = router(torch.zeros(0, 256, device=device), 8)
    assert ids.shape == weights.shape == (0, 8)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    logits = torch.zeros(16, 256, device=device)
    length = torch.ones(1, dtype=torch.int32, device=device)
    ids, weights = poisoned(16, 8, device)
    with pytest.raises(UsageError, match=r"bfloat16 or float32"):
        router(logits.half(), 8)
    with pytest.raises(UsageError, match="up to 512 experts"):
        router(torch.zeros(1, 513, device=device), 8)
    with pytest.raises(UsageError, match="top 17"):
        router(logits, 17)
    with pytest.raises(UsageError, match="top 8"):
        router(logits[:, :4], 8)
    with pytest.raises(UsageError, match="side by side"):
        router(logits.T, 8)
    with pytest.raises(UsageError, match="expected 16 each"):
        router(logits[:15], 8, lengths_B=length)
    with pytest.raises(UsageError, match="int32"):
        router(logits, 8, lengths_B=length.long())
    with pytest.raises(UsageError, match="mode"):
        router(logits, 8, lengths_B=length, mode="guess")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="contiguous"):
        router(logits, 8, out=(ids.long(), weights))
    with pytest.raises(UsageError, match="kept ids"):
        router(logits, 8, kept_RK=ids[:, :4])
