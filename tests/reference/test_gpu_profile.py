"""The probe of captured rounds measures the round that was asked for, on any device."""

from __future__ import annotations

import pytest
import torch

from hybridspec.costmodels.expert import fit_expert_slope
from hybridspec.costmodels.probe import READING_TOKENS
from hybridspec.costmodels.sweep import measure_experts, measure_steps
from hybridspec.errors import EnvironmentMissing, QualityGate, UsageError
from hybridspec.reference.gpu.control import make_control
from hybridspec.reference.gpu.profile import TIMED_ROUNDS, WARM_ROUNDS, GpuProbe

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


MAX_ROWS = 16


class PlacedToy:
    """A round of plain PyTorch with a state that every round changes, and routes that are counted.

    Without kernels: Triton's interpreter aborts after some thousand launches in one process.
    """

    max_rows = MAX_ROWS
    max_context, num_layers, num_experts, experts_per_token = 512, 3, 16, 2

    def __init__(self, batch: int) -> None:
        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=DEVICE)

        self.batch = batch
        self.lengths_B, self.forced_B = integers(batch), integers(batch)
        self.context_B, self.placed_B = integers(batch), integers(batch)
        self.table, self.ran = integers(self.num_layers), integers(self.num_layers)
        self.drafted, self.forced = self, self
        self.live, self.drafts = integers(1), integers(1)
        self.x_RH = torch.rand(batch * MAX_ROWS, 32, device=DEVICE)
        self.restored = 0
        self.pads_rows = self.one_layer_off = False

    def prefix(self) -> None:
        self.draft()
        self.lengths_B.copy_(self.forced_B)

    def draft(self) -> None:
        self.drafts += 1

    def rest(self, rows: int) -> None:
        self.y_RR = self.x_RH[: self.batch * rows] @ self.x_RH.t()
        self.context_B += 1
        self.live.copy_(self.lengths_B.sum())
        self.ran.copy_(self.table)

    def commit(self) -> None:
        self.context_B += 1

    def plain(self) -> None:
        self.context_B += 1
        self.live.fill_(self.batch)

    def place(self, context_tokens: int) -> None:
        self.placed_B.fill_(context_tokens)
        self.restore()

    def restore(self) -> None:
        self.restored += 1
        self.context_B.copy_(self.placed_B)

    def force_length(self, length: int | None) -> None:
        padded = MAX_ROWS if self.pads_rows else length
        self.forced_B.fill_(1 if padded is None else padded)

    def force_routes(self, distinct_experts: int, *, length: int) -> None:
        self.table.fill_(distinct_experts)
        if self.one_layer_off:
            self.table[1] += 1

    def rows_run(self) -> int:
        return int(self.live)

    def distinct_experts_run(self) -> set[int]:
        return set(self.ran.tolist())


@pytest.fixture
def toys() -> dict[int, PlacedToy]:
    return {}


@pytest.fixture
def probe(toys: dict[int, PlacedToy]) -> GpuProbe:
    def make(batch: int) -> PlacedToy:
        assert batch not in toys, "made once for each batch size"
        toys[batch] = PlacedToy(batch)
        return toys[batch]

    return GpuProbe(
        make, lambda: make_control("masked"), max_batch=2, identity={"device": DEVICE.type}
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 7, 16])
def test_rows_asked_are_rows_run(probe: GpuProbe, batch: int, length: int) -> None:
    probe.prepare(context_tokens=70, batch_size=batch)
    timing = probe.run_round(length)
    assert timing.rows_run == batch * max(length, 1)
    assert (timing.draft_us > 0) == (length > 0)
    assert timing.total_us > 0


def test_every_reading_starts_from_the_placed_state(
    probe: GpuProbe, toys: dict[int, PlacedToy]
) -> None:
    probe.prepare(context_tokens=40, batch_size=2)
    toy = toys[2]
    before = toy.restored
    probe.run_round(0)
    assert toy.restored - before == WARM_ROUNDS + TIMED_ROUNDS + 1
    for length in (3, 16):
        probe.run_round(length)
        assert toy.context_B.tolist() == [40, 40]
    assert probe.run_forced_routes(4, 5).distinct_experts == 5
    assert toy.context_B.tolist() == [40, 40]


def test_sweeps_and_fits_take_its_readings(probe: GpuProbe) -> None:
    steps = measure_steps(
        probe, batch_sizes=[1, 2], context_tokens=[30], lengths=(0, 1, 16), repeats=5, budget_s=60
    )
    assert steps.num_rows == 2 * 3 * 5
    plain = steps.column("verify_length").to_numpy() == 0
    for part in ("verify_us", "commit_us"):
        assert steps.column(part).is_null().to_pylist() == plain.tolist(), part
    experts = measure_experts(
        probe, verify_lengths=(2, 4), points=3, context_tokens=30, repeats=5, budget_s=60
    )
    assert fit_expert_slope(experts, num_layers=probe.num_layers).num_layers == 3


def test_a_whole_curve_has_what_a_table_needs(probe: GpuProbe) -> None:
    samples = measure_steps(
        probe, batch_sizes=[1], context_tokens=[30], repeats=5, budget_s=60, warmup=0
    )
    assert samples.num_rows == 17 * 5
    lengths = samples.column("verify_length").to_numpy()
    draft_us = samples.column("draft_us").to_numpy()
    assert ((draft_us > 0) == (lengths > 0)).all()


def test_an_engine_that_ignores_what_is_forced_is_refused(
    probe: GpuProbe, toys: dict[int, PlacedToy]
) -> None:
    probe.prepare(context_tokens=30, batch_size=1)
    toys[1].pads_rows = True
    with pytest.raises(QualityGate, match="16 target rows ran where 3"):
        measure_steps(
            probe, batch_sizes=[1], context_tokens=[30], lengths=(3,), repeats=5, budget_s=60
        )
    toys[1].one_layer_off = True
    with pytest.raises(EnvironmentMissing, match=r"\[5, 6\] distinct experts"):
        probe.run_forced_routes(4, 5)


def test_what_does_not_fit_is_refused(probe: GpuProbe) -> None:
    assert probe.max_context == 512 - READING_TOKENS
    with pytest.raises(UsageError, match="context 500"):
        probe.prepare(context_tokens=500, batch_size=1)
    with pytest.raises(UsageError, match="batch 3"):
        probe.prepare(context_tokens=30, batch_size=3)


def test_nothing_is_measured_before_a_place_is_prepared(probe: GpuProbe) -> None:
    with pytest.raises(UsageError, match="prepare"):
        probe.run_round(4)
