"""Hazard trees against the naive twin to the bit, and against what calibration fits on."""

# Arguments are spread from lists whose lengths a checker cannot see.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import hazard_trees_kit as kit
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.artifacts.trees import CONTEXT_FEATURES
from hybridspec.calibrate.history import HISTORY_NAMES, request_history
from hybridspec.errors import UsageError
from hybridspec.kernels.hazard_trees.ensemble import FEATURES, pack_trees
from hybridspec.kernels.hazard_trees.state import HistoryState
from hybridspec.kernels.hazard_trees.trees import Hazards, hazard_trees


def poisoned(batch: int, device: torch.device) -> Hazards:
    out = Hazards.allocate(batch, device)
    out.hazards_BD.fill_(float("nan"))
    out.features_BLF.fill_(float("nan"))
    return out


def test_features_are_those_of_the_bundle() -> None:
    assert FEATURES == CONTEXT_FEATURES


@pytest.mark.parametrize(
    ("batch", "entries", "trees", "depth"),
    [(1, 4096, 6, 4), (3, 16, 6, 4), (2, 64, 1, 1), (4, 32, 33, 6)],
    ids=["one", "full-tables", "one-tree", "many-trees"],
)
def test_rounds_equal_the_naive_twin(
    batch: int, entries: int, trees: int, depth: int, device: torch.device
) -> None:
    g = np.random.default_rng(batch)
    table = kit.random_trees(batch, trees=trees, depth=depth)
    host, there = kit.packed(table), kit.packed(table, device)
    slots = batch + 2
    expected_state = HistoryState.allocate(slots, "cpu", entries=entries)
    state = HistoryState.allocate(slots, device, entries=entries)
    for turn in range(8):
        r = kit.random_round(g, batch, slots, first=turn == 0)
        hazards, features = kit.naive_round(expected_state, host, r)
        out = poisoned(batch, device)
        hazard_trees(*r.on(device), state, there, out=out)
        assert torch.equal(out.features_BLF[:, :15].cpu(), features), turn
        assert torch.equal(out.hazards_BD.cpu(), hazards), turn
        assert kit.equal_states(state, expected_state), turn
        rows = features.reshape(-1, 16)[:, : len(FEATURES)].numpy()
        np.testing.assert_allclose(
            hazards.reshape(-1).numpy(), table.predict(rows), rtol=0, atol=1e-11
        )


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_a_request_sees_what_calibration_saw(seed: int, vocab: int) -> None:
    """History and text of a trace, round by round on the device, with rounds cut to any length."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    g = np.random.default_rng(seed)
    rounds = 6
    p1 = g.uniform(0.2, 1.0, (rounds, 15)).astype(np.float32)
    drafts = g.integers(0, vocab, (rounds, 15))
    lengths = g.integers(1, 17, rounds)
    accepted = g.integers(0, 16, rounds) % lengths
    targets = g.integers(0, vocab, (rounds, 16))
    anchor = np.append(g.integers(0, vocab), targets[np.arange(rounds), accepted])
    expected = request_history(
        prompt=np.zeros(rounds, dtype=np.int64),
        round_index=np.arange(rounds),
        generated_tokens=1 + np.concatenate([[0], np.cumsum(accepted + 1)])[:-1],
        accepted=accepted,
        p1_RD=p1,
        anchor=anchor[:-1],
        draft_tokens_RD=drafts,
        verified_drafts=lengths - 1,
    )
    state = HistoryState.allocate(1, device, entries=1 << 16)
    trees = kit.packed(kit.random_trees(0), device)
    for turn in range(rounds):
        emitted = np.full(16, -1)
        if turn == 0:
            emitted[0], count, length = anchor[0], 1, 0
        else:
            count, length = int(accepted[turn - 1]) + 1, int(lengths[turn - 1])
            emitted[: count - 1] = drafts[turn - 1, : count - 1]
            emitted[count - 1] = targets[turn - 1, count - 1]
        signal = torch.tensor(p1[turn])[None]
        r = kit.Round(
            signal,
            signal * 0.0,
            signal,
            torch.tensor(drafts[turn])[None],
            torch.tensor(emitted)[None],
            torch.tensor([count], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            torch.tensor([0], dtype=torch.int32),
        )
        found = hazard_trees(*r.on(device), state, trees).features_BLF[0, :15].cpu().numpy()
        named = {name: found[:, index] for index, name in enumerate(FEATURES)}
        np.testing.assert_array_equal(named["seen_length"], expected.seen_length_RD[turn])
        np.testing.assert_array_equal(named["successor"], expected.successor_RD[turn])
        for name in ("mean_surprise", "rounds_before", "generated_tokens"):
            column = expected.columns_RH[turn, HISTORY_NAMES.index(name)]
            np.testing.assert_array_equal(named[name], column, err_msg=name)


def test_a_broken_signal_gives_nan_there_and_nowhere_else(device: torch.device) -> None:
    r = kit.random_round(np.random.default_rng(5), 3, 3, first=True)
    r.p1[0, 4], r.p2[1, 0], r.entropy[2, 14] = float("nan"), float("inf"), float("-inf")
    state = HistoryState.allocate(3, device)
    out = hazard_trees(*r.on(device), state, kit.packed(kit.random_trees(1), device))
    bad = torch.zeros(3, 15, dtype=torch.bool)
    bad[0, 4] = bad[1, 0] = bad[2, 14] = True
    assert torch.equal(out.hazards_BD.isnan().cpu(), bad)


def test_reset_forgets_one_slot_only(device: torch.device) -> None:
    g = np.random.default_rng(7)
    state = HistoryState.allocate(3, device, entries=64)
    trees = kit.packed(kit.random_trees(1), device)
    for turn in range(3):
        hazard_trees(*kit.random_round(g, 3, 3, first=turn == 0).on(device), state, trees)
    kept = [state.tables_SGN[0].clone(), state.numbers_SF[2].clone()]
    state.reset(1)
    fresh = HistoryState.allocate(1, device, entries=64)
    for name in vars(fresh):
        assert torch.equal(getattr(state, name)[1], getattr(fresh, name)[0])
    assert torch.equal(state.tables_SGN[0], kept[0])
    assert torch.equal(state.numbers_SF[2], kept[1])
    assert (kept[0] >= 0).any()


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[:, :14], r"p1 is .*\(2, 14\)"),
        (1, lambda x: x.double(), "p2 is torch.float64"),
        (3, lambda x: x.short(), "drafts is torch.int16"),
        (4, lambda x: x[:, :15], "emitted is"),
        (5, lambda x: x.long(), "commit rows is torch.int64"),
        (7, lambda x: x[:1], "slots is"),
    ],
)
def test_wrong_inputs_are_refused(index: int, change: Any, message: str) -> None:
    inputs = kit.random_round(np.random.default_rng(0), 2, 2, first=True).on("cpu")
    inputs[index] = change(inputs[index])
    state, trees = HistoryState.allocate(2, "cpu"), kit.packed(kit.random_trees(0))
    with pytest.raises(UsageError, match=message):
        hazard_trees(*inputs, state, trees)


def test_what_cannot_be_packed_is_refused() -> None:
    table = kit.random_trees(0)
    names = ("baseline", "root_T", "feature_K", "threshold_K", "left_K", "value_K", "depth")
    fields = {name: getattr(table, name) for name in names}
    with pytest.raises(UsageError, match="below 1024 are taken"):
        pack_trees(**{**fields, "baseline": 5000.0})
    with pytest.raises(UsageError, match="power of two"):
        HistoryState.allocate(1, "cpu", entries=100)
