"""Conv windows on a GPU: full shapes, graphs, dependent launches, SGLang's own bits."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_window_kit import BF16, NAN, Gated, assert_bits, assert_rounded_alike

from hybridspec.kernels.conv_window import naive
from hybridspec.kernels.conv_window.commit import commit
from hybridspec.kernels.conv_window.prepare import prepare
from hybridspec.kernels.conv_window.verify import verify

pytestmark = pytest.mark.gpu

HEADS: dict[str, Any] = {"num_key_heads": 16, "head_dim": 128}
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def full(cuda, batch, rows, **options) -> Gated:
    return Gated(cuda, batch, rows, 16, 32, 128, **options)


@pytest.mark.parametrize("rows", [1, 4, 8, 11, 16])
@pytest.mark.parametrize("batch", [1, 4])
def test_full_shape(cuda, batch, rows):
    case = full(cuda, batch, rows, seed=rows)
    lengths_B = case.indices([rows, 0, rows // 2, rows - 1][:batch])
    for i, length in enumerate(lengths_B.tolist()):
        case.rows_BTC[i, length:] = NAN
    raw = case.poisoned()
    found = prepare(
        *case.arguments(lengths_B),
        **HEADS,
        bias_C=case.bias_C,
        out=case.outputs(),
        raw_out=raw,
    )
    expected = naive.prepare(*case.arguments(lengths_B), **HEADS, bias_C=case.bias_C)
    for value, reference in zip(found[:3], expected[:3], strict=True):
        assert_rounded_alike(value, reference)
    for value, reference in zip(found[3:5], expected[3:5], strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)
    # A neighbouring rounding of one large value of a head moves its norm.
    for value, reference in zip(found[5:], expected[5:], strict=True):
        torch.testing.assert_close(value, reference, rtol=2e-3, atol=0.0)
    mixed = verify(*case.ungated(lengths_B), bias_C=case.bias_C, out=case.poisoned())
    assert_bits(torch.cat([x.flatten(2) for x in found[:3]], dim=-1), mixed)
    for i, length in enumerate(lengths_B.tolist()):
        assert_bits(raw[i, :length], case.rows_BTC[i, :length])
        assert raw[i, length:].eq(0).all()


def test_graph_reads_lengths_slots_and_counts_on_the_device(cuda):
    case = full(cuda, 4, 16)
    lengths_B, accepted_B = case.indices([16] * 4), case.indices([1] * 4)
    slots_B, raw = case.slots_B.clone(), case.poisoned()
    pool_LSCW, out = case.pool_SCW[None].clone(), case.outputs()

    def round_() -> None:
        prepare(
            case.rows_BTC,
            pool_LSCW[0],
            case.weight_CW,
            slots_B,
            lengths_B,
            case.a_BTH,
            case.b_BTH,
            case.a_log_H,
            case.dt_bias_H,
            **HEADS,
            out=out,
            raw_out=raw,
        )
        commit(pool_LSCW, raw[None], slots_B, accepted_B)

    round_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_()
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        lengths = torch.randint(0, 17, (4,), generator=generator)
        accepted = (torch.rand(4, generator=generator) * (lengths + 1)).int()
        slots = torch.randperm(7, generator=generator)[:4].int()
        slots[3] = -1
        for target, values in ((lengths_B, lengths), (accepted_B, accepted), (slots_B, slots)):
            target.copy_(values)
        before = pool_LSCW.clone()
        for value in out:
            value.fill_(NAN)
        graph.replay()
        expected = naive.verify(case.rows_BTC, before[0], case.weight_CW, slots_B, lengths_B)
        found = torch.cat([x.flatten(2) for x in out[:3]], dim=-1)
        assert_rounded_alike(found, expected)
        assert_bits(pool_LSCW, naive.commit(before, case.rows_BTC[None], slots_B, accepted_B))


def test_dependent_launches_keep_the_order(cuda):
    """Rounds of dependent launches, each reading what the one ahead wrote, as without."""
    if torch.cuda.get_device_capability(cuda) < (9, 0):
        pytest.skip("dependent launch needs Hopper or later")
    case = full(cuda, 4, 16)
    lengths_B, accepted_B = case.indices([16, 9, 1, 5]), case.indices([16, 2, 1, 0])
    ends = []
    for dependent in (False, True):
        pool_LSCW, raw = case.pool_SCW[None].clone(), case.poisoned()
        rows = case.rows_BTC.contiguous()
        options = {"bias_C": case.bias_C, "dependent_launch": dependent}
        out = torch.empty_like(rows)
        for _ in range(60):
            # The output of one round is the input of the next.
            verify(
                rows,
                pool_LSCW[0],
                case.weight_CW,
                case.slots_B,
                lengths_B,
                out=out,
                raw_out=raw,
                **options,
            )
            commit(pool_LSCW, raw[None], case.slots_B, accepted_B, dependent_launch=dependent)
            rows, out = out, rows
        ends.append((pool_LSCW, rows))
    assert_bits(ends[1][0], ends[0][0])
    assert_bits(ends[1][1], ends[0][1])


def test_chain_of_full_width(cuda):
    """200 rounds over two layers: windows bit-equal to taking one token at a time."""
    torch.manual_seed(4)
    pool_LSCW = torch.randn(2, 9, 8192, 3, device=cuda).to(BF16)
    slots_B = torch.tensor([7, 2, 5, -1], dtype=torch.int32, device=cuda)
    expected = pool_LSCW.clone()
    for _ in range(200):
        raw_LBTC = torch.randn(2, 4, 16, 8192, device=cuda).to(BF16)
        accepted_B = torch.randint(0, 17, (4,), dtype=torch.int32, device=cuda)
        commit(pool_LSCW, raw_LBTC, slots_B, accepted_B)
        for t in range(16):
            step_B = (accepted_B > t).int()
            expected = naive.commit(expected, raw_LBTC[:, :, t : t + 1], slots_B, step_B)
    assert_bits(pool_LSCW, expected)


@pytest.mark.parametrize("rows", [4, 16])
def test_bits_of_sglang(cuda, rows):
    """Same rounding of products, same order of sums, same silu as the engine's own launch."""
    sys.path.insert(0, str(BENCHMARKS))
    launches, workload = (importlib.import_module(f"conv.{x}") for x in ("launches", "workload"))
    files = launches.sglang_files(hopper=torch.cuda.get_device_capability(cuda)[0] >= 9)
    if files is None:
        pytest.skip("sglang is not installed")
    w = workload.Workload(4, rows, cuda, layers=2, sets=1)
    pool_before = w.pool_NXSCW[0].clone()
    ours, stock = launches.Ours(w), launches.Stock(w, files)
    accepted_B = torch.tensor([1, 2, 3, rows], dtype=torch.int32, device=cuda)
    for x in range(2):
        mixed = torch.cat([v.flatten(2) for v in ours.prepare(0, x)[:3]], dim=-1).flatten(0, 1)
        assert_bits(ours.conv(0, x).flatten(0, 1), mixed)
        theirs = torch.cat([v.reshape(4 * rows, -1) for v in stock.conv_and_split(0, x)], dim=-1)
        assert_bits(mixed, theirs)
    stock.commit(0, accepted_B - 1)
    theirs = w.pool_NXSCW[0].clone()
    w.pool_NXSCW[0].copy_(pool_before)
    ours.commit(0, accepted_B)
    assert_bits(w.pool_NXSCW[0], theirs)
