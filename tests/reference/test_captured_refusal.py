"""Which targets the captured engine takes, said before any weight is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from hybridspec.demo import assets
from hybridspec.errors import ModelError
from hybridspec.reference.config import TargetConfig, load_target_config
from hybridspec.reference.gpu.pair_probe import captured_refusal, tensors_of


@pytest.fixture(scope="module")
def embedded() -> TargetConfig:
    target, _, _ = assets.require()
    return load_target_config(target)


def wide(config: TargetConfig) -> TargetConfig:
    return replace(config, hidden_size=2048, expert_width=512)


def test_shapes_that_the_kernels_take(embedded: TargetConfig) -> None:
    assert captured_refusal(wide(embedded), dtype="bfloat16", device="cuda:1") is None


@pytest.mark.parametrize(
    ("change", "dtype", "device", "says"),
    [
        ({}, "bfloat16", "cpu", "need a GPU"),
        ({}, "float32", "cuda", "bfloat16"),
        ({"expert_width": 8}, "bfloat16", "cuda", "expert width 8"),
        ({"hidden_size": 96}, "bfloat16", "cuda", "hidden size 96"),
        ({"gdn_key_dim": 32}, "bfloat16", "cuda", "GDN heads of 32"),
        ({"architecture": "Qwen3NextForCausalLM"}, "bfloat16", "cuda", "head by head"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_refusals(
    embedded: TargetConfig, change: dict[str, int], dtype: str, device: str, says: str
) -> None:
    found = captured_refusal(replace(wide(embedded), **change), dtype=dtype, device=device)
    assert found is not None
    assert says in found


def test_tensors_of_a_folder_with_weights(tmp_path: Path) -> None:
    target, _, _ = assets.require()
    names = [name for name, _ in tensors_of(target, torch.device("cpu"))]
    assert any(name.endswith("embed_tokens.weight") for name in names)
    with pytest.raises(ModelError):
        list(tensors_of(tmp_path, torch.device("cpu")))
