"""States for a prefix cache: who passes a boundary and where, and copies from slot to slot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gdn_cases import BF16, FP32, assert_bits, int32, poison
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.state_snapshot import naive
from hybridspec.kernels.state_snapshot.snapshot import BLOCK_WORDS, copy_slots, plan

# Of numpy in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
POISON = -77
any_call = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def planned(
    device: torch.device,
    before: list[int],
    rows: list[int],
    slots: list[int],
    track_slots: list[int],
    interval: int,
    kind: torch.dtype = torch.int64,
) -> tuple[list[int], list[int]]:
    """What the kernel writes, into poison; columns past the requests must stay poison."""
    count = len(before)
    out = torch.full((2, count + 3), POISON, dtype=torch.int32, device=device)
    plan(
        torch.tensor(before, dtype=kind, device=device),
        int32(rows, device),
        int32(slots, device),
        torch.tensor(track_slots, dtype=kind, device=device),
        interval,
        out=(out[0, :count], out[1, :count]),
    )
    assert (out[:, count:] == POISON).all()
    return out[0, :count].tolist(), out[1, :count].tolist()


@any_call
@given(data=st.data())
def test_who_passes_a_boundary(device: torch.device, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5), label="requests")
    interval = data.draw(st.sampled_from([16, 17, 32, 48, 256, 1000]), label="interval")
    # Near a boundary, where it matters, far out where 32 bits of a product would not reach.
    boundary = st.integers(0, 2**18).map(lambda n: n * interval)
    start = st.builds(lambda b, d: max(0, b + d), boundary, st.integers(-17, 17))

    def column(elements: st.SearchStrategy[int], label: str) -> list[int]:
        return data.draw(st.lists(elements, min_size=count, max_size=count), label=label)

    before = column(start, "tokens before")
    rows = column(st.one_of(st.integers(0, 16), st.just(-1)), "rows")
    slots = column(st.integers(-1, 9), "slots")
    track_slots = column(st.integers(-1, 9), "track slots")
    case = before, rows, slots, track_slots, interval
    assert planned(device, *case) == naive.plan(*case)


@pytest.mark.parametrize("interval", [16, 32, 256])
def test_every_round_around_a_boundary(device: torch.device, interval: int) -> None:
    """The last row, the first, none, and exactly to the boundary: all starts and all rows."""
    cases = [(before, n) for before in range(interval - 17, interval + 2) for n in range(17)]
    before, rows = (list(column) for column in zip(*cases, strict=True))
    slots = list(range(len(cases)))
    for kind in (torch.int32, torch.int64):
        found = planned(device, before, rows, slots, slots, interval, kind)
        assert found == naive.plan(before, rows, slots, slots, interval)
    for (start, n), taken, slot in zip(cases, *found, strict=True):
        assert (taken > 0) == (start // interval != (start + n) // interval) == (slot >= 0)
        assert taken <= n
        assert not taken or (start + taken) % interval == 0


# Layers, slots, shape of a state and channels of a window; a tile of each, less, and a bit more.
SHAPES = [
    (1, 3, (1, 8, 8), 1),
    (2, 7, (2, 64, 64), 341),
    (3, 4, (1, 65, 64), BLOCK_WORDS // 3 + 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_copies_are_bits(device: torch.device, dtype: torch.dtype, shape: Any) -> None:
    layers, slots, state, channels = shape
    generator = torch.Generator().manual_seed(layers)
    # Slots further apart than a state is long; what lies between stays as it is.
    wide_XSN = torch.randn(layers, slots, state[0] * state[1] * state[2] + 24, generator=generator)
    wide_XSN = wide_XSN.to(dtype).to(device)
    state_XSHVK = wide_XSN[:, :, 8:-16].unflatten(2, state)
    windows = torch.randn(layers, slots, channels, 3, generator=generator).to(BF16).to(device)
    poison(state_XSHVK[:, 1, :, ::2])
    poison(windows[:, 1, ::2])
    state_XSHVK[:, 1, :, 1] = -0.0
    sources, targets = [1, 0, -1], [2, -1, 0]
    expected = wide_XSN.clone(), windows.clone()
    naive.copy_slots(
        expected[0][:, :, 8:-16].unflatten(2, state),
        expected[1],
        torch.tensor(sources),
        torch.tensor(targets),
    )
    copy_slots(state_XSHVK, windows, int32(sources, device), int32(targets, device))
    assert_bits(wide_XSN, expected[0])
    assert_bits(windows, expected[1])
    assert_bits(state_XSHVK[:, 2], state_XSHVK[:, 1])


def test_several_requests_and_none(device: torch.device) -> None:
    state = torch.randn(2, 9, 1, 8, 8, device=device)
    windows = torch.randn(2, 9, 5, 3, device=device).to(BF16)
    expected = state.clone(), windows.clone()
    sources, targets = [0, 1, 2, 1], [5, 6, -1, 8]
    naive.copy_slots(*expected, torch.tensor(sources), torch.tensor(targets))
    copy_slots(state, windows, int32(sources, device), int32(targets, device))
    assert_bits(state, expected[0])
    assert_bits(windows, expected[1])
    copy_slots(state, windows, int32([], device), int32([], device))
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    nothing = int32([], device)
    plan(empty, nothing, nothing, empty, 32, out=(nothing, nothing))
    assert_bits(state, expected[0])


def test_refusals(device: torch.device) -> None:
    state = torch.zeros(2, 4, 1, 8, 8, device=device)
    windows = torch.zeros(2, 4, 5, 3, dtype=BF16, device=device)
    one, two = int32([0], device), int32([0, 1], device)
    for bad_state, bad_windows in (
        (state.double(), windows),
        (state, windows[:1]),
        (state.transpose(3, 4), windows),
        (state, windows.transpose(2, 3)),
    ):
        with pytest.raises(UsageError, match="contiguous in a slot"):
            copy_slots(bad_state, bad_windows, one, one)
    with pytest.raises(UsageError, match="slots to write"):
        copy_slots(state, windows, one, two)
    with pytest.raises(UsageError, match="slots to read"):
        copy_slots(state, windows, one.long(), one)
    columns = one.long(), one, one, one.long()
    with pytest.raises(UsageError, match="pass a positive number"):
        plan(*columns, 0, out=(one.clone(), one.clone()))
    with pytest.raises(UsageError, match="snapshot slots"):
        plan(*columns, 32, out=(one.clone(), two.clone()))
    with pytest.raises(UsageError, match="tokens before"):
        plan(one.float(), *columns[1:], 32, out=(one.clone(), one.clone()))
