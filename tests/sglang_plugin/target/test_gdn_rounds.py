"""Rounds of ragged lengths and accepted counts on SGLang-like pools equal decoding row by row."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")
sys.path.insert(0, str(Path(__file__).parent))

from lookalike import ROWS, Decoding, Engine, forward_batch

from hybridspec.errors import EngineRefusal, UsageError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of numpy in the interpreter.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)

# Slots, lengths and accepted rows of each round; a request without a slot pads the batch.
ROUNDS = [
    ([3, 1], [16, 5], [7, 5]),
    ([1, -1], [2, 16], [1, 16]),
    ([2, 3], [9, 8], [2, 0]),
]


def column(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def poison(engine: Engine, rows: list[dict[str, torch.Tensor]], lengths: list[int]) -> None:
    """NaN in every row past the length, which no output may show."""
    for inputs in rows:
        for tensor in inputs.values():
            blocks = tensor.view(engine.requests, ROWS, -1)
            for request, length in enumerate(lengths):
                blocks[request, length:] = float("nan")


@pytest.mark.parametrize("value_heads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rounds_equal_decoding(value_heads: int) -> None:
    engine = Engine(DEVICE, value_heads=value_heads)
    decoding = Decoding(engine)
    for slots, lengths, accepted in ROUNDS:
        rows = engine.rows()
        poison(engine, rows, lengths)
        engine.set_round(slots, lengths)
        before = engine.state_XSHVK.clone(), engine.windows_XSCW.clone()
        outputs = engine.verify(rows)
        assert torch.equal(engine.state_XSHVK, before[0]), "verification writes states"
        assert torch.equal(engine.windows_XSCW, before[1]), "verification writes windows"
        for index, out in enumerate(outputs):
            for request, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                live = length if slot >= 0 else 0
                assert not out[request, live:].any()
                if live:
                    first = request * ROWS
                    expected = decoding.step(index, slot, rows[index], first, live, keep=False)
                    assert relative(out[request, :live], expected) < 5e-3
        engine.commit(column(accepted), column(slots), len(slots))
        for request, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
            if slot >= 0 and count > 0:
                for index in range(len(engine.layers)):
                    decoding.step(index, slot, rows[index], request * ROWS, count, keep=True)
        assert torch.equal(engine.windows_XSCW, decoding.windows_XSCW)
        assert relative(engine.state_XSHVK, decoding.state_XSHVK) < 1e-6
        idle = [
            slot
            for slot in range(engine.state_XSHVK.shape[1])
            if slot not in [s for s, n in zip(slots, accepted, strict=True) if n > 0]
        ]
        assert torch.equal(engine.state_XSHVK[:, idle], before[0][:, idle])


@pytest.mark.parametrize("sequential", [False, True], ids=["block", "sequential"])
def test_rows_of_one_request_do_not_depend_on_its_length(sequential: bool) -> None:
    engine = Engine(DEVICE, layer_ids=(0,), requests=1, sequential=sequential)
    decoding = Decoding(engine)
    (rows,) = engine.rows()
    whole: torch.Tensor | None = None
    for length in (16, 9, 1, 0, 4):
        inputs = {name: tensor.clone() for name, tensor in rows.items()}
        poison(engine, [inputs], [length])
        engine.set_round([2], [length])
        (out,) = engine.verify([inputs])
        whole = out.clone() if whole is None else whole
        assert torch.equal(out[0, :length], whole[0, :length])
        assert not out[0, length:].any()
    engine.commit(column([3]), column([2]), 1)
    decoding.step(0, 2, rows, 0, 3, keep=True)
    assert relative(engine.state_XSHVK, decoding.state_XSHVK) < 1e-6
    assert torch.equal(engine.windows_XSCW, decoding.windows_XSCW)


def test_worker_that_commits_by_the_last_accepted_row() -> None:
    """SGLang's own worker: indices of rows as int64, slots from the metadata of the pass."""
    ours, stock = (Engine(DEVICE, layer_ids=(5,), seed=1) for _ in range(2))
    hybrid = stock.backend
    stock.commit.install(hybrid)
    for engine in (ours, stock):
        engine.set_round([2, -1], [6, 16])
        engine.verify(engine.rows())
    ours.commit(column([4, 3]), column([2, -1]), 2)
    hybrid.update_mamba_state_after_mtp_verify(
        last_correct_step_indices=torch.tensor([3, 2], device=DEVICE),
        mamba_track_indices=None,
        mamba_steps_to_track=None,
        model=None,
    )
    assert torch.equal(ours.state_XSHVK, stock.state_XSHVK)
    assert torch.equal(ours.windows_XSCW, stock.windows_XSCW)


def test_fewer_requests_than_the_graph_holds() -> None:
    engine = Engine(DEVICE, layer_ids=(5,))
    engine.set_round([2, 3], [4, 4])
    engine.verify(engine.rows())
    before = engine.state_XSHVK.clone()
    engine.commit(column([2, 2]), column([2, 3]), 1)
    moved = (engine.state_XSHVK != before).flatten(2).any(2).any(0)
    assert moved.tolist() == [False, False, True, False, False]


def test_layers_up_to_the_first_router_run_the_rows_that_it_sees() -> None:
    engine = Engine(DEVICE, last_router_layer=0)
    engine.set_round([1, 2], [3, 16], seen=[4, 16])
    first, later = engine.verify(engine.rows())
    seen = [[int(n) for n in out.flatten(2).any(2).sum(1)] for out in (first, later)]
    assert seen == [[4, 16], [3, 16]]


def test_rows_that_only_the_router_saw_are_not_committed() -> None:
    """Layer 0 ran four rows of which three were verified: its factors of the fourth are unused."""
    engines = [Engine(DEVICE, layer_ids=(0,), last_router_layer=layer, seed=3) for layer in (-1, 0)]
    for engine in engines:
        engine.set_round([1, -1], [3, 5], seen=[4, 6])
        engine.verify(engine.rows())
        engine.commit(column([3, 5]), column([1, -1]), 2)
    assert torch.equal(engines[0].state_XSHVK, engines[1].state_XSHVK)
    assert torch.equal(engines[0].windows_XSCW, engines[1].windows_XSCW)


def test_prefill_goes_to_the_engine() -> None:
    engine = Engine(DEVICE)
    rows = engine.rows()[0]
    engine.backend.forward_extend(
        layer=engine.layers[0], forward_batch=forward_batch(verifies=False), q=None, **rows
    )
    (call,) = engine.calls
    assert call["mixed_qkv"] is rows["mixed_qkv"]
    assert call["layer"] is engine.layers[0]
    assert "q" in call


def test_a_pass_larger_than_the_round_is_refused() -> None:
    engine = Engine(DEVICE)
    engine.set_round([1, 2], [1, 1])
    rows = {name: torch.cat([x, x]) for name, x in engine.rows()[0].items()}
    with pytest.raises(UsageError, match="4 requests with columns for 2"):
        engine.backend.forward_extend(layer=engine.layers[0], forward_batch=forward_batch(), **rows)


def test_trees_and_tracking_are_refused() -> None:
    engine = Engine(DEVICE)
    engine.set_round([1, 2], [1, 1])
    engine.backend.forward_metadata.retrieve_parent_token = torch.zeros(1)
    with pytest.raises(EngineRefusal, match="--speculative-eagle-topk 1"):
        engine.verify(engine.rows())
    with pytest.raises(EngineRefusal, match="--disable-radix-cache"):
        engine.commit.update_mamba_state_after_mtp_verify(
            torch.zeros(2), torch.zeros(2), None, None
        )
