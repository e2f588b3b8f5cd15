"""The probe measures the round that was asked for, and leaves no trace of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridspec.costmodels.sweep import measure_experts, measure_steps
from hybridspec.errors import UsageError
from hybridspec.reference.loading import load_pair
from hybridspec.reference.probe import VARIANTS, EngineProbe
from hybridspec.reference.random_pair import PairShape, write_random_pair


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> EngineProbe:
    folder: Path = tmp_path_factory.mktemp("pair")
    target, drafter = write_random_pair(folder, PairShape(), seed=5)
    engine = load_pair(target, drafter, max_batch=2 * VARIANTS, max_context=256)
    return EngineProbe(engine, [list(range(10, 60)), list(range(100, 190))], {"device": "test"})


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 16])
def test_rows_asked_are_rows_run(probe: EngineProbe, batch: int, length: int) -> None:
    probe.prepare(context_tokens=70, batch_size=batch)
    timing = probe.run_round(length)
    assert timing.rows_run == batch * max(length, 1)
    assert (timing.draft_us > 0) == (length > 0)
    assert timing.total_us >= timing.draft_us + timing.verify_us + timing.commit_us


def test_every_reading_starts_from_the_same_state(probe: EngineProbe) -> None:
    probe.prepare(context_tokens=40, batch_size=2)
    pool = probe._engine.pool
    before = (pool.recurrent_SXHVK.clone(), pool.conv_SXWC.clone())
    logs = [[list(r.tokens) for r in batch] for batch in probe._batches]
    for length in (0, 3, 16, 1):
        for _ in range(VARIANTS):
            probe.run_round(length)
    assert torch.equal(pool.recurrent_SXHVK, before[0])
    assert torch.equal(pool.conv_SXWC, before[1])
    assert [[list(r.tokens) for r in batch] for batch in probe._batches] == logs
    assert all(r.context_tokens == 40 for batch in probe._batches for r in batch)
    assert probe._engine.forced_length is None


@pytest.mark.parametrize(("length", "distinct"), [(2, 2), (2, 4), (4, 3), (16, 2), (16, 8)])
def test_forced_routes_reach_the_experts(probe: EngineProbe, length: int, distinct: int) -> None:
    probe.prepare(context_tokens=40, batch_size=1)
    timing = probe.run_forced_routes(length, distinct)
    assert timing.distinct_experts == distinct
    assert timing.rows_run == length
    assert all(b.forced_experts_RK is None for b in probe._engine.target.blocks)


def test_sweeps_accept_its_readings(probe: EngineProbe) -> None:
    steps = measure_steps(probe, batch_sizes=[1], context_tokens=[30], repeats=5, budget_s=60)
    assert steps.num_rows == 17 * 5
    experts = measure_experts(
        probe, verify_lengths=(2, 4), points=2, context_tokens=30, repeats=5, budget_s=60
    )
    assert set(experts.column("distinct_experts").to_pylist()) == {2, 4, 8}


def test_what_does_not_fit_is_refused(probe: EngineProbe) -> None:
    with pytest.raises(UsageError, match="context 5000"):
        probe.prepare(context_tokens=5000, batch_size=1)
    with pytest.raises(UsageError, match="batch 3"):
        probe.prepare(context_tokens=30, batch_size=3)
