"""Conv windows: verify and commit against plain torch and float64."""

# pyright: reportCallIssue=false
from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from conv_window_kit import BF16, FP32, NAN, Case, assert_bits, assert_rounded_alike
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import UsageError
from hybridspec.kernels.conv_window import naive
from hybridspec.kernels.conv_window.commit import commit, commit_window
from hybridspec.kernels.conv_window.verify import verify

SHAPES = [
    pytest.param(1, 16, 256, id="one-request"),
    pytest.param(3, 16, 200, id="channels-no-multiple"),
    pytest.param(2, 5, 40, id="five-rows"),
    pytest.param(1, 1, 64, id="one-row"),
    pytest.param(2, 4, 72, id="four-rows"),
]


@pytest.mark.parametrize(("batch", "rows", "channels"), SHAPES)
@pytest.mark.parametrize("pool", [BF16, FP32])
def test_verify_ragged(device, batch, rows, channels, pool):
    case = Case(device, batch, rows, channels, pool=pool, bias=rows % 2 == 0)
    lengths_B = case.indices([(rows * (i + 1)) // batch for i in range(batch)])
    lengths_B[0] = max(rows - 2, 0)
    for i, length in enumerate(lengths_B.tolist()):
        case.rows_BTC[i, length:] = NAN
    before = case.pool_SCW.clone()
    out, raw = case.poisoned(), case.poisoned()
    found = verify(
        case.rows_BTC,
        case.pool_SCW,
        case.weight_CW,
        case.slots_B,
        lengths_B,
        bias_C=case.bias_C,
        out=out,
        raw_out=raw,
    )
    assert found is out
    assert_rounded_alike(out, case.naive(lengths_B))
    assert_bits(case.pool_SCW, before)
    for i, length in enumerate(lengths_B.tolist()):
        assert_bits(raw[i, :length], case.rows_BTC[i, :length])
        assert raw[i, length:].eq(0).all()
        assert out[i, length:].eq(0).all()


@pytest.mark.parametrize("length", range(17))
def test_verify_every_length_against_float64(device, length):
    case = Case(device, 1, 16, 48, dtype=FP32, pool=FP32, seed=length)
    lengths_B = case.indices([length])
    exact = case.naive(lengths_B, dtype=torch.float64)
    case.rows_BTC[:, length:] = NAN
    found = verify(
        case.rows_BTC,
        case.pool_SCW,
        case.weight_CW,
        case.slots_B,
        lengths_B,
        bias_C=case.bias_C,
        out=case.poisoned(),
    )
    torch.testing.assert_close(found.double(), exact, rtol=3e-6, atol=3e-6)


def test_verify_bf16_error_against_float64_is_that_of_its_roundings(device):
    case = Case(device, 2, 16, 200)
    lengths_B = case.indices([16, 16])
    exact = case.naive(lengths_B, dtype=torch.float64)
    found = verify(
        case.rows_BTC, case.pool_SCW, case.weight_CW, case.slots_B, lengths_B, bias_C=case.bias_C
    )
    sizes = Case(device, 2, 16, 200)
    for name in ("rows_BTC", "pool_SCW", "weight_CW"):
        setattr(sizes, name, getattr(sizes, name).abs())
    # A product is off by at most 2^-8 of itself, silu has slopes up to 1.1, the output rounds once.
    taps = sum(
        torch.cat([sizes.pool_SCW[sizes.slots_B.long()].transpose(1, 2), sizes.rows_BTC], 1)[
            :, j : j + 16
        ].double()
        * sizes.weight_CW[:, j].double()
        for j in range(4)
    )
    assert ((found.double() - exact).abs() <= 2**-8 * (1.1 * taps + exact.abs()) + 1e-6).all()


def test_padding_writes_zeros_and_nothing_else(device):
    case = Case(device, 3, 16, 200)
    case.slots_B[1] = -1
    case.rows_BTC[1] = NAN
    lengths_B = case.indices([16, 16, 3])
    raw = torch.full_like(case.rows_BTC, 7.0).contiguous()
    out = verify(
        case.rows_BTC,
        case.pool_SCW,
        case.weight_CW,
        case.slots_B,
        lengths_B,
        bias_C=case.bias_C,
        out=case.poisoned(),
        raw_out=raw,
    )
    assert out[1].eq(0).all()
    assert raw[1].eq(7).all()
    assert_rounded_alike(out, case.naive(lengths_B))
    pool_LSCW = case.pool_SCW[None].clone()
    commit(pool_LSCW, raw[None], case.slots_B, case.indices([0, 16, 0]))
    assert_bits(pool_LSCW[0], case.pool_SCW)


def test_strides(device):
    """Transposed weights, a pool with gaps, a sliced output: nothing beside them is touched."""
    case = Case(device, 2, 16, 96)
    lengths_B = case.indices([9, 16])
    expected = case.naive(lengths_B)
    wide_pool = torch.full((5, 100, 5), NAN, device=device, dtype=BF16)
    pool_SCW = wide_pool[:, 2:98, 1:4]
    pool_SCW.copy_(case.pool_SCW)
    wide_out = torch.full((2, 16, 128), 7.0, device=device, dtype=BF16)
    verify(
        case.rows_BTC,
        pool_SCW,
        case.weight_CW.T.contiguous().T,
        case.slots_B.long(),
        lengths_B.long(),
        bias_C=case.bias_C,
        out=wide_out[..., 16:112],
    )
    assert_rounded_alike(wide_out[..., 16:112], expected)
    assert wide_out[..., :16].eq(7).all()
    assert wide_out[..., 112:].eq(7).all()
    pool_LSCW = wide_pool.unflatten(0, (1, 5))[:, :, 2:98, 1:4]
    commit(pool_LSCW, case.rows_BTC[None], case.slots_B, case.indices([2, 16]))
    after = naive.commit(
        case.pool_SCW[None], case.rows_BTC[None], case.slots_B, case.indices([2, 16])
    )
    assert_bits(pool_LSCW.contiguous(), after)
    assert wide_pool.isnan().sum() == 5 * (100 * 5 - 96 * 3)


@pytest.mark.parametrize("pool", [BF16, FP32])
@pytest.mark.parametrize("channels", [200, 512])
def test_commit_every_count(device, channels, pool):
    """All counts 0..16 in one launch over two layers, requests in permuted slots."""
    torch.manual_seed(1)
    slots_B = torch.randperm(20)[:17].to(device, torch.int32)
    slots_B[3] = -1
    pool_LSCW = torch.randn(2, 20, channels, 3, device=device).to(BF16).to(pool)
    raw_LBTC = torch.randn(2, 17, 16, channels, device=device).to(BF16)
    accepted_B = torch.arange(17, device=device, dtype=torch.int32)
    for request in range(17):
        raw_LBTC[:, request, request:] = NAN
    before = pool_LSCW.clone()
    commit(pool_LSCW, raw_LBTC, slots_B, accepted_B)
    assert_bits(pool_LSCW, naive.commit(before, raw_LBTC, slots_B, accepted_B))
    assert_bits(pool_LSCW[:, slots_B[0]], before[:, slots_B[0]])
    assert not pool_LSCW.isnan().any()


def test_counts_past_the_rows_count_as_all_rows(device):
    pool_LSCW = torch.randn(1, 2, 64, 3, device=device)
    raw_LBTC = torch.randn(1, 1, 4, 64, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    expected = naive.commit(pool_LSCW, raw_LBTC, zero, zero + 4)
    commit(pool_LSCW, raw_LBTC, zero, zero + 9)
    assert_bits(pool_LSCW, expected)


@triton.jit
def _shared_grid_kernel(p_pool, p_raw, p_other, count, C: tl.constexpr, BLOCK: tl.constexpr):
    """A grid whose first programs commit windows and whose last one does something else."""
    i = tl.program_id(0)
    if i * BLOCK < C:
        o_c = i * BLOCK + tl.arange(0, BLOCK)
        commit_window(p_pool, p_raw, count, o_c, o_c < C, C, 3, 1)
    else:
        tl.store(p_other, 7.0)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 16])
def test_commit_window_inside_another_grid(device, count):
    window_CW = torch.randn(200, 3, device=device).to(BF16)
    raw_TC = torch.randn(16, 200, device=device).to(BF16)
    other = torch.zeros(1, device=device)
    expected = naive.next_window(window_CW, raw_TC[:count])
    _shared_grid_kernel[(3,)](window_CW, raw_TC, other, count, C=200, BLOCK=128, num_warps=4)
    assert_bits(window_CW, expected)
    assert other.item() == 7


@pytest.mark.parametrize("pool", [BF16, FP32])
def test_chain_equals_plain_decoding(device, pool):
    """200 rounds of random lengths and acceptance, windows bit-equal to one token at a time."""
    channels, batch, rounds = 24, 2, 200
    # In the interpreter a launch takes long: the conv is looked at in some rounds only.
    every = 1 if device.type == "cuda" else 25
    case = Case(device, batch, 16, channels, pool=pool)
    generator = torch.Generator().manual_seed(5)
    pool_LSCW = case.pool_SCW[None].clone()
    windows = [case.pool_SCW[slot].clone() for slot in case.slots_B.tolist()]
    for i in range(rounds):
        lengths = torch.randint(0, 17, (batch,), generator=generator)
        accepted = (torch.rand(batch, generator=generator) * (lengths + 1)).long().tolist()
        raw_LBTC = torch.randn(1, batch, 16, channels, generator=generator).to(device, BF16)
        if i % every == 0:
            rows_BTC, raw_LBTC = raw_LBTC[0], torch.full_like(raw_LBTC, NAN)
            out = verify(
                rows_BTC,
                pool_LSCW[0],
                case.weight_CW,
                case.slots_B,
                case.indices(lengths.tolist()),
                bias_C=case.bias_C,
                raw_out=raw_LBTC[0],
            )
            for request, count in enumerate(accepted):
                window_CW = windows[request]
                for t in range(count):
                    row_C = rows_BTC[request, t]
                    plain_C = naive.conv_row(window_CW, row_C, case.weight_CW, case.bias_C)
                    torch.testing.assert_close(out[request, t], plain_C, rtol=2**-7, atol=1e-6)
                    window_CW = naive.next_window(window_CW, row_C[None])
        commit(pool_LSCW, raw_LBTC, case.slots_B, case.indices(accepted))
        for request, count in enumerate(accepted):
            for t in range(count):
                windows[request] = naive.next_window(
                    windows[request], raw_LBTC[0, request, t : t + 1]
                )
            assert_bits(pool_LSCW[0, case.slots_B[request]], windows[request])
    untouched = [s for s in range(batch + 3) if s not in case.slots_B.tolist()]
    assert_bits(pool_LSCW[0, untouched], case.pool_SCW[untouched])


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_rows_do_not_depend_on_length_or_company(device, data):
    """A row has the same bits alone, in a longer block and beside other requests."""
    rows = data.draw(st.integers(1, 16))
    case = Case(device, 2, rows, 32, seed=data.draw(st.integers(0, 99)))
    lengths = [data.draw(st.integers(0, rows)) for _ in range(2)]
    arguments = (case.pool_SCW, case.weight_CW)
    together = verify(
        case.rows_BTC, *arguments, case.slots_B, case.indices(lengths), bias_C=case.bias_C
    )
    full = case.indices([rows])
    for i, length in enumerate(lengths):
        alone = verify(
            case.rows_BTC[i : i + 1], *arguments, case.slots_B[i : i + 1], full, bias_C=case.bias_C
        )
        assert_bits(together[i, :length], alone[0, :length])


def test_empty_batch(device):
    case = Case(device, 1, 16, 64)
    none = case.indices([])
    assert verify(case.rows_BTC[:0], case.pool_SCW, case.weight_CW, none, none).shape == (0, 16, 64)
    commit(case.pool_SCW[None], case.rows_BTC[None, :0], none, none)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"weight_CW": torch.zeros(64, 3, dtype=BF16)}, "no other width", id="width-3"),
        pytest.param({"weight_CW": torch.zeros(64, 4)}, "must agree", id="weight-dtype"),
        pytest.param({"weight_CW": torch.zeros(60, 4, dtype=BF16)}, "do not fit", id="channels"),
        pytest.param({"pool_SCW": torch.zeros(4, 64, 2, dtype=BF16)}, "width 4", id="columns"),
        pytest.param({"pool_SCW": torch.zeros(4, 64, 3).half()}, "bfloat16 or float32", id="pool"),
        pytest.param(
            {"rows_BTC": torch.zeros(1, 16, 64), "weight_CW": torch.zeros(64, 4)},
            "must not lose bits",
            id="narrow-pool",
        ),
        pytest.param({"rows_BTC": torch.zeros(1, 17, 64, dtype=BF16)}, "1 to 16", id="rows"),
        pytest.param({"rows_BTC": torch.zeros(16, 64, dtype=BF16)}, "3 dimensions", id="flat"),
        pytest.param({"rows_BTC": torch.zeros(1, 64, 16, dtype=BF16).mT}, "must be 1", id="stride"),
        pytest.param({"slots_B": torch.zeros(1)}, "one int32 or int64", id="slots"),
        pytest.param({"out": torch.zeros(1, 16, 64)}, "allocate it so", id="out"),
    ],
)
def test_refusals(device, change, message):
    arguments = {
        "rows_BTC": torch.zeros(1, 16, 64, dtype=BF16),
        "pool_SCW": torch.zeros(4, 64, 3, dtype=BF16),
        "weight_CW": torch.zeros(64, 4, dtype=BF16),
        "slots_B": torch.zeros(1, dtype=torch.int32),
        "lengths_B": torch.zeros(1, dtype=torch.int32),
        **change,
    }
    with pytest.raises(UsageError, match=message):
        verify(**arguments)


def test_commit_refuses_other_layers(device):
    case = Case(device, 1, 4, 48)
    with pytest.raises(UsageError, match="2 layers"):
        commit(case.pool_SCW.expand(2, -1, -1, -1), case.rows_BTC[None], case.slots_B, case.slots_B)
