"""GDN verification of a block against float64, in every form of it.

What a call must leave alone is checked in every test: see `gdn_cases.Case.run`.
"""

from __future__ import annotations

import pytest
import torch
from gdn_cases import (
    BF16,
    FORMS,
    FP32,
    VARIANTS,
    Case,
    assert_accurate,
    assert_bits,
    head_errors,
    quick,
    reference_factors,
    rounding,
)
from gdn_kit import REGIMES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = [
    pytest.mark.parametrize("form", FORMS),
    # Of numpy in the interpreter, where NaN and inf lie past the length.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

# Of those that say the same in another size: left to `make test-long`.
SLOW = pytest.mark.slow
SHORT_ROWS = (1, 2, 3, 5, 8, 14, 16)
HEADS = [(1, 1), (1, 4), (3, 3), (2, 4), (5, 10), (2, 8)]


@pytest.mark.parametrize(
    "rows", [pytest.param(n, marks=() if n in SHORT_ROWS else SLOW) for n in range(1, 17)]
)
def test_every_length_of_every_block(device, form, rows):
    """One batch of all lengths 0..T, regimes in turn."""
    regime = REGIMES[rows % len(REGIMES)]
    case = Case.make(device, rows, range(rows + 1), regime=regime, seed=rows)
    case.check(FORMS[form], **quick(device))


@pytest.mark.parametrize("state", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("regime", REGIMES)
def test_gate_regimes(device, form, regime, state):
    """A bf16 state is read exactly: outputs are as good as those of fp32 arithmetic on it."""
    lengths = [16, 11, 5] if state == FP32 else [15, 8, 2]
    case = Case.make(device, 16, lengths, value_heads=2, regime=regime, state=state, seed=1)
    case.check(FORMS[form], **quick(device))


@pytest.mark.parametrize(("key_heads", "value_heads"), HEADS, ids=str)
def test_heads(device, form, key_heads, value_heads):
    case = Case.make(device, 5, [4], key_heads=key_heads, value_heads=value_heads, seed=value_heads)
    case.check(FORMS[form], **quick(device))


@pytest.mark.parametrize(
    ("key_heads", "value_heads"),
    [
        (8, 32),
        pytest.param(16, 32, marks=SLOW),
        pytest.param(32, 32, marks=SLOW),
    ],
    ids=str,
)
def test_many_heads(device, form, key_heads, value_heads):
    case = Case.make(device, 8, [7], key_heads=key_heads, value_heads=value_heads, seed=2)
    case.check(FORMS[form], **quick(device))


@pytest.mark.parametrize(("value_block", "warps"), VARIANTS)
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 64), pytest.param(64, 128, marks=SLOW), (128, 64), (128, 128)]
)
def test_dims_and_variants(device, form, key_dim, value_dim, value_block, warps):
    # Not a full product: the state dtype and the block size go along with the shape.
    case = Case.make(
        device,
        rows=16 if key_dim == 128 else 6,
        lengths=[13] if key_dim == value_dim else [3],
        value_heads=2 if value_block == 64 else 1,
        key_dim=key_dim,
        value_dim=value_dim,
        state=BF16 if value_dim == 64 else FP32,
        seed=value_block,
    )
    case.check(FORMS[form], value_block=value_block, warps=warps)


