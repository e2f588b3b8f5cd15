"""Pairs of random weights in any shape, written as Hugging Face folders.

For tests against `transformers` and for timing a shape before it is trained. Text is noise.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class PairShape:
    """Shape of a target (Qwen3.5-MoE text model) and of its DFlash drafter."""

    vocab_size: int = 320
    hidden_size: int = 64
    num_layers: int = 4
    full_attention_interval: int = 4
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    gdn_key_heads: int = 1
    gdn_value_heads: int = 2
    gdn_key_dim: int = 16
    gdn_value_dim: int = 16
    num_experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 16
    shared_width: int = 32
    drafter_layers: int = 1
    drafter_heads: int = 2
    drafter_kv_heads: int = 1
    drafter_head_dim: int = 32
    drafter_mlp_width: int = 64
    target_layer_ids: tuple[int, ...] = (0, 2)
    tied_embeddings: bool = True
    max_position_embeddings: int = 4096
    partial_rotary_factor: float = 0.25


def target_config(shape: PairShape) -> dict[str, object]:
    """`config.json` of the target."""
    half = int(shape.head_dim * shape.partial_rotary_factor) // 2
    third = half // 3
    text = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": shape.gdn_key_dim,
        "linear_value_head_dim": shape.gdn_value_dim,
        "linear_num_key_heads": shape.gdn_key_heads,
        "linear_num_value_heads": shape.gdn_value_heads,
        "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.shared_width,
        "num_experts_per_tok": shape.experts_per_token,
        "num_experts": shape.num_experts,
        "norm_topk_prob": True,
        "full_attention_interval": shape.full_attention_interval,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "layer_types": [
            "full_attention" if (i + 1) % shape.full_attention_interval == 0 else "linear_attention"
            for i in range(shape.num_layers)
        ],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": shape.partial_rotary_factor,
            "mrope_section": [half - 2 * third, third, third],
            "mrope_interleaved": True,
        },
        "dtype": "float32",
        "pad_token_id": 1,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    vision = {
        "model_type": "qwen3_5_moe_vision",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 1,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": shape.hidden_size,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": shape.tied_embeddings,
        "dtype": "float32",
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
        "eos_token_id": None,
        "pad_token_id": 1,
    }


def drafter_config(shape: PairShape) -> dict[str, object]:
    """`config.json` of the drafter."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.drafter_layers,
        "num_attention_heads": shape.drafter_heads,
        "num_key_value_heads": shape.drafter_kv_heads,
        "head_dim": shape.drafter_head_dim,
        "intermediate_size": shape.drafter_mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention"] * shape.drafter_layers,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "num_target_layers": shape.num_layers,
        "block_size": 16,
        "dflash_config": {
            "target_layer_ids": list(shape.target_layer_ids),
            "mask_token_id": 4,
            "block_size": 16,
            "num_target_layers": shape.num_layers,
        },
    }


