"""Folders, placement and identities of a pair, and what a bundle says of where it came from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridspec import pair
from hybridspec.artifacts.identity import check_identity
from hybridspec.demo import assets
from hybridspec.errors import BundleError, EnvironmentMissing, ModelError, UsageError


def test_embedded_pair_comes_with_prompts() -> None:
    folders = pair.pair_folders(None, None)
    assert (folders.target, folders.drafter) == (assets.TARGET, assets.DRAFTER)
    assert folders.prompts == assets.PROMPTS
    assert folders.name == pair.EMBEDDED_NAME


def test_own_pair_needs_both_folders() -> None:
    with pytest.raises(UsageError, match="--drafter"):
        pair.pair_folders(Path("models/mine"), None)
    with pytest.raises(UsageError, match="TARGET"):
        pair.pair_folders(None, Path("models/mine"))
    plain = pair.pair_folders(Path("models/mine"), None, drafter_needed=False)
    assert (plain.drafter, plain.prompts, plain.name) == (None, None, "mine")


def test_placement_settles_auto() -> None:
    threads = torch.get_num_threads()
    placed = pair.place(device="auto", dtype="auto", threads=None)
    on_gpu = torch.cuda.is_available()
    assert placed.device == ("cuda" if on_gpu else "cpu")
    assert placed.dtype == ("bfloat16" if on_gpu else "float32")
    assert placed.threads == threads
    assert pair.place(device="cpu", dtype="bfloat16", threads=threads).dtype == "bfloat16"


@pytest.mark.parametrize("device", ["tpu", "cpu:1", "cuda:x", "", "cuda:-1"])
def test_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="device"):
        pair.place(device=device, dtype="auto", threads=None)


def test_absent_device_is_the_environment() -> None:
    with pytest.raises(EnvironmentMissing, match="cuda:99"):
        pair.place(device="cuda:99", dtype="auto", threads=None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "hbm"),
        ("NVIDIA A100-SXM4-80GB", "hbm"),
        ("AMD Instinct MI300X", "hbm"),
        ("NVIDIA GeForce RTX 4090", "gddr"),
        ("NVIDIA L40S", "gddr"),
        ("NVIDIA A10G", "gddr"),
        ("Something New", "unknown"),
    ],
)
def test_memory_class(name: str, kind: str) -> None:
    assert pair.memory_class(name) == kind


def test_identity_fits_itself_and_nothing_else() -> None:
    folders = pair.pair_folders(None, None)
    placed = pair.place(device="cpu", dtype="auto", threads=None)
    costs = pair.cost_identity(folders, placed, max_batch=4)
    assert check_identity(costs, pair.cost_identity(folders, placed, max_batch=2)) == []
    with pytest.raises(BundleError, match="dtype"):
        check_identity(costs, replace(costs, dtype="bfloat16"))
    hazards = pair.calibration_identity(
        folders, dtype="float32", temperature=0.0, top_p=1.0, prompts_digest="p"
    )
    swapped = replace(hazards, drafter_digest=hazards.target_digest)
    with pytest.raises(BundleError, match="drafter_digest"):
        check_identity(hazards, swapped)
    without = replace(folders, drafter=None)
    with pytest.raises(ModelError, match="no drafter"):
        pair.calibration_identity(
            without, dtype="float32", temperature=0.0, top_p=1.0, prompts_digest=None
        )


def test_quantization_is_read_where_it_stands(tmp_path: Path) -> None:
    assert pair.quantization(assets.TARGET) == "none"
    assert pair.quantization(tmp_path) == "none"
    for config in (
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert pair.quantization(tmp_path) == "fp8"
