"""What a configuration says of the kernels that run, and that costs of others do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridspec.demo import assets
from hybridspec.pair import PairFolders
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.identity import engine_cost_identity

SERVER = {
    "attention_backend": "triton",
    "linear_attn_backend": "triton",
    "moe_runner_backend": "triton",
    "cuda_graph_config": {"decode": {"bs": [1, 2, 4]}},
}


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({}, ""),
        ({"small_moe": True, "bundle": Path("b"), "fixed_length": 4, "correction": "paper"}, ""),
        ({"small_moe": False}, "small_moe:off"),
        ({"target": "stock"}, "target:stock"),
        ({"masked_layers": 3, "skinny_linear": False}, "skinny_linear:off+masked_layers:3"),
        (
            {"block_attention": False, "switches": {"b": False, "a": True}},
            "block_attention:off+a:on+b:off",
        ),
    ],
)
def test_identity_names_kernels_that_are_not_as_by_default(
    changes: dict[str, Any], kernels: str
) -> None:
    config = PluginConfig(**changes)
    assert config.kernels == kernels
    target, drafter, prompts = assets.require()
    made = [
        engine_cost_identity(
            SERVER,
            PairFolders(target, drafter, prompts, "pair"),
            version="0.5.16",
            gpu_name="NVIDIA H200",
            multiprocessors=132,
            torch_version="2.11.0+cu130",
            max_batch=4,
            kernels=told,
        )
        for told in ("", config.kernels)
    ]
    assert made[0].backends == "attention=triton,linear=triton,moe=triton"
    assert (made[0] == made[1]) == (not kernels)
    assert made[1].backends.removeprefix(made[0].backends) == (
        f",plugin={kernels}" if kernels else ""
    )