@pytest.mark.slow
@pytest.mark.parametrize(("value_block", "warps"), VARIANTS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("rows", [1, 4, 8, 13, 16])
def test_full_product(device, form, rows, regime, key_dim, value_dim, value_block, warps):
    for state in (FP32, BF16):
        case = Case.make(
            device,
            rows,
            [rows, rows // 2],
            value_heads=4,
            key_heads=2,
            key_dim=key_dim,
            value_dim=value_dim,
            regime=regime,
            state=state,
        )
        case.check(FORMS[form], value_block=value_block, warps=warps)


def test_lengths_past_the_block_are_clipped(device, form):
    case = Case.make(device, 5, [17, 5, 2**31 - 1, -1], seed=3)
    assert case.live_rows() == [5, 5, 5, 0]
    case.check(FORMS[form], **quick(device))


def test_padding_writes_zeros_and_nothing_else(device, form):
    """Slot 0, which -1 must not read, is poison; lengths of padding do not matter."""
    case = Case.make(device, 8, [8, 8, 0, 3], slots=[3, -1, -1, 5], key_heads=1, value_heads=2)
    assert case.live_rows() == [8, 0, 0, 3]
    case.check(FORMS[form], **quick(device))
    nothing = Case.make(device, 8, [8, 0], slots=[-1, 2], nonfinite=False)
    nothing.inputs.mixed_BTC.fill_(torch.nan)
    nothing.check(FORMS[form], **quick(device))


@pytest.mark.parametrize("rows", [4, 16])
def test_bf16_output_is_the_rounded_fp32_output(device, form, rows):
    case = Case.make(device, rows, [rows, rows - 3], out=BF16, value_heads=2, seed=4)
    case.check(FORMS[form], **quick(device))
    rounded = case.out_BTHV.clone()
    exact = torch.empty_like(rounded, dtype=FP32)
    case.out_BTHV = exact
    case.run(FORMS[form], **quick(device))
    # A little more for a sum that was contracted differently.
    bound = exact.abs() * 1.001 * rounding(exact) + 1e-6
    assert ((rounded.float() - exact).abs() <= bound).all()


def test_gates_and_parameters_of_other_dtypes(device, form):
    """Engines hand over fp32 gates behind a fused launch, and bf16 parameters."""
    case = Case.make(device, 6, [6, 4], value_heads=2, seed=5)
    x = case.inputs
    x.a_BTH, x.b_BTH = x.a_BTH.float() * 1.001, x.b_BTH.float() * 1.001
    x.A_log_H, x.dt_bias_H = x.A_log_H.to(BF16), x.dt_bias_H.to(BF16)
    case.check(FORMS[form], **quick(device))


@pytest.mark.parametrize("rows", [3, pytest.param(8, marks=SLOW), 16])
def test_rows_depend_on_no_later_row_and_not_on_the_length(device, form, rows):
    """Requests of one slot and equal tokens up to their length, other tokens behind it: bits."""
    lengths = range(1, rows + 1)
    case = Case.make(device, rows, lengths, slots=[2] * rows, nonfinite=False, seed=6)
    for x in (case.inputs.mixed_BTC, case.inputs.a_BTH, case.inputs.b_BTH):
        for i, length in enumerate(lengths):
            x[i, :length] = x[rows - 1, :length]
    case.check(FORMS[form], **quick(device))
    out_BTHV, key_RHTK, update_RHTV, decay_RHT = case.run(FORMS[form], **quick(device))
    for i, length in enumerate(lengths):
        assert_bits(out_BTHV[i, :length], out_BTHV[rows - 1, :length])
        for x in (key_RHTK, update_RHTV, decay_RHT):
            assert_bits(x[i, :, :length], x[rows - 1, :, :length])


def test_launches_agree_bit_by_bit_and_with_a_batch_of_one(device, form):
    case = Case.make(device, 16, [16, 0, 9], key_heads=1, value_heads=2, seed=7)
    first = case.run(FORMS[form], **quick(device))
    for found, expected in zip(case.run(FORMS[form], **quick(device)), first, strict=True):
        assert_bits(found, expected)
    x = case.inputs
    x.mixed_BTC, x.a_BTH, x.b_BTH = x.mixed_BTC[2:], x.a_BTH[2:], x.b_BTH[2:]
    alone = Case(
        x,
        case.state_SHVK,
        case.slots_B[2:].clone(),
        case.lengths_B[2:].clone(),
        case.factors,
        case.out_BTHV[2:],
    ).run(FORMS[form], **quick(device))
    assert_bits(alone[0][0], first[0][2])
    for found, expected in zip(alone[1:], first[1:], strict=True):
        assert_bits(found[0, :, :9], expected[2, :, :9])


@pytest.mark.parametrize("regime", ["normal", "nodecay", "mixed"])
def test_agrees_with_the_reference(device, form, regime):
    case = Case.make(device, 9, [9, 9], key_heads=1, value_heads=2, regime=regime, seed=8)
    out_BTHV, key_RHTK, update_RHTV, decay_RHT = case.run(FORMS[form], **quick(device))
    states = case.state_SHVK[case.slots_B.long()].double()
    outputs_BTHV, keys, updates_BHTV, gate_BHT = reference_factors(case.inputs, states)
    assert_accurate(head_errors(out_BTHV.transpose(1, 2), outputs_BTHV.transpose(1, 2)))
    assert torch.equal(key_RHTK[:2, :, :9].double(), keys)
    assert_accurate(head_errors(update_RHTV[:2, :, :9], updates_BHTV))
    torch.testing.assert_close(decay_RHT[:2, :, :9].double(), gate_BHT, rtol=2e-6, atol=1e-30)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_call(device, form, data):
    rows = data.draw(st.integers(1, 16), label="rows")
    lengths = data.draw(st.lists(st.integers(0, rows + 2), min_size=1, max_size=3), label="lengths")
    slots = [
        data.draw(st.sampled_from([-1, 2 * i, 2 * i + 1])) if i else 1 for i in range(len(lengths))
    ]
    case = Case.make(
        device,
        rows,
        lengths,
        slots=slots,
        value_heads=data.draw(st.sampled_from([1, 2]), label="value heads"),
        regime=data.draw(st.sampled_from(REGIMES), label="regime"),
        state=data.draw(st.sampled_from([FP32, BF16]), label="state"),
        seed=data.draw(st.integers(0, 2**16), label="seed"),
    )
    case.check(FORMS[form], **quick(device))
