"""Attention of blocks on a GPU: shapes of real models, long contexts, graphs, SGLang's kernels."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from block_attention_kit import NAN, Case, assert_near

from hybridspec.kernels.block_attention.attention import Scratch, attend, num_splits

pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TARGET: dict[str, Any] = {"heads": 16, "kv_heads": 2, "dim": 256}
DRAFTER: dict[str, Any] = {"heads": 32, "kv_heads": 4, "dim": 128}


def is_dependent(cuda: torch.device) -> bool:
    return torch.cuda.get_device_capability(cuda) >= (9, 0)


@pytest.mark.parametrize(
    "contexts",
    [[0, 1, 63, 64, 65], [700], [4000, 5], [30000], [900] * 8],
    ids=lambda x: "-".join(map(str, x[:5])),
)
@pytest.mark.parametrize("name", ["target", "drafter"])
def test_shapes_of_real_models(cuda, name, contexts):
    case = Case(cuda, contexts, **(TARGET if name == "target" else DRAFTER))
    causal = name == "target"
    found = case.run(causal=causal, dependent_launch=is_dependent(cuda))
    assert_near(found, case.exact(causal=causal))


@pytest.mark.parametrize("context", [56, 700, 4088])
def test_bits_of_a_row_do_not_depend_on_the_length(cuda, context):
    case = Case(cuda, [context, context + 3], **TARGET)
    whole = case.run(causal=True, lengths_B=case.lengths(16, 16))
    for length in range(17):
        case.poison_scratch()
        found = case.run(causal=True, lengths_B=case.lengths(length, 16 - length))
        assert torch.equal(found[:length], whole[:length])
        assert found[length:16].eq(0).all()
        assert torch.equal(found[16 : 32 - length], whole[16 : 32 - length])
        assert found[32 - length :].eq(0).all()


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_bits_of_a_row_do_not_depend_on_the_batch(cuda, name):
    case = Case(cuda, [640, 4000, 17, 0], **(TARGET if name == "target" else DRAFTER))
    causal = name == "target"
    lengths_B = case.lengths(4, 16, 1, 9) if causal else None
    whole = case.run(causal=causal, lengths_B=lengths_B)
    for b in range(4):
        rows = slice(16 * b, 16 * b + 16)
        out = torch.full_like(case.q_RHD[rows], NAN)
        case.poison_scratch()
        attend(
            case.q_RHD[rows],
            case.keys_SGD,
            case.values_SGD,
            case.table_XP,
            case.requests_B[b : b + 1],
            case.starts_B[b : b + 1],
            case.scratch,
            out,
            scale=case.scale,
            causal=causal,
            lengths_B=None if lengths_B is None else lengths_B[b : b + 1],
        )
        assert torch.equal(out, whole[rows])


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_one_graph_serves_every_context_and_length(cuda, name):
    """Two layers in a graph, dependent launches: bits of launches one by one."""
    case = Case(cuda, [6000, 3000], **(TARGET if name == "target" else DRAFTER))
    causal = name == "target"
    lengths_B = case.lengths(16, 16)
    first, second = (torch.empty_like(case.q_RHD) for _ in range(2))

    def layers(dependent: bool) -> None:
        # The second layer asks with what the first found.
        for q, out in ((case.q_RHD, first), (first, second)):
            attend(
                q,
                case.keys_SGD,
                case.values_SGD,
                case.table_XP,
                case.requests_B,
                case.starts_B,
                case.scratch,
                out,
                scale=case.scale,
                causal=causal,
                lengths_B=lengths_B,
                dependent_launch=dependent,
            )

    layers(is_dependent(cuda))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(is_dependent(cuda))
    for contexts, lengths in (
        ((6000, 3000), (16, 16)),
        ((0, 1), (1, 0)),
        ((63, 2900), (4, 9)),
        ((700, 64), (3, 16)),
    ):
        # Rows behind the block are of the same request here, and finite.
        case.starts_B.copy_(torch.tensor(contexts))
        lengths_B.copy_(torch.tensor(lengths))
        for kept in (first, second):
            kept.fill_(NAN)
        case.poison_scratch()
        graph.replay()
        found = first.clone(), second.clone()
        exact = case.exact(causal=causal, lengths_B=lengths_B)
        assert_near(found[0], exact)
        case.poison_scratch()
        layers(False)
        assert torch.equal(found[0], first)
        assert torch.equal(found[1], second)


def test_more_requests_take_fewer_pieces(cuda):
    case = Case(cuda, [300] * 40, **TARGET)
    assert num_splits(40) == 4
    assert_near(case.run(causal=True), case.exact(causal=True))
    assert case.scratch.num_bytes < 80 << 20
    assert Scratch.allocate(4, 16, 16, 256, cuda).num_bytes < 80 << 20


@pytest.mark.parametrize("both_ways", [False, True], ids=["target", "drafter"])
def test_sglang_backend(cuda, both_ways):
    """The installed backend against what it did before; its graph without a refill at replay."""
    pytest.importorskip("sglang", reason="sglang is not installed")
    sys.path.insert(0, str(BENCHMARKS))
    made = importlib.import_module("sglang_target.attention")
    from hybridspec.sglang_plugin.round_state import RoundState
    from hybridspec.sglang_plugin.target import attention as plugin

    sizes = DRAFTER if both_ways else TARGET
    shape = made.AttentionShape(layers=3, requests=3, contexts=3000, both_ways=both_ways, **sizes)
    target = made.AttentionTarget(shape, cuda)
    target.fill()
    batch = target.batch([700, 3])
    q, k, v = target.rows(2)
    state = RoundState(4, cuda)

    def stock(installed: Any) -> list[torch.Tensor]:
        backend = target.backend
        ours = backend.forward_extend
        installed.out_graph_of_backend(batch, in_capture=True)
        backend.forward_extend = installed.forward_extend_of_backend
        outs = target.forward(q, k, v, batch)
        backend.forward_extend = ours
        return outs

    if both_ways:
        installed = plugin.install_drafter_attention(target.runner, state, enabled=True)
    else:
        installed = plugin.install_target_attention(
            target.runner,
            state,
            last_router_layer=-1,
            launches=plugin.LaunchOptions(),
            enabled=True,
        )
    assert installed is not None
    target.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    outs = target.forward(q, k, v, batch)
    for out, theirs in zip(outs, stock(installed), strict=True):
        assert_near(out, theirs.double())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = target.forward(q, k, v, batch)
    for contexts in ((2900, 700), (0, 65)):
        target.move(batch, contexts)
        # SGLang never writes the first one, which is 0.
        target.backend.kv_indptr[1:].fill_(-1)
        target.backend.init_forward_metadata_out_graph(batch)
        assert target.backend.kv_indptr[1:].eq(-1).all()
        graph.replay()
        found = [out.clone() for out in captured]
        for out, theirs in zip(found, stock(installed), strict=True):
            assert_near(out, theirs.double())
