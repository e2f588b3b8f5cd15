"""Commit of any prefix of a verified block, all layers and requests at once, against float64."""

from __future__ import annotations

import pytest
import torch
from gdn_cases import (
    BF16,
    FORMS,
    FP32,
    VARIANTS,
    assert_accurate,
    assert_bits,
    head_errors,
    int32,
    poison,
    pool_of,
    quick,
    reference_factors,
    rounding,
)
from gdn_kit import REGIMES, Inputs, make_inputs, poisoned_factors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridspec.kernels.conv_window import naive as conv_naive
from hybridspec.kernels.gdn.commit import ConvWindows, commit
from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.gdn.naive import naive_commit

# Of numpy in the interpreter, where NaN and inf lie past the length.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)


class Round:
    """A verified block of several layers: factors by the float64 reference, poison elsewhere."""

    def __init__(
        self,
        device,
        rows,
        accepted,
        *,
        layers=2,
        key_heads=1,
        value_heads=1,
        key_dim=64,
        value_dim=64,
        regime="normal",
        state=FP32,
        slots=None,
        seed=0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch = len(accepted)
        if slots is None:
            slots = [int(i) + 1 for i in torch.randperm(batch + 2, generator=generator)[:batch]]
        self.slots, self.accepted, self.rows = slots, list(accepted), rows
        self.slots_B, self.accepted_B = int32(slots, device), int32(self.accepted, device)
        self.state_XSHVK = pool_of(
            generator,
            (layers, batch + 4, value_heads, value_dim, key_dim),
            slots,
            state,
            device,
            other_heads=0,
        )
        shape = (key_heads, value_heads, key_dim, value_dim)
        self.factors = poisoned_factors(layers, batch + 1, *shape, device)
        self.inputs: list[Inputs] = []
        for x in range(layers):
            inputs = make_inputs(generator, batch, rows, *shape, regime, device)
            self.inputs.append(inputs)
            states = self.state_XSHVK[x][self.slots_B.clamp_min(0).long()].double().nan_to_num()
            _, keys, updates, gates = reference_factors(inputs, states)
            # A round verifies more rows than it accepts; half of the rest was never written.
            for i, count in enumerate(self.accepted):
                written = (count + rows + 1) // 2
                for target, values in (
                    (self.factors.key_XRHTK, keys),
                    (self.factors.update_XRHTV, updates),
                    (self.factors.decay_XRHT, gates),
                ):
                    target[x, i, :, :written] = values[i, :, :written].to(target.dtype)

    def run(self, **options) -> torch.Tensor:
        """States behind the commit; everything else is checked to be as it was."""
        before = self.state_XSHVK.clone()
        held = [
            x.clone()
            for x in (self.factors.key_XRHTK, self.factors.update_XRHTV, self.factors.decay_XRHT)
        ]
        base = self.state_XSHVK._base
        assert base is not None
        expected_base = base.clone()
        commit(self.state_XSHVK, self.slots_B, self.accepted_B, self.factors, **options)
        after = self.state_XSHVK.clone()
        for slot, count in zip(self.slots, self.accepted, strict=True):
            if slot >= 0 and count > 0:
                expected_base[:, slot] = after[:, slot]
        # Other slots, padding of the pool, and requests that accept nothing.
        assert_bits(base, expected_base)
        for found, expected in zip(
            (self.factors.key_XRHTK, self.factors.update_XRHTV, self.factors.decay_XRHT),
            held,
            strict=True,
        ):
            assert_bits(found, expected)
        self.state_XSHVK.copy_(before)
        return after

    def check(self, **options) -> None:
        """Every state against the rows taken one by one in float64."""
        after = self.run(**options)
        errors = []
        for x, inputs in enumerate(self.inputs):
            for i, (slot, count) in enumerate(zip(self.slots, self.accepted, strict=True)):
                if slot >= 0 and count > 0:
                    _, states = inputs.reference(i, count, self.state_XSHVK[x, slot])
                    errors.append(head_errors(after[x, slot], states[count]))
        if errors:
            cast = rounding(after) if after.dtype == BF16 else 0.0
            assert_accurate(torch.cat(errors), cast)


@pytest.mark.parametrize("rows", range(1, 17))
def test_every_prefix(device, rows):
    """All accepted counts 0..T as requests of one batch, in two layers at once."""
    case = Round(device, rows, range(rows + 1), regime=REGIMES[rows % 5], seed=rows)
    case.check(**quick(device))


@pytest.mark.parametrize("state", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("regime", REGIMES)
def test_gate_regimes(device, regime, state):
    case = Round(device, 16, [16, 7, 1], value_heads=2, regime=regime, state=state, seed=1)
    case.check(**quick(device))


@pytest.mark.parametrize("heads", [(1, 1), (1, 4), (3, 3), (2, 4), (16, 32), (32, 32)], ids=str)
def test_heads(device, heads):
    case = Round(device, 5, [4], key_heads=heads[0], value_heads=heads[1], seed=2)
    case.check(**quick(device))


@pytest.mark.parametrize(("value_block", "warps"), VARIANTS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_dims_and_variants(device, key_dim, value_dim, value_block, warps):
    case = Round(
        device,
        16,
        [16, 9],
        value_heads=2,
        key_dim=key_dim,
        value_dim=value_dim,
        state=BF16 if key_dim == 64 else FP32,
        seed=value_block,
    )
    case.check(value_block=value_block, warps=warps)


@pytest.mark.parametrize("state", [FP32, BF16], ids=["fp32", "bf16"])
def test_nothing_accepted_leaves_every_bit(device, state):
    """NaNs with a payload, a negative zero and denormals in the states themselves."""
    case = Round(device, 8, [0, 0, 0], state=state, value_heads=2)
    for slot in case.slots:
        poison(case.state_XSHVK[:, slot, :, ::2])
        case.state_XSHVK[:, slot, :, 1] = -0.0
        case.state_XSHVK[:, slot, :, 3] = 1e-40
    before = case.state_XSHVK.clone()
    assert_bits(case.run(**quick(device)), before)


def test_padding_is_left_alone(device):
    """Slot 0, to which -1 would be clamped, keeps its bits whatever padding accepts."""
    Round(device, 8, [3, 8, 0, 2], slots=[4, -1, -1, 1], seed=3).check(**quick(device))


def test_counts_below_zero_count_as_nothing(device):
    Round(device, 8, [-1, 2, -(2**31)], seed=4).check(**quick(device))


def test_bf16_states_are_off_by_the_cast_only(device):
    case = Round(device, 16, [16, 5], value_heads=2, state=BF16, seed=5)
    after = case.run(**quick(device))
    for x, inputs in enumerate(case.inputs):
        for i, (slot, count) in enumerate(zip(case.slots, case.accepted, strict=True)):
            _, states = inputs.reference(i, count, case.state_XSHVK[x, slot])
            exact = states[count]
            bound = exact.abs() * 1.001 * rounding(after) + 3e-6
            assert ((after[x, slot].double() - exact).abs() <= bound).all()


def test_launches_agree_bit_by_bit_and_with_a_layer_alone(device):
    case = Round(device, 16, [16, 3], layers=3, value_heads=2, seed=6)
    first = case.run(**quick(device))
    assert_bits(case.run(**quick(device)), first)
    f = case.factors
    alone = Factors(f.key_XRHTK[1:2], f.update_XRHTV[1:2], f.decay_XRHT[1:2])
    commit(case.state_XSHVK[1:2], case.slots_B, case.accepted_B, alone, **quick(device))
    assert_bits(case.state_XSHVK[1], first[1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value_heads", [1, 4])
def test_any_prefix_of_what_verify_wrote(device, form, value_heads):
    """Several layers verified one by one, committed in one launch, every count at once."""
    rows, layers = 11, 3
    case = Round(
        device,
        rows,
        range(rows + 1) if value_heads == 1 else [0, 4, 11],
        layers=layers,
        value_heads=value_heads,
        seed=7,
    )
    f = case.factors
    for x in (f.key_XRHTK, f.update_XRHTV, f.decay_XRHT):
        poison(x)
    batch = len(case.slots)
    lengths_B = int32([rows] * batch, device)
    for x, inputs in enumerate(case.inputs):
        out = torch.empty(batch, rows, value_heads, 64, device=device)
        arguments = (case.state_XSHVK[x], case.slots_B, lengths_B, f, x, out)
        FORMS[form](*inputs.tensors(), *arguments, key_heads=1, **quick(device))
    case.check(**quick(device))


def test_naive_twin_agrees_with_row_by_row_states(device):
    case = Round(device, 16, [16], layers=1, value_heads=2, seed=8)
    f = case.factors
    state = case.state_XSHVK[0, case.slots[0]].double()
    _, states = case.inputs[0].reference(0, 16, state)
    for n in range(17):
        found = naive_commit(
            state,
            f.key_XRHTK[0, 0, :, :n].transpose(0, 1),
            f.update_XRHTV[0, 0, :, :n],
            f.decay_XRHT[0, 0, :, :n],
        )
        assert head_errors(found, states[n]).max() < 1e-6


@pytest.mark.parametrize("pool", [FP32, BF16], ids=["fp32", "bf16"])
def test_conv_windows_advance_in_the_same_launch(device, pool):
    """Windows as the conv family's own commit moves them, states as without windows."""
    case = Round(device, 8, [3, 0, 8, 5, 1], slots=[1, 3, 2, -1, 6], value_heads=2, seed=9)
    alone = case.run(**quick(device))
    generator = torch.Generator().manual_seed(9)
    channels = 300
    wide_XSCW = poison(torch.empty(2, 9, channels, 4, dtype=pool)).to(device)
    pool_XSCW = wide_XSCW[..., :3]
    for slot in (1, 3, 2, 6):
        values = torch.randn(2, channels, 3, generator=generator).to(BF16)
        pool_XSCW[:, slot] = values.to(device, pool)
    wide_XRTC = torch.randn(2, 6, 8, channels + 20, generator=generator).to(device, BF16)
    raw_XRTC = wide_XRTC[..., 20:]
    for i, count in enumerate(case.accepted):
        raw_XRTC[:, i, count:] = torch.nan
    expected = wide_XSCW.clone()
    expected[..., :3] = conv_naive.commit(pool_XSCW, raw_XRTC, case.slots_B, case.accepted_B)
    after = case.run(windows=ConvWindows(pool_XSCW, raw_XRTC), **quick(device))
    assert_bits(wide_XSCW, expected)
    assert_bits(after, alone)


def test_factor_rows_in_any_order(device):
    case = Round(device, 16, [16, 5, 9], value_heads=2, seed=10)
    expected = case.run(**quick(device))
    order = torch.tensor([2, 3, 0, 1], device=device)
    f = case.factors
    case.factors = Factors(*(x[:, order] for x in (f.key_XRHTK, f.update_XRHTV, f.decay_XRHT)))
    found = case.run(factor_rows_B=int32([2, 3, 0], device), **quick(device))
    assert_bits(found, expected)


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_call(device, data):
    rows = data.draw(st.integers(1, 16), label="rows")
    accepted = data.draw(st.lists(st.integers(0, rows), min_size=1, max_size=4), label="accepted")
    order = data.draw(st.permutations(range(len(accepted) + 3)), label="slots")
    slots = [slot - 1 if slot else -1 for slot in order[: len(accepted)]]
    Round(
        device,
        rows,
        accepted,
        slots=slots,
        layers=data.draw(st.integers(1, 3), label="layers"),
        value_heads=data.draw(st.sampled_from([1, 2]), label="value heads"),
        regime=data.draw(st.sampled_from(REGIMES), label="regime"),
        state=data.draw(st.sampled_from([FP32, BF16]), label="state"),
        seed=data.draw(st.integers(0, 2**16), label="seed"),
    ).check(**quick(device))
