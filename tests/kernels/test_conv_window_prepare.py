"""Conv, split, gates and norms in one launch, against plain torch and float64."""

from __future__ import annotations

import pytest
import torch
from conv_window_kit import BF16, FP32, NAN, Gated, assert_bits, assert_rounded_alike

from hybridspec.errors import UsageError
from hybridspec.kernels.conv_window import naive
from hybridspec.kernels.conv_window.prepare import prepare
from hybridspec.kernels.conv_window.verify import verify


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "value_heads", "dim"),
    [
        pytest.param(1, 16, 2, 4, 128, id="ratio-2"),
        pytest.param(3, 16, 1, 1, 64, id="ratio-1-ragged"),
        pytest.param(2, 6, 1, 4, 16, id="ratio-4-six-rows"),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_prepare(device, batch, rows, heads, value_heads, dim, dtype):
    case = Gated(
        device, batch, rows, heads, value_heads, dim, dtype=dtype, pool=dtype, bias=batch == 2
    )
    lengths_B = case.indices([rows - 3, rows, 0][:batch])
    if batch == 3:
        case.slots_B[2] = -1
    for i, length in enumerate(lengths_B.tolist()):
        for x in (case.rows_BTC, case.a_BTH, case.b_BTH):
            x[i, length:] = NAN
    options = {"num_key_heads": heads, "head_dim": dim}
    raw = torch.full_like(case.rows_BTC, 7.0).contiguous()
    found = prepare(
        *case.arguments(lengths_B), **options, bias_C=case.bias_C, out=case.outputs(), raw_out=raw
    )
    expected = naive.prepare(*case.arguments(lengths_B), **options, bias_C=case.bias_C)
    for name in ("q_BTHD", "k_BTHD", "v_BTHD"):
        assert_rounded_alike(getattr(found, name), getattr(expected, name))
    for name in ("g_BHT", "beta_BHT"):
        value, reference = getattr(found, name), getattr(expected, name)
        assert value.is_contiguous()
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)
    live_BT = torch.arange(rows, device=device) < lengths_B[:, None]
    live_BT = live_BT & (case.slots_B[:, None] >= 0)
    for norm, values in ((found.rq_BHT, found.q_BTHD), (found.rk_BHT, found.k_BTHD)):
        exact = (values.double().square().sum(-1) + 1e-6).rsqrt() * live_BT[..., None]
        torch.testing.assert_close(norm.double(), exact.transpose(1, 2), rtol=2e-6, atol=0.0)
    for i, length in enumerate(lengths_B.tolist()):
        kept = length if case.slots_B[i] >= 0 else 0
        assert_bits(raw[i, :kept], case.rows_BTC[i, :kept])
        assert raw[i, kept:].eq(0 if case.slots_B[i] >= 0 else 7).all()


def test_prepare_against_float64(device):
    case = Gated(device, 2, 16, 2, 2, 32, dtype=FP32, pool=FP32)
    lengths_B = case.indices([16, 7])
    options = {"num_key_heads": 2, "head_dim": 32}
    bias_C = case.bias_C
    assert bias_C is not None
    exact = naive.prepare(
        *case.arguments(lengths_B, lambda x: x.double()), **options, bias_C=bias_C.double()
    )
    found = prepare(*case.arguments(lengths_B), **options, bias_C=case.bias_C)
    for value, reference in zip(found, exact, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=1e-6)


def test_prepare_and_verify_agree_bit_for_bit(device):
    case = Gated(device, 2, 9, 1, 2, 32)
    lengths_B = case.indices([6, 9])
    found = prepare(*case.arguments(lengths_B), num_key_heads=1, head_dim=32, bias_C=case.bias_C)
    mixed = verify(*case.ungated(lengths_B), bias_C=case.bias_C)
    parts = [x.flatten(2) for x in (found.q_BTHD, found.k_BTHD, found.v_BTHD)]
    assert_bits(torch.cat(parts, dim=-1), mixed)


def test_extreme_gates(device):
    case = Gated(device, 1, 16, 1, 2, 16)
    case.a_BTH.copy_(torch.linspace(-300, 300, 32).view(1, 16, 2))
    case.b_BTH.copy_(torch.linspace(-200, 200, 32).view(1, 16, 2))
    lengths_B = case.indices([16])
    options = {"num_key_heads": 1, "head_dim": 16}
    found = prepare(*case.arguments(lengths_B), **options)
    exact = naive.prepare(*case.arguments(lengths_B, lambda x: x.double()), **options)
    # log(1 + exp(x)) in fp32 loses what is below 6e-8 of 1, as the engine's does.
    torch.testing.assert_close(found.g_BHT.double(), exact.g_BHT, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found.beta_BHT.double(), exact.beta_BHT, rtol=1e-5, atol=1e-30)


def test_prepare_refuses(device):
    case = Gated(device, 1, 4, 1, 1, 16)
    arguments = case.arguments(case.indices([4]))
    with pytest.raises(UsageError, match="power of two"):
        prepare(*arguments, num_key_heads=1, head_dim=24)
    with pytest.raises(UsageError, match="do not hold"):
        prepare(*arguments, num_key_heads=2, head_dim=16)
