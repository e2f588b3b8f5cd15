"""Bundles as the source of anchors: every measured cell, and nothing that was not measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundle_kit import COST_IDENTITY, calibration_arguments, cost_arguments, make_step

from hybridspec.artifacts.bundle import load_bundle, write_calibration, write_cost
from hybridspec.artifacts.tables import TransferRecord
from hybridspec.costmodels.anchors import anchors_of_table, read_anchors
from hybridspec.errors import BundleError

RECORD = TransferRecord("a" * 64, "nvidia-a100", "0.5.10", 6, 0.01, 0.02, 0.03)
ANCHORS = anchors_of_table(COST_IDENTITY, make_step()).table()


def test_bundle_gives_every_measured_cell(tmp_path: Path) -> None:
    write_cost(tmp_path, **cost_arguments(throughput=None))
    read = read_anchors(tmp_path)
    assert len(read) == make_step().latency_us.size
    assert read.identity == COST_IDENTITY
    assert read.expert_slope_us == make_step().expert_slope_us


def test_bundle_of_transferred_or_no_costs_is_refused(tmp_path: Path) -> None:
    write_calibration(tmp_path / "c", **calibration_arguments())
    with pytest.raises(BundleError, match="no cost part to take anchors from"):
        read_anchors(tmp_path / "c")
    write_cost(tmp_path / "t", **cost_arguments(throughput=None, transfer=RECORD, anchors=ANCHORS))
    with pytest.raises(BundleError, match="anchors must be measured"):
        read_anchors(tmp_path / "t")


def test_transfer_record_counts_for_the_id_and_comes_back(tmp_path: Path) -> None:
    ids = {write_cost(tmp_path / "m", **cost_arguments(throughput=None))}
    for number, source in enumerate(("a" * 64, "b" * 64)):
        record = TransferRecord(source, "nvidia-a100", "0.5.10", 6, 0.01, 0.02, 0.03)
        moved = cost_arguments(throughput=None, transfer=record, anchors=ANCHORS)
        ids.add(write_cost(tmp_path / str(number), **moved))
        cost = load_bundle(tmp_path / str(number)).cost
        assert cost is not None
        assert cost.transfer == record
        assert cost.anchors is not None
        assert cost.anchors.num_rows == ANCHORS.num_rows
    assert len(ids) == 3
    with pytest.raises(BundleError, match="both their record and their anchors"):
        write_cost(tmp_path / "half", **cost_arguments(transfer=RECORD))
