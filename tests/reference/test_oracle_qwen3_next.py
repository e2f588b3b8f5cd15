"""Qwen3-Next: its own tensor names and orders, against `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import assert_same_text, decode, random_tokens, teacher_forced
from oracle_kit import assert_equal_to_oracle, load_oracle, oracle_greedy
from safetensors.torch import load_file, save_file
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from hybridspec.reference.loading import load_pair
from hybridspec.request import LengthRule

CONFIG: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
    "num_experts_per_tok": 3,
    "num_experts": 8,
    "max_position_embeddings": 512,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "eos_token_id": None,
    "pad_token_id": 1,
    "bos_token_id": None,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder as `save_pretrained` writes it, of weights large enough that mistakes show."""
    torch.manual_seed(11)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**{**CONFIG, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif "A_log" in name:
                parameter.uniform_(-0.7, 2.0)
            elif "dt_bias" in name:
                parameter.uniform_(-4.0, 0.0)
            else:
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    model.save_pretrained(folder)
    return folder


def check(folder: Path) -> None:
    model = load_oracle(folder, "Qwen3NextForCausalLM")
    engine = load_pair(folder, None, max_context=256)
    tokens = random_tokens(CONFIG["vocab_size"], 90, seed=2)
    for blocks in ([0], [40, 16, 1, 0]):
        assert_equal_to_oracle(model, tokens, teacher_forced(engine, tokens, blocks))
    [ours] = decode(engine, [tokens[:30]], LengthRule("none"), 16)
    assert_same_text(engine, tokens[:30], oracle_greedy(model, tokens[:30], 16), ours)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False, "norm_topk_prob": True},
        {"tie_word_embeddings": True, "norm_topk_prob": False},
        {"full_attention_interval": 2, "linear_num_key_heads": 1, "linear_num_value_heads": 3},
    ],
    ids=["renormalised", "tied-not-renormalised", "interval-2"],
)
def test_saved_folder_equals_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    check(write_model(tmp_path, **changes))


def test_expert_by_expert_tensors_equal_fused_ones(tmp_path: Path) -> None:
    """Published checkpoints keep one tensor an expert; recent ones may fuse them."""
    folder = write_model(tmp_path)
    check(folder)
    tensors = load_file(folder / "model.safetensors")
    single = [n for n in tensors if ".experts." in n]
    fused = any(name.endswith("experts.gate_up_proj") for name in single)
    changed = {n: t for n, t in tensors.items() if n not in single}
    for layer in range(CONFIG["num_hidden_layers"]):
        root = f"model.layers.{layer}.mlp.experts."
        if fused:
            width = CONFIG["moe_intermediate_size"]
            for e in range(CONFIG["num_experts"]):
                gate, up = tensors[root + "gate_up_proj"][e].split(width)
                changed[f"{root}{e}.gate_proj.weight"] = gate.contiguous()
                changed[f"{root}{e}.up_proj.weight"] = up.contiguous()
                changed[f"{root}{e}.down_proj.weight"] = tensors[root + "down_proj"][e].contiguous()
        else:
            gates, ups, downs = (
                [tensors[f"{root}{e}.{kind}_proj.weight"] for e in range(CONFIG["num_experts"])]
                for kind in ("gate", "up", "down")
            )
            pairs = zip(gates, ups, strict=True)
            changed[root + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            changed[root + "down_proj"] = torch.stack(downs)
    before = load_pair(folder, None, max_context=256)
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    after = load_pair(folder, None, max_context=256)
    tokens = random_tokens(CONFIG["vocab_size"], 50, seed=3)
    want, have = (teacher_forced(e, tokens, [0]).logits for e in (before, after))
    assert torch.equal(want, have)
