"""Selection kernels on the GPU: the bits of the host, alone and in a captured round."""

from __future__ import annotations

# Arguments are spread from lists whose lengths a checker cannot see.
# pyright: reportCallIssue=false
from typing import Any

import numpy as np
import pytest
import select_kit as kit
import torch

from hybridspec.kernels.route_mask.route_mask import route_mask
from hybridspec.kernels.select import naive
from hybridspec.kernels.select.correct import correct
from hybridspec.kernels.select.joint import select_jointly
from hybridspec.kernels.select.select import select
from hybridspec.kernels.select.tables import DeviceTables

pytestmark = pytest.mark.gpu
HOST = torch.device("cpu")


def round_inputs(seed: int, count: int, tables_count: int) -> tuple[list[torch.Tensor], Any]:
    g = np.random.default_rng(seed)
    tables = kit.random_tables(g, tables_count, HOST, knots=16, batches=3, contexts=5)
    inputs = [
        *kit.random_signals(g, count, HOST),
        kit.ints(g.integers(0, 9000, count), HOST),
        kit.ints(g.integers(0, 17, count), HOST),
        kit.ints([3], HOST),
    ]
    return inputs, tables


def on(device: torch.device, tables: DeviceTables) -> DeviceTables:
    values = tables.values_TP.to(device)
    return DeviceTables(values, tables.knots, tables.batches, tables.contexts)


@pytest.mark.parametrize("per_program", [1, 2, 8])
def test_select_and_correct_give_the_bits_of_the_host(cuda: torch.device, per_program: int) -> None:
    count = 100_000
    inputs, tables = round_inputs(1, count, count)
    on_gpu = [x.to(cuda) for x in inputs]
    got = select(
        *on_gpu,
        on(cuda, tables),
        out=kit.poisoned(count, cuda),
        requests_per_program=per_program,
    )
    expected = naive.select(*inputs, tables)
    for found, twin in zip(kit.columns(got), expected, strict=True):
        kit.assert_same_bits(found.cpu(), twin)
    g = np.random.default_rng(2)
    experts = kit.ints(g.integers(-1, 66, (count, 16, 4)), HOST)
    lengths, _, score, _, price, fallback = expected
    twin = naive.correct(
        experts, lengths, score, price, fallback, inputs[4], tables, num_experts=64
    )
    final = correct(
        experts.to(cuda),
        got,
        on_gpu[4],
        on(cuda, tables),
        num_experts=64,
        requests_per_program=per_program,
    )
    kit.assert_same_bits(final[0].cpu(), twin[0])
    kit.assert_same_bits(final[1].cpu(), twin[1])


@pytest.mark.parametrize("count", [1, 4, 13, 32, 64])
def test_joint_select_gives_the_bits_of_the_host(cuda: torch.device, count: int) -> None:
    for seed in range(20):
        inputs, tables = round_inputs(seed, count, 1)
        got = select_jointly(*(x.to(cuda) for x in inputs), on(cuda, tables))
        for found, twin in zip(
            kit.columns(got), naive.select_jointly(*inputs, tables), strict=True
        ):
            kit.assert_same_bits(found.cpu(), twin)


def test_a_captured_round_follows_its_inputs(cuda: torch.device) -> None:
    """Select, correct and route mask in one graph, replayed over new signals, caps and tables."""
    count, tables = 5, on(cuda, round_inputs(0, 5, 1)[1])
    buffers = [x.to(cuda) for x in round_inputs(0, count, 1)[0]]
    out = kit.poisoned(count, cuda)
    final = torch.empty_like(out.lengths_B), torch.empty(count, 16, dtype=torch.int32, device=cuda)
    experts = torch.zeros(count, 16, 8, dtype=torch.int32, device=cuda)
    weights = torch.zeros(count, 16, 8, device=cuda)

    def launches() -> None:
        select(*buffers, tables, out=out)
        correct(experts, out, buffers[4], tables, num_experts=256, out=final)
        route_mask(experts.view(-1, 8), weights.view(-1, 8), final[0])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    g = np.random.default_rng(9)
    for seed in range(1, 30):
        fresh, fresh_tables = round_inputs(seed, count, 1)
        for buffer, values in zip(buffers, fresh, strict=True):
            buffer.copy_(values)
        tables.values_TP.copy_(fresh_tables.values_TP)
        ids = kit.ints(g.integers(0, 256, (count, 16, 8)), HOST)
        experts.copy_(ids)
        weights.fill_(float("nan"))
        graph.replay()
        expected = naive.select(*fresh, fresh_tables)
        for found, twin in zip(kit.columns(out), expected, strict=True):
            kit.assert_same_bits(found.cpu(), twin)
        lengths, _, score, _, price, fallback = expected
        twin = naive.correct(
            ids, lengths, score, price, fallback, fresh[4], fresh_tables, num_experts=256
        )
        kit.assert_same_bits(final[0].cpu(), twin[0])
        masked = torch.arange(16)[None, :] >= twin[0][:, None]
        assert bool((weights.cpu()[masked] == 0.0).all())
        assert torch.equal(experts.cpu()[~masked], ids[~masked])
