"""Served hazards: trees round by round give what replay gives, whatever joins, pauses or leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hazard_trees_kit as kit
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_kit import make_trace

from hybridspec.artifacts.bundle import load_bundle, write_calibration
from hybridspec.artifacts.identity import CalibrationIdentity
from hybridspec.artifacts.tables import HazardKind, StepCostTable, ThroughputTable
from hybridspec.artifacts.trees import TreeTable
from hybridspec.calibrate.boosted import BoostedHazard
from hybridspec.calibrate.context import context_features
from hybridspec.calibrate.features import TraceArrays, trace_arrays
from hybridspec.calibrate.fit import fit_calibration
from hybridspec.calibrate.hazard import RawTop1Hazard
from hybridspec.calibrate.history import expected_accepted, request_history
from hybridspec.costmodels.policies import Dinkelbach
from hybridspec.costmodels.recorded import round_set
from hybridspec.costmodels.throughput import fit_batch
from hybridspec.costmodels.trace_stream import open_trace
from hybridspec.errors import UsageError
from hybridspec.hazards import RequestHistory, TreeHazards, served_hazards
from hybridspec.policy import Policy

LAB = Path(__file__).resolve().parents[2] / "shared" / "traces" / "lab-rounds.parquet"
# Rises slowly, so that lengths differ.
LATENCY_US = np.concatenate([[4300.0], 5200.0 + 330.0 * np.arange(1, 17) ** 0.8])


def cost() -> StepCostTable:
    latency = LATENCY_US.reshape(1, 1, -1)
    grid = np.ones(1, dtype=np.int64)
    return StepCostTable(grid, grid, latency, latency, latency, np.full((1, 1), 900.0), 0.0, 1.0)


def served_lengths(
    rounds: TraceArrays, table: pa.Table, trees: TreeTable, lam: float, *, batch: int
) -> list[int]:
    """Lengths that a policy serves when recorded requests run `batch` at a time, each round of
    them verified in full, as in the trace.
    """
    grid = np.ones(1, dtype=np.int64)
    policy = Policy(
        RawTop1Hazard().fit().table_,
        cost(),
        ThroughputTable(grid, np.array([lam]), np.array([4]), hazard="trees"),
        hazard_model=TreeHazards(trees),
    )
    target = np.asarray(table.column("target_tokens").combine_chunks().flatten()).reshape(-1, 16)
    waiting = [
        list(rows)
        for rows in np.split(np.arange(len(rounds)), np.flatnonzero(np.diff(rounds.prompt)) + 1)
    ]
    lengths = [0] * len(rounds)
    running: list[tuple[list[int], RequestHistory]] = []
    while waiting or running:
        while waiting and len(running) < batch:
            rows = waiting.pop(0)
            history = policy.hazard_model.start([int(rounds.anchor[rows[0]])])
            assert history is not None
            running.append((rows, history))
        now = [rows[0] for rows, _ in running]
        p1, p2, entropy = (
            torch.tensor(values[now], dtype=torch.float32)
            for values in (rounds.p1_RD, rounds.p2_RD, rounds.entropy_RD)
        )
        chosen = policy.select(
            p1,
            p2,
            entropy,
            [int(rounds.context_tokens[row]) for row in now],
            [lam] * len(now),
            [16] * len(now),
            1,
            draft_tokens_BD=torch.tensor(rounds.draft_tokens_RD[now]),
            histories=[history for _, history in running],
        )
        for row, length, (rows, history) in zip(now, chosen.lengths, running, strict=True):
            lengths[row] = length
            accepted = int(rounds.accepted[row])
            emitted = target[row, : accepted + 1].tolist()
            history.observe(emitted, accepted=accepted, verify_length=16)
            rows.pop(0)
        running = [(rows, history) for rows, history in running if rows]
    return lengths


def replayed_lengths(table: pa.Table, trees: TreeTable) -> tuple[np.ndarray, float]:
    """Lengths and lam of the replay of the same rounds with the same trees."""

    def predict(arrays: TraceArrays) -> np.ndarray:
        return trees.predict(context_features(arrays).reshape(-1, 15)).reshape(-1, 15)

    rounds = round_set(table, predict)
    lam = fit_batch(rounds, cost(), batch=1).tokens_per_us
    return Dinkelbach(lam).lengths(rounds, np.broadcast_to(LATENCY_US, (len(rounds), 17))), lam


def test_served_lengths_are_the_replays() -> None:
    table = make_trace(prompts=40)
    arrays = trace_arrays(table)
    trees = BoostedHazard(num_trees=8, depth=4).fit(arrays).trees_
    expected, lam = replayed_lengths(table, trees)
    assert len(set(expected.tolist())) > 4
    for batch in (1, 3):
        assert served_lengths(arrays, table, trees, lam, batch=batch) == expected.tolist()


@pytest.mark.skipif(not LAB.is_file(), reason="no recorded lab rounds beside the repository")
def test_served_lengths_are_the_replays_on_recorded_rounds() -> None:
    piece = next(open_trace(LAB).pieces(rows=3000))
    arrays = trace_arrays(piece)
    trees = BoostedHazard().fit(arrays).trees_
    expected, lam = replayed_lengths(piece, trees)
    assert served_lengths(arrays, piece, trees, lam, batch=8) == expected.tolist()


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_cut_rounds_and_pauses_leave_the_history_of_calibration(seed: int, vocab: int) -> None:
    g = np.random.default_rng(seed)
    rounds = 6
    p1 = g.uniform(0.2, 1.0, (rounds, 15)).astype(np.float32)
    drafts = g.integers(0, vocab, (rounds, 15))
    lengths = g.integers(1, 17, rounds)
    accepted = g.integers(0, 16, rounds) % lengths
    bonus = g.integers(0, vocab, rounds)
    anchor = np.append(g.integers(0, vocab), bonus)
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
    model = TreeHazards(kit.random_trees(0))
    history = RequestHistory([int(anchor[0])])
    signals = torch.tensor(p1)
    for turn in range(rounds):
        # A draft whose round was never verified, such as one before a failed pass.
        if g.random() < 0.5:
            model.hazards(
                signals[turn : turn + 1] * 0.5,
                signals[turn : turn + 1] * 0.0,
                signals[turn : turn + 1],
                [9],
                torch.tensor(drafts[::-1].copy()[turn : turn + 1]),
                [history],
            )
        block = drafts[turn].tolist()
        columns, seen, successor = history.drafted(expected_accepted(p1[turn : turn + 1])[0], block)
        np.testing.assert_array_equal(
            np.asarray(columns[1:], dtype=np.float32),
            expected.columns_RH[turn, 1:],
            err_msg=str(turn),
        )
        np.testing.assert_array_equal(seen, expected.seen_length_RD[turn])
        np.testing.assert_array_equal(successor, expected.successor_RD[turn])
        emitted = [*block[: accepted[turn]], int(bonus[turn])]
        history.observe(emitted, accepted=int(accepted[turn]), verify_length=int(lengths[turn]))


def test_plain_rounds_add_text_and_no_surprise() -> None:
    model = TreeHazards(kit.random_trees(0))
    signal = torch.full((1, 15), 0.5)
    drafts = torch.arange(15)[None]
    history = RequestHistory([3])
    model.hazards(signal, signal * 0.0, signal, [1], drafts, [history])
    history.observe([4], accepted=0, verify_length=0)
    columns, *_ = history.drafted(np.zeros(16, dtype=np.float32), list(range(15)))
    assert columns == [0.0, 0.0, 0, 1]
    assert history.anchor == 4


def test_a_broken_signal_falls_back_and_leaves_no_trace_in_the_history() -> None:
    grid = np.ones(1, dtype=np.int64)
    policy = Policy(
        RawTop1Hazard().fit().table_,
        cost(),
        ThroughputTable(grid, np.array([5e-4]), np.array([7]), hazard="trees"),
        hazard_model=TreeHazards(kit.random_trees(1)),
    )
    history = RequestHistory([3])
    p1 = torch.full((1, 15), 0.9)
    p1[0, 6] = float("nan")
    drafts = torch.arange(15)[None]
    broken = policy.select(
        p1, p1 * 0.0, p1, [5], [5e-4], [16], 1, draft_tokens_BD=drafts, histories=[history]
    )
    assert broken.lengths == [7]
    assert broken.fallback == ["draft signals are not finite"]
    history.observe([1, 2], accepted=1, verify_length=9)
    columns, *_ = history.drafted(np.zeros(16, dtype=np.float32), list(range(15)))
    assert columns == [0.0, 0.0, 1, 2]
    with pytest.raises(UsageError, match="need the drafts and the history"):
        policy.select(p1, p1, p1, [5], [5e-4], [16], 1)


def test_walk_equals_the_table(make_policy: Callable[..., Policy]) -> None:
    for seed, trees, depth in ((0, 1, 1), (1, 6, 4), (2, 33, 6)):
        table = kit.random_trees(seed, trees=trees, depth=depth)
        features = np.random.default_rng(seed).normal(0, 3, (45, 15)).astype(np.float32)
        np.testing.assert_array_equal(TreeHazards(table)._walk(features), table.predict(features))
    some = replace(table, feature_names=(*table.feature_names[:-1], "other"))
    with pytest.raises(UsageError, match="the trees read 15 features"):
        TreeHazards(some)
    assert make_policy().hazard_model.kind == "table"


def test_a_bundle_serves_what_its_throughput_was_fitted_with(tmp_path: Path) -> None:
    trace = make_trace()
    grid = np.ones(1, dtype=np.int64)
    fitted = fit_calibration(trace, model="boosted", resamples=20)
    write_calibration(
        tmp_path,
        identity=CalibrationIdentity("a" * 64, "b" * 64, "float32", 0.0, 1.0, None),
        hazard=fitted.hazard,
        routing=fitted.routing,
        reliability=fitted.reliability,
        metrics=fitted.metrics,
        trees=fitted.trees,
        provenance={},
    )
    part = load_bundle(tmp_path).calibration
    assert part is not None
    kinds: list[HazardKind] = ["trees", "table"]
    for kind in kinds:
        throughput = ThroughputTable(grid, np.array([5e-4]), np.array([7]), hazard=kind)
        model, reason = served_hazards(part, throughput)
        assert model.kind == kind
        assert (reason is None) == (kind == "trees")
        if reason is not None:
            assert "fitted with the hazard table" in reason
        model, reason = served_hazards(replace(part, trees=None), throughput)
        assert model.kind == "table"
        assert "lacks the boosted trees" in str(reason)
        plain = replace(part, trees=None, hazard=replace(part.hazard, method="beta"))
        assert served_hazards(plain, throughput)[1] is None
