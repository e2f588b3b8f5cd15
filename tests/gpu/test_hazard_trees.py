"""Hazard trees on the GPU: the bits of the host, alone and in a captured round."""

from __future__ import annotations

# Arguments are spread from lists whose lengths a checker cannot see.
# pyright: reportCallIssue=false
import hazard_trees_kit as kit
import numpy as np
import pytest
import torch

from hybridspec.kernels.hazard_trees.state import HistoryState
from hybridspec.kernels.hazard_trees.trees import Hazards, hazard_trees

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch", [1, 7, 32])
def test_captured_rounds_equal_the_naive_twin(batch: int, cuda: torch.device) -> None:
    """One graph, its inputs overwritten every round: slots, counts and lengths change."""
    g = np.random.default_rng(batch)
    table = kit.random_trees(batch, trees=32, depth=5)
    host, there = kit.packed(table), kit.packed(table, cuda)
    slots = batch + 3
    expected_state = HistoryState.allocate(slots, "cpu", entries=64)
    state = HistoryState.allocate(slots, cuda, entries=64)
    inputs = kit.random_round(g, batch, slots, first=True).on(cuda)
    out = Hazards.allocate(batch, cuda)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        hazard_trees(*inputs, state, there, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        hazard_trees(*inputs, state, there, out=out)
    for slot in range(slots):
        state.reset(slot)
    for turn in range(12):
        r = kit.random_round(g, batch, slots, first=turn == 0)
        for buffer, values in zip(inputs, r.on(cuda), strict=True):
            buffer.copy_(values)
        out.hazards_BD.fill_(float("nan"))
        out.features_BLF.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        hazards, features = kit.naive_round(expected_state, host, r)
        assert torch.equal(out.features_BLF[:, :15].cpu(), features), turn
        assert torch.equal(out.hazards_BD.cpu(), hazards), turn
        assert kit.equal_states(state, expected_state), turn
