"""The commit cut into launches of a few layers changes no bit, and how it is cut."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")
sys.path.insert(0, str(Path(__file__).parent))

from lookalike import Engine

from hybridspec.errors import UsageError
from hybridspec.sglang_plugin.commit_graphs import (
    CommitGraphs,
    SliceOptions,
    commit_in_slices,
    layers_per_launch,
)
from hybridspec.sglang_plugin.side_stream import SideStream

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of numpy in the interpreter.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)


def verified(seed: int = 0) -> Engine:
    """Random factors and rows, as if two blocks had been verified."""
    engine = Engine(DEVICE, layer_ids=(0, 1, 2, 4, 5), seed=seed)
    factors = engine.buffers.factors
    for tensor in (factors.key_XRHTK, factors.update_XRHTV, engine.buffers.raw_XRTC):
        tensor.copy_(engine.random(*tensor.shape))
    factors.decay_XRHT.copy_(-engine.random(*factors.decay_XRHT.shape).abs())
    return engine


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("programs", [1, 30, 10_000])
def test_slices_commit_what_one_launch_does(programs: int) -> None:
    one, cut = verified(), verified()
    before = one.state_XSHVK.clone()
    rows, slots = column(7, 9), column(3, 1)
    one.commit(rows, slots, 2)
    commit_in_slices(cut.commit, rows, slots, 2, SliceOptions(programs))
    assert torch.equal(one.state_XSHVK, cut.state_XSHVK)
    assert torch.equal(one.windows_XSCW, cut.windows_XSCW)
    changed = (one.state_XSHVK != before).flatten(2).any(-1)
    assert changed.sum(0).tolist() == [0, 5, 0, 5, 0]


def test_rows_without_a_slot_stay() -> None:
    engine = verified()
    before = engine.state_XSHVK.clone(), engine.windows_XSCW.clone()
    commit_in_slices(engine.commit, column(5, 16), column(2, -1), 2)
    changed = (engine.state_XSHVK != before[0]).flatten(2).any(-1).any(0)
    assert changed.tolist() == [False, False, True, False, False]
    moved = (engine.windows_XSCW != before[1]).flatten(2).any(-1).any(0)
    assert moved.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(("requests", "layers"), [(1, 2), (2, 1), (8, 1)])
def test_layers_of_a_launch_at_the_shape_of_the_target(requests: int, layers: int) -> None:
    states = torch.empty(30, 9, 32, 128, 128, device="meta")
    assert layers_per_launch(states, 8192, requests, SliceOptions().programs) == layers


def test_refusal() -> None:
    with pytest.raises(UsageError, match="positive numbers"):
        SliceOptions(programs=0)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs and streams need a GPU")
def test_graphs_beside_the_main_stream_commit_the_same() -> None:
    one, beside = verified(3), verified(3)
    side = SideStream(DEVICE)
    assert side.stream is not None
    rows, slots = beside.round.commit_rows_B, beside.round.state_slots_B
    graphs = CommitGraphs(beside.commit, rows, slots, (2, 1, 400), side.stream)
    assert graphs.serves(2)
    assert not graphs.serves(3)
    for turn in range(8):
        accepted, owners = column(1 + turn % 9, 9 - turn), column(turn % 4, (turn + 1) % 4)
        slots.copy_(owners)
        one.commit(accepted, owners, 2)
        # Work that the commit has to be behind, and work that it may run beside.
        busy = torch.randn(3000, 3000, device=DEVICE)
        busy = busy @ busy
        with side.beside(accepted):
            rows.copy_(accepted)
            graphs.launch(2)
        busy = busy @ busy
        side.join()
        assert torch.equal(one.state_XSHVK, beside.state_XSHVK)
        assert torch.equal(one.windows_XSCW, beside.windows_XSCW)
