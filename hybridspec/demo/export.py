"""Writes and reads the pair as the two Hugging Face folders that engines load."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.demo.drafter_module import Drafter
from hybridspec.demo.presets import (
    CONV_WIDTH,
    FULL_ATTENTION_INTERVAL,
    MAX_POSITIONS,
    ROTARY_FRACTION,
    PairPreset,
)
from hybridspec.demo.target_module import Target
from hybridspec.demo.tokenization import MASK, TokenIds
from hybridspec.errors import ModelError

SHARD_BYTES = 15 << 20
_PREFIX = "model.language_model."
_PRESET_KEY = "hybridspec_preset"
_KEPT_IN_FP32 = ("A_log", "linear_attn.norm.weight")


def _preset_json(preset: PairPreset) -> dict[str, Any]:
    return dataclasses.asdict(preset)


def target_config(preset: PairPreset, ids: TokenIds) -> dict[str, Any]:
    """Returns config.json of the target; the vision part is a stub that engines insist on."""
    pairs = int(preset.head_dim * ROTARY_FRACTION) // 2
    third = pairs // 3
    text = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": preset.vocab,
        "hidden_size": preset.hidden,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": preset.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": preset.norm_eps,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": CONV_WIDTH,
        "linear_key_head_dim": preset.gdn_key_dim,
        "linear_value_head_dim": preset.gdn_value_dim,
        "linear_num_key_heads": preset.gdn_key_heads,
        "linear_num_value_heads": preset.gdn_value_heads,
        "mamba_ssm_dtype": "float32",
        "num_experts": preset.experts,
        "num_experts_per_tok": preset.experts_per_token,
        "moe_intermediate_size": preset.expert_width,
        "shared_expert_intermediate_size": preset.shared_width,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "layer_types": [
            "full_attention" if preset.is_full_attention(i) else "linear_attention"
            for i in range(preset.layers)
        ],
        "partial_rotary_factor": ROTARY_FRACTION,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": preset.rope_theta,
            "partial_rotary_factor": ROTARY_FRACTION,
            "mrope_section": [pairs - 2 * third, third, third],
            "mrope_interleaved": True,
        },
        "dtype": "bfloat16",
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": ids.end_of_text,
        "pad_token_id": ids.pad,
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
        "out_hidden_size": preset.hidden,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "image_token_id": ids.image,
        "video_token_id": ids.video,
        "vision_start_token_id": ids.vision_start,
        "vision_end_token_id": ids.vision_end,
        "eos_token_id": ids.end_of_text,
        "pad_token_id": ids.pad,
        _PRESET_KEY: _preset_json(preset),
    }


def drafter_config(preset: PairPreset, ids: TokenIds) -> dict[str, Any]:
    """Returns config.json of the drafter."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": preset.vocab,
        "hidden_size": preset.hidden,
        "num_hidden_layers": preset.draft_layers,
        "num_attention_heads": preset.draft_heads,
        "num_key_value_heads": preset.draft_kv_heads,
        "head_dim": preset.draft_head_dim,
        "intermediate_size": preset.draft_width,
        "hidden_act": "silu",
        "rms_norm_eps": preset.norm_eps,
        "attention_bias": False,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": preset.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": preset.rope_theta},
        "layer_types": ["full_attention"] * preset.draft_layers,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "use_cache": True,
        "num_target_layers": preset.layers,
        "block_size": BLOCK_SIZE,
        "eos_token_id": ids.end_of_text,
        "pad_token_id": ids.pad,
        "dflash_config": {
            "target_layer_ids": list(preset.target_layer_ids),
            "mask_token_id": ids.mask,
            "mask_token": MASK,
            "block_size": BLOCK_SIZE,
            "num_target_layers": preset.layers,
        },
        _PRESET_KEY: _preset_json(preset),
    }


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")


def _write_weights(tensors: Mapping[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor.contiguous()
        used += tensor.nbytes
    count = len(shards)
    if count == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05d}-of-{count:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def save_target(target: Target, folder: Path, ids: TokenIds) -> None:
    """Writes weights (bf16, decay rates and output norms fp32), config and generation config."""
    tensors = {
        _PREFIX + name: value.detach().cpu().to(
            torch.float32 if name.endswith(_KEPT_IN_FP32) else torch.bfloat16
        )
        for name, value in target.state_dict().items()
    }  # fmt: skip
    _write_weights(tensors, folder)
    _write_json(folder / "config.json", target_config(target.preset, ids))
    generation = {"eos_token_id": ids.end_of_text, "pad_token_id": ids.pad, "do_sample": False}
    _write_json(folder / "generation_config.json", generation)


def save_drafter(drafter: Drafter, folder: Path, ids: TokenIds) -> None:
    """Writes weights (bf16) and config."""
    tensors = {n: v.detach().cpu().to(torch.bfloat16) for n, v in drafter.state_dict().items()}
    _write_weights(tensors, folder)
    _write_json(folder / "config.json", drafter_config(drafter.preset, ids))


def weight_bytes(preset: PairPreset) -> tuple[int, int]:
    """Returns the bytes of target and drafter weights as exported, without building them."""
    with torch.device("meta"):
        target, drafter = Target(preset), Drafter(preset)
    wide = sum(v.numel() for n, v in target.state_dict().items() if n.endswith(_KEPT_IN_FP32))
    sizes = [sum(v.numel() for v in m.state_dict().values()) for m in (target, drafter)]
    return 2 * sizes[0] + 2 * wide, 2 * sizes[1]


def _read(folder: Path) -> tuple[PairPreset, dict[str, Tensor]]:
    try:
        saved = json.loads((folder / "config.json").read_text())[_PRESET_KEY]
        saved["target_layer_ids"] = tuple(saved["target_layer_ids"])
        preset = PairPreset(**saved)
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            tensors.update(load_file(file))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"{folder} is not a folder that hybridspec.demo.train wrote ({error!r}): train it again"
        ) from error
    return preset, {n.removeprefix(_PREFIX): t.float() for n, t in tensors.items()}


def _load(module: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"{folder}: {error}: train it again") from error


def load_target(folder: Path, device: torch.device) -> Target:
    """Reads a target that `save_target` wrote; fp32 parameters, no gradients."""
    preset, tensors = _read(folder)
    target = Target(preset)
    _load(target, tensors, folder)
    return target.to(device).eval().requires_grad_(False)


def load_drafter(folder: Path, device: torch.device) -> Drafter:
    """Reads a drafter that `save_drafter` wrote; fp32 parameters, no gradients."""
    preset, tensors = _read(folder)
    drafter = Drafter(preset)
    _load(drafter, tensors, folder)
    return drafter.to(device).eval().requires_grad_(False)
