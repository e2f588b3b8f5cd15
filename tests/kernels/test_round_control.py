"""Round control: forced lengths, acceptance that ends at the length, counters, slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.round_control import naive
from hybridspec.kernels.round_control.finish import finish_lengths
from hybridspec.kernels.round_control.limit import limit_acceptance
from hybridspec.kernels.round_control.record import (
    NUM_COUNTERS,
    LastRounds,
    recall_rounds,
    record_round,
)

LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=5)


def column(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 16), st.integers(0, 2), st.integers(-1, 17), st.integers(0, 16)),
        min_size=1,
        max_size=6,
    ),
    lookahead=st.integers(0, 2),
    fixed=st.sampled_from([0, 0, 8]),
)
def test_finish_equals_naive(
    device: torch.device, rows: list[tuple[int, int, int, int]], lookahead: int, fixed: int
) -> None:
    selected, fallback, caps, forced = (
        column(list(part), device) for part in zip(*rows, strict=True)
    )
    expected = naive.finish_lengths(
        selected, fallback, caps, forced, lookahead=lookahead, fixed_length=fixed
    )
    out = torch.full_like(selected, -7), torch.full_like(selected, -7)
    finish_lengths(
        selected, fallback, caps, forced, lookahead=lookahead, out=out, fixed_length=fixed
    )
    assert torch.equal(out[0].cpu(), expected[0])
    assert torch.equal(selected, out[0])
    assert torch.equal(fallback.cpu(), expected[1])
    assert torch.equal(out[1].cpu(), expected[2])


def test_a_forced_length_is_kept_by_the_correction(device: torch.device) -> None:
    fallback = column([0, 0], device)
    out = column([0, 0], device), column([0, 0], device)
    finish_lengths(
        column([9, 9], device),
        fallback,
        column([16, 16], device),
        column([5, 0], device),
        lookahead=1,
        out=out,
    )
    assert fallback.tolist() == [3, 0]
    assert out[0].tolist() == [5, 9]
    assert out[1].tolist() == [5, 10]


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS)
def test_limit_equals_naive(device: torch.device, lengths: list[int]) -> None:
    candidates = torch.randint(0, 99, (len(lengths), 16), device=device)
    lengths_B = column(lengths, device)
    expected = naive.limit_acceptance(candidates, lengths_B)
    following = torch.full_like(candidates, 77)
    limit_acceptance(candidates, lengths_B, next_BT=following)
    assert torch.equal(candidates, expected[0])
    assert torch.equal(following, expected[1])
    assert (candidates[:, 0] >= 0).all()


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_greedy_acceptance_of_a_perfect_drafter_stops_at_the_length(
    device: torch.device, length: int
) -> None:
    target = torch.arange(100, 116, device=device)[None]
    candidates = torch.cat([torch.tensor([[99]], device=device), target[:, :-1]], dim=1)
    limit_acceptance(candidates, column([length], device))
    matches = (candidates[:, 1:] == target[:, :-1]).int().cumprod(1).sum(1)
    assert matches.tolist() == [length - 1]


def test_counters_and_slots(device: torch.device) -> None:
    last = LastRounds.allocate(8, device)
    found = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
    expected = found.cpu()
    slots = [5, 2, 7]
    for lengths, rows, reasons in (
        ([16, 1, 4], [3, 1, 4], [0, 3, 2]),
        ([2, 2, 9], [1, 2, 9], [0] * 3),
    ):
        emitted = torch.randint(0, 1000, (3, 16), device=device)
        columns = column(lengths, device), column(reasons, device), column(rows, device)
        verified = column([0, 0, 0], device)
        record_round(
            *columns, found, verified, emitted_BT=emitted, slots_B=column(slots, device), last=last
        )
        expected += naive.counters(*columns)
        assert verified.tolist() == lengths
        # The batch is in another order in the next round, with a slot that did nothing yet.
        order = [7, 0, 5, 2]
        out = (
            torch.full((4, 16), -1, dtype=torch.int64, device=device),
            column([9] * 4, device),
            column([9] * 4, device),
        )
        recall_rounds(column(order, device), last, out=out)
        assert out[1].tolist() == [rows[2], 0, rows[0], rows[1]]
        assert out[2].tolist() == [lengths[2], 0, lengths[0], lengths[1]]
        assert torch.equal(out[0][[0, 2, 3]], emitted[[2, 0, 1]])
    assert torch.equal(found.cpu(), expected)


def test_counting_alone(device: torch.device) -> None:
    found = torch.zeros(NUM_COUNTERS, dtype=torch.int64, device=device)
    columns = column([3], device), column([1], device), column([2], device)
    record_round(*columns, found, column([0], device))
    assert torch.equal(found.cpu(), naive.counters(*columns))


def test_refusals(device: torch.device) -> None:
    one, two = column([1], device), column([1, 2], device)
    with pytest.raises(UsageError, match="caps"):
        finish_lengths(one, one, two, one, lookahead=0, out=(one, one))
    with pytest.raises(UsageError, match="fixed length 17"):
        finish_lengths(one, one, one, one, lookahead=0, out=(one, one), fixed_length=17)
    with pytest.raises(UsageError, match="candidates"):
        limit_acceptance(torch.zeros(1, 15, dtype=torch.int64, device=device), one)
    with pytest.raises(UsageError, match="emitted"):
        recall_rounds(
            one,
            LastRounds.allocate(2, device),
            out=(torch.zeros(1, 15, dtype=torch.int64, device=device), one, one),
        )
