"""Route mask: rows past the length load no expert, and nothing non-finite survives."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.route_mask import naive
from hybridspec.kernels.route_mask.route_mask import route_mask

Mode = Literal["alias", "drop"]


def routes(
    count: int,
    top_k: int,
    device: torch.device,
    *,
    rows: int = 16,
    dtype: torch.dtype = torch.int32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with a stride and weights; every row is another one."""
    generator = torch.Generator().manual_seed(count * 100 + top_k)
    ids = torch.randint(0, 256, (count * rows, top_k + 2), generator=generator).to(dtype)
    weights = torch.rand(count * rows, top_k + 5, generator=generator)
    return ids.to(device)[:, :top_k], weights.to(device)[:, :top_k]


@pytest.mark.parametrize("mode", ["alias", "drop"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("lengths", "top_k", "rows"),
    [
        ([1], 8, 16),
        ([16, 0, 5, 16], 8, 16),
        ([0, 0, 3], 6, 16),
        ([0, 0], 8, 16),
        ([2, 12, 0], 10, 12),
    ],
    ids=["one", "ragged", "inactive-first", "none-active", "twelve-rows"],
)
def test_equal_to_naive(
    device: torch.device, lengths: list[int], top_k: int, rows: int, dtype: torch.dtype, mode: Mode
) -> None:
    ids, weights = routes(len(lengths), top_k, device, rows=rows, dtype=dtype)
    for i, length in enumerate(lengths):
        weights[i * rows + length : (i + 1) * rows] = float("nan")
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
    expected = naive.route_mask(ids, weights, lengths_B, mode=mode, rows_per_request=rows)
    out = torch.full_like(ids, -777), torch.full_like(weights, float("nan"))
    route_mask(ids, weights, lengths_B, mode=mode, rows_per_request=rows, out=out)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])
    got = route_mask(ids, weights, lengths_B, mode=mode, rows_per_request=rows)
    assert got[0] is ids
    assert torch.equal(ids, expected[0])
    assert torch.equal(weights, expected[1])
    assert bool(weights.isfinite().all())


def test_what_the_modes_mean(device: torch.device) -> None:
    lengths = torch.tensor([0, 3, 16], dtype=torch.int32, device=device)
    for mode in ("alias", "drop"):
        ids, weights = routes(3, 8, device)
        weights[20] = float("inf")
        before, before_weights = ids.clone(), weights.clone()
        route_mask(ids, weights, lengths, mode=mode)
        assert torch.equal(ids[16:19], before[16:19])
        assert torch.equal(weights[16:19], before_weights[16:19])
        assert torch.equal(ids[32:], before[32:])
        assert not weights[:16].any()
        assert not weights[19:32].any()
        # The inactive request takes the anchor of request 1, the first that is active.
        anchor = before[16] if mode == "alias" else torch.full_like(before[16], -1)
        assert bool((ids[:16] == anchor).all())
        assert bool((ids[19:32] == anchor).all())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 16), min_size=1, max_size=4), st.sampled_from(["alias", "drop"]))
def test_masked_rows_add_no_expert(lengths: list[int], mode: Mode) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids, weights = routes(len(lengths), 4, device)
    live = torch.cat([ids[16 * i : 16 * i + n].flatten() for i, n in enumerate(lengths)])
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
    route_mask(ids, weights, lengths_B, mode=mode)
    loaded = set(ids.flatten().tolist()) - {-1}
    assert loaded == (set(live.tolist()) or ({0} if mode == "alias" else set()))
    for i, length in enumerate(lengths):
        assert not weights[16 * i + length : 16 * (i + 1)].any()


def test_misfits_are_refused(device: torch.device) -> None:
    ids, weights = routes(2, 8, device)
    lengths = torch.ones(2, dtype=torch.int32, device=device)
    for bad in (
        (ids.float(), weights, lengths),
        (ids, weights[:, :7], lengths),
        (ids, weights, lengths[:1]),
        (ids, weights, lengths.long()),
        (ids.T.contiguous().T, weights, lengths),
    ):
        with pytest.raises(UsageError):
            route_mask(*bad)
    with pytest.raises(UsageError, match="take one of"):
        route_mask(ids, weights, lengths, mode="zero")  # type: ignore[arg-type]
