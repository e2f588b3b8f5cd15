"""What is particular to the sequential form: it agrees with the block form, and its decode step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gdn_kit import REGIMES, Inputs, make_inputs, poisoned_factors, relative_error

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.block import verify_block
from hybridspec.kernels.gdn.decode import decode_step
from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.gdn.sequential import verify_sequential

NAN = float("nan")
step: Any = decode_step
H, HV, K, V = 1, 2, 64, 64


def drawn(
    batch: int, rows: int, device: torch.device, regime: str = "normal"
) -> tuple[Inputs, torch.Tensor]:
    """Inputs of a block, and a pool of one slot more than requests."""
    generator = torch.Generator().manual_seed(97 * rows + batch)
    inputs = make_inputs(generator, batch, rows, H, HV, K, V, regime, device)
    state = torch.randn(batch + 1, HV, V, K, generator=generator).to(device)
    return inputs, state


def ran(
    function, inputs: Inputs, state: torch.Tensor, slots: list[int], lengths: list[int], **options
) -> tuple[torch.Tensor, Factors]:
    """Outputs in fp32 and factors, both poisoned before."""
    batch, rows = inputs.mixed_BTC.shape[:2]
    device = state.device
    factors = poisoned_factors(2, batch, H, HV, K, V, device)
    out = torch.full((batch, rows, HV, V), NAN, device=device)
    function(
        *inputs.tensors(),
        state,
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        factors,
        1,
        out,
        key_heads=H,
        **options,
    )
    return out, factors


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return relative_error(found, expected) < 2e-6


@pytest.mark.parametrize(
    ("rows", "lengths", "regime"),
    [
        (1, [1], "normal"),
        (2, [2, 0, 1], "repeat"),
        (3, [3, 2], "strong"),
        (5, [5, 1, 4], "mixed"),
        (7, [6], "nodecay"),
    ],
    ids=str,
)
def test_agrees_with_the_block_form(
    rows: int, lengths: list[int], regime: str, device: torch.device
) -> None:
    assert regime in REGIMES
    inputs, state = drawn(len(lengths), rows, device, regime)
    slots = list(range(len(lengths), 0, -1))
    before = state.clone()
    found, factors = ran(verify_sequential, inputs, state, slots, lengths, value_block=32, warps=2)
    expected, wanted = ran(verify_block, inputs, state, slots, lengths)
    assert close(found, expected)
    assert torch.equal(state, before)
    for request, length in enumerate(lengths):
        live = (1, request, slice(None), slice(length))
        dead = (1, request, slice(None), slice(length, None))
        assert torch.equal(found[request, length:], torch.zeros_like(found[request, length:]))
        assert torch.equal(factors.key_XRHTK[live], wanted.key_XRHTK[live])
        assert close(factors.update_XRHTV[live], wanted.update_XRHTV[live])
        assert close(factors.decay_XRHT[live], wanted.decay_XRHT[live])
        for tensor in vars(factors).values():
            assert tensor[dead].isnan().all()
            assert tensor[0].isnan().all()


@pytest.mark.parametrize(
    ("value_block", "warps", "key_lanes"), [(8, 1, 8), (4, 1, 8), (16, 1, 4)], ids=str
)
def test_tiles_agree(value_block: int, warps: int, key_lanes: int, device: torch.device) -> None:
    inputs, state = drawn(1, 2, device)
    expected, wanted = ran(verify_sequential, inputs, state, [1], [2], value_block=32, warps=2)
    tile = {"value_block": value_block, "warps": warps, "key_lanes": key_lanes}
    found, factors = ran(verify_sequential, inputs, state, [1], [2], **tile)
    assert close(found, expected)
    assert close(factors.update_XRHTV[1, :, :, :2], wanted.update_XRHTV[1, :, :, :2])


@pytest.mark.parametrize(("rows", "length"), [(4, 3), (6, 3), (6, 2)], ids=str)
def test_rows_past_the_length_change_no_bit(rows: int, length: int, device: torch.device) -> None:
    inputs, state = drawn(1, rows, device)
    options = {"value_block": 32, "warps": 2}
    expected, wanted = ran(verify_sequential, inputs, state, [0], [length], **options)
    for tensor in (inputs.mixed_BTC, inputs.a_BTH, inputs.b_BTH):
        tensor[:, length:] = NAN
    found, factors = ran(verify_sequential, inputs, state, [0], [length], **options)
    assert torch.equal(found, expected)
    assert not found.isnan().any()
    for name, tensor in vars(factors).items():
        assert torch.equal(tensor[1, :, :, :length], vars(wanted)[name][1, :, :, :length]), name


def test_padding_is_zeros_and_touches_nothing(device: torch.device) -> None:
    inputs, state = drawn(2, 3, device)
    found, factors = ran(verify_sequential, inputs, state, [-1, 0], [3, 3], value_block=32)
    assert not found[0].any()
    assert found[1].any()
    assert all(tensor[1, 0].isnan().all() for tensor in vars(factors).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_step_verifies_and_commits(dtype: torch.dtype, device: torch.device) -> None:
    slots, lengths = [3, -1, 0], [1, 1, 0]
    inputs, state = drawn(3, 1, device)
    state = state.to(dtype)
    before = state.clone()
    out = torch.full((3, 1, HV, V), NAN, device=device)
    step(
        *inputs.tensors(),
        state,
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        out,
        key_heads=H,
        value_block=32,
        warps=2,
    )
    outputs, states = inputs.reference(0, 1, before[3])
    assert relative_error(out[0], outputs) < 2e-6
    assert relative_error(state[3], states[1]) < (2e-6 if dtype == torch.float32 else 4e-3)
    assert not out[1:].any()
    assert torch.equal(state[:3], before[:3])


def test_refuses_tiles_that_do_not_fit(device: torch.device) -> None:
    inputs, state = drawn(1, 2, device)
    for options in (
        {"value_block": 6},
        {"value_block": 4, "warps": 2},
        {"key_lanes": 3},
        {"key_lanes": 16},
    ):
        with pytest.raises(UsageError):
            ran(verify_sequential, inputs, state, [0], [2], **options)
    with pytest.raises(UsageError, match="takes one"):
        step(
            *inputs.tensors(),
            state,
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
            torch.empty(1, 2, HV, V, device=device),
            key_heads=H,
        )