class _Weights:
    """Random tensors with scales that keep activations near one."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        values = torch.randn(*shape, generator=self.generator)
        self.tensors[name] = values * (gain / math.sqrt(shape[-1]))

    def vector(self, name: str, size: int, low: float, high: float) -> None:
        values = torch.rand(size, generator=self.generator)
        self.tensors[name] = low + (high - low) * values


def target_weights(shape: PairShape, seed: int) -> dict[str, torch.Tensor]:
    """fp32 tensors under Hugging Face's names."""
    w, hidden = _Weights(seed), shape.hidden_size
    keys = shape.gdn_key_heads * shape.gdn_key_dim
    values = shape.gdn_value_heads * shape.gdn_value_dim
    root = "model.language_model."
    w.matrix(root + "embed_tokens.weight", shape.vocab_size, hidden, gain=math.sqrt(hidden))
    w.vector(root + "norm.weight", hidden, -0.3, 0.3)
    if not shape.tied_embeddings:
        w.matrix("lm_head.weight", shape.vocab_size, hidden, gain=3.0)
    for i in range(shape.num_layers):
        layer = f"{root}layers.{i}."
        w.vector(layer + "input_layernorm.weight", hidden, -0.3, 0.3)
        w.vector(layer + "post_attention_layernorm.weight", hidden, -0.3, 0.3)
        if (i + 1) % shape.full_attention_interval == 0:
            mixer = layer + "self_attn."
            width, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
            w.matrix(mixer + "q_proj.weight", 2 * width, hidden)
            w.matrix(mixer + "k_proj.weight", kv, hidden)
            w.matrix(mixer + "v_proj.weight", kv, hidden)
            w.matrix(mixer + "o_proj.weight", hidden, width)
            w.vector(mixer + "q_norm.weight", shape.head_dim, -0.3, 0.3)
            w.vector(mixer + "k_norm.weight", shape.head_dim, -0.3, 0.3)
        else:
            mixer = layer + "linear_attn."
            w.matrix(mixer + "in_proj_qkv.weight", 2 * keys + values, hidden)
            w.matrix(mixer + "in_proj_z.weight", values, hidden)
            w.matrix(mixer + "in_proj_b.weight", shape.gdn_value_heads, hidden)
            w.matrix(mixer + "in_proj_a.weight", shape.gdn_value_heads, hidden)
            w.matrix(mixer + "conv1d.weight", 2 * keys + values, 1, 4)
            w.vector(mixer + "dt_bias", shape.gdn_value_heads, -4.0, 0.0)
            w.vector(mixer + "A_log", shape.gdn_value_heads, -0.7, 2.0)
            w.vector(mixer + "norm.weight", shape.gdn_value_dim, 0.5, 1.5)
            w.matrix(mixer + "out_proj.weight", hidden, values)
        mlp = layer + "mlp."
        experts, width, shared = shape.num_experts, shape.expert_width, shape.shared_width
        w.matrix(mlp + "gate.weight", experts, hidden, gain=2.0)
        w.matrix(mlp + "experts.gate_up_proj", experts, 2 * width, hidden)
        w.matrix(mlp + "experts.down_proj", experts, hidden, width)
        w.matrix(mlp + "shared_expert.gate_proj.weight", shared, hidden)
        w.matrix(mlp + "shared_expert.up_proj.weight", shared, hidden)
        w.matrix(mlp + "shared_expert.down_proj.weight", hidden, shared)
        w.matrix(mlp + "shared_expert_gate.weight", 1, hidden)
    return w.tensors


def drafter_weights(shape: PairShape, seed: int) -> dict[str, torch.Tensor]:
    """fp32 tensors under the names of public DFlash checkpoints."""
    w, hidden, dim = _Weights(seed), shape.hidden_size, shape.drafter_head_dim
    width, kv = shape.drafter_heads * dim, shape.drafter_kv_heads * dim
    w.matrix("fc.weight", hidden, len(shape.target_layer_ids) * hidden)
    w.vector("hidden_norm.weight", hidden, 0.7, 1.3)
    w.vector("norm.weight", hidden, 0.7, 1.3)
    for i in range(shape.drafter_layers):
        layer = f"layers.{i}."
        w.vector(layer + "input_layernorm.weight", hidden, 0.7, 1.3)
        w.vector(layer + "post_attention_layernorm.weight", hidden, 0.7, 1.3)
        w.matrix(layer + "self_attn.q_proj.weight", width, hidden)
        w.matrix(layer + "self_attn.k_proj.weight", kv, hidden)
        w.matrix(layer + "self_attn.v_proj.weight", kv, hidden)
        w.matrix(layer + "self_attn.o_proj.weight", hidden, width)
        w.vector(layer + "self_attn.q_norm.weight", dim, 0.7, 1.3)
        w.vector(layer + "self_attn.k_norm.weight", dim, 0.7, 1.3)
        w.matrix(layer + "mlp.gate_proj.weight", shape.drafter_mlp_width, hidden)
        w.matrix(layer + "mlp.up_proj.weight", shape.drafter_mlp_width, hidden)
        w.matrix(layer + "mlp.down_proj.weight", hidden, shape.drafter_mlp_width)
    return w.tensors


def write_random_pair(folder: Path, shape: PairShape, *, seed: int) -> tuple[Path, Path]:
    """Write `folder/target` and `folder/drafter`; returns both paths."""
    paths = []
    for name, config, tensors in (
        ("target", target_config(shape), target_weights(shape, seed)),
        ("drafter", drafter_config(shape), drafter_weights(shape, seed + 1)),
    ):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        save_file(
            {k: v.contiguous() for k, v in tensors.items()},
            path / "model.safetensors",
            metadata={"format": "pt"},
        )
        paths.append(path)
    return paths[0], paths[1]
