"""Lazy commit: rounds whose accepted rows the next verification folds in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gdn_cases import BF16, FP32, PAYLOAD, Case, assert_bits, int32, poison, quick
from gdn_chains import Chain, assert_no_drift
from gdn_kit import make_inputs

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.block import verify_block
from hybridspec.kernels.gdn.commit import commit
from hybridspec.kernels.gdn.factors import Factors
from hybridspec.kernels.gdn.pending import Pending, advance, flush

# Forms that fold pending rows in.
LAZY_FORMS: dict[str, Callable[..., None]] = {"block": verify_block}

# Of numpy in the interpreter, where NaN and inf lie past the length.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)


@pytest.mark.parametrize("form", LAZY_FORMS)
def test_chain(device, form):
    rounds = Chain(
        device,
        LAZY_FORMS[form],
        batch=2,
        layers=2,
        value_heads=1,
        lazy=True,
        verify_options=quick(device),
        seed=1,
    )
    for _ in range(30):
        rounds.round()
    assert_no_drift(rounds.output_errors)
    assert rounds.finish() < 3e-6
    # Flushed states stay as they are.
    before = rounds.state_XSHVK.clone()
    rounds.finish()
    assert_bits(rounds.state_XSHVK, before)


@pytest.mark.slow
@pytest.mark.parametrize("form", LAZY_FORMS)
@pytest.mark.parametrize("regime", ["nodecay", None])
def test_long_chain(device, form, regime):
    rounds = Chain(
        device,
        LAZY_FORMS[form],
        lazy=True,
        regime=regime,
        verify_options=quick(device),
    )
    for _ in range(200):
        rounds.round()
    assert_no_drift(rounds.output_errors)
    assert rounds.finish() < 3e-6


class Twice:
    """One layer verified twice: eager with a commit between, and lazy."""

    def __init__(self, device, form, state, accepted, second_slots=None) -> None:
        batch = len(accepted)
        slots = [2 * i + 1 for i in range(batch)]
        # The cases only lend their first inputs, pool and poison.
        case = Case.make(device, 8, [8] * batch, slots=slots, value_heads=2, state=state)
        generator = torch.Generator().manual_seed(9)
        second = make_inputs(generator, batch, 8, 1, 2, 64, 64, device=device)
        self.eager_SHVK = case.state_SHVK.contiguous()
        # Finite where a -1 would be clamped to: a NaN would keep its bits under arithmetic.
        self.eager_SHVK[0] = 0.5
        self.lazy_SHVK = self.eager_SHVK.clone()
        self.before_SHVK = self.eager_SHVK.clone()
        self.slots_B, self.accepted_B = case.slots_B, int32(accepted, device)
        self.second_slots_B = int32(second_slots or slots, device)
        self.pending = Pending.allocate(batch, device=device)
        self.factors = [
            Factors.allocate(1, rows, 1, 2, 64, 64, device=device) for rows in (batch, 2 * batch)
        ]
        self.outputs: list[torch.Tensor] = []
        for factors, pool, pending in zip(
            self.factors, (self.eager_SHVK, self.lazy_SHVK), (None, self.pending), strict=True
        ):
            for x in (factors.key_XRHTK, factors.update_XRHTV, factors.decay_XRHT):
                poison(x)
            for inputs, slots_B in ((case.inputs, self.slots_B), (second, self.second_slots_B)):
                out = torch.full((batch, 8, 2, 64), torch.nan, device=device)
                LAZY_FORMS[form](
                    *inputs.tensors(),
                    pool,
                    slots_B,
                    case.lengths_B,
                    factors,
                    0,
                    out,
                    key_heads=1,
                    pending=pending,
                    **quick(device),
                )
                if inputs is second:
                    continue
                if pending is None:
                    commit(pool[None], slots_B, self.accepted_B, factors, **quick(device))
                else:
                    assert_bits(pool, self.before_SHVK)
                    advance(pending, slots_B, self.accepted_B)
            self.outputs.append(out)


@pytest.mark.parametrize("form", LAZY_FORMS)
@pytest.mark.parametrize("state", [FP32, BF16], ids=["fp32", "bf16"])
def test_equals_a_commit_between(device, form, state):
    """States after the second verification, its outputs, and the bits of what nobody owns."""
    case = Twice(device, form, state, accepted=[8, 3, 0])
    if device.type == "cpu":
        assert_bits(case.lazy_SHVK, case.eager_SHVK)
        assert_bits(case.outputs[1], case.outputs[0])
    else:
        fp32 = state == FP32
        live = case.slots_B.long()
        torch.testing.assert_close(
            case.lazy_SHVK[live],
            case.eager_SHVK[live],
            rtol=1e-5 if fp32 else 8e-3,
            atol=1e-6 if fp32 else 1e-3,
        )
        torch.testing.assert_close(
            case.outputs[1],
            case.outputs[0],
            rtol=1e-4 if fp32 else 2e-2,
            atol=1e-5 if fp32 else 1e-3,
        )
    others = [s for s in range(case.lazy_SHVK.shape[0]) if s not in case.slots_B.tolist()]
    assert_bits(case.lazy_SHVK[others], case.before_SHVK[others])
    assert_bits(case.lazy_SHVK[case.slots_B[2]], case.before_SHVK[case.slots_B[2]])


@pytest.mark.parametrize("form", LAZY_FORMS)
def test_padding_keeps_what_is_pending(device, form):
    """A request that sits a round out: state, cursors and factors wait for its next round."""
    case = Twice(device, form, FP32, accepted=[5, 4], second_slots=[1, -1])
    for slot in (0, 3):
        assert_bits(case.lazy_SHVK[slot], case.before_SHVK[slot])
    assert case.outputs[1][1].eq(0).all()
    advance(case.pending, case.second_slots_B, int32([2, 7], device))
    assert case.pending.count_B.tolist() == [2, 4]
    assert case.pending.side_B.tolist() == [0, 1]
    flush(case.lazy_SHVK[None], int32([-1, 3], device), case.factors[1], case.pending)
    assert case.pending.count_B.tolist() == [2, 0]
    torch.testing.assert_close(case.lazy_SHVK[3], case.eager_SHVK[3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", LAZY_FORMS)
def test_a_round_writes_the_other_factor_row_only(device, form):
    case = Twice(device, form, FP32, accepted=[5, 4], second_slots=[1, -1])
    f = case.factors[1]
    # Row 0 of the second request was not written: it began on side 0, so its rows are on side 1.
    for x in (f.key_XRHTK, f.update_XRHTV, f.decay_XRHT):
        assert_bits(x[:, 2], poison(torch.empty_like(x[:, 2])))
        assert not x[0, 3, :, :8].isnan().any()
        assert not x[0, :2, :, :8].isnan().any()
    assert PAYLOAD[FP32] == int(f.decay_XRHT[0, 0, 0, 8].view(torch.int32))


def test_advance_touches_live_requests_of_its_batch_only(device):
    pending = Pending.allocate(5, device=device)
    pending.count_B.copy_(int32([1, 2, 3, 4, 5], device))
    pending.side_B.copy_(int32([0, 1, 1, 0, 1], device))
    advance(pending, int32([7, -1, 0], device), int32([0, 16, 16], device))
    assert pending.count_B.tolist() == [0, 2, 16, 4, 5]
    assert pending.side_B.tolist() == [1, 1, 0, 0, 1]


def test_too_few_factor_rows_are_refused(device):
    pending = Pending.allocate(2, device=device)
    with pytest.raises(UsageError, match="two factor rows a request"):
        pending.check(2, Factors.allocate(1, 3, 1, 1, 64, 64, device=device))
    with pytest.raises(UsageError, match="pending cursors for 2"):
        pending.check(3, Factors.allocate(1, 6, 1, 1, 64, 64, device=device))
