"""`config.json` of a padded target and drafter, made from the source's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from hybridspec.artifacts.digest import PADDING_KEY
from hybridspec.demo.padded_shape import PaddedShape, Padding
from hybridspec.demo.presets import FULL_ATTENTION_INTERVAL

FORMAT = 1
KEY = PADDING_KEY
# Of the trainer: it says which module to build, and there is none of the padded shape.
_DROPPED = ("hybridspec_preset", "transformers_version")


def placement(shape: PaddedShape, padding: Padding) -> dict[str, Any]:
    """Shape and placement as plain values."""
    return {
        "shape": dataclasses.asdict(shape),
        "copy_scales": list(padding.copy_scales),
        "constant_dim": padding.constant_dim,
        "live_layers": list(padding.live_layers),
        "router_layers": list(padding.router_layers),
        "taps": [list(tap) for tap in padding.taps],
    }


def _record(shape: PaddedShape, padding: Padding, source: Mapping[str, str]) -> dict[str, Any]:
    return {"format": FORMAT, "source": dict(source), **placement(shape, padding)}


def padded_target_config(
    source: Mapping[str, Any],
    shape: PaddedShape,
    padding: Padding,
    dtype: torch.dtype,
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """Config of the target: the source's with new sizes, untied, and how it was made."""
    config = {k: copy.deepcopy(v) for k, v in source.items() if k not in _DROPPED}
    name = str(dtype).removeprefix("torch.")
    config["text_config"] |= {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "linear_num_key_heads": shape.gdn_key_heads,
        "linear_num_value_heads": shape.gdn_value_heads,
        "moe_intermediate_size": shape.expert_width,
        "shared_expert_intermediate_size": shape.shared_width,
        "max_position_embeddings": shape.max_positions,
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "layer_types": [
            "full_attention" if full else "linear_attention" for full in shape.layer_is_attention
        ],
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 0,
        "tie_word_embeddings": False,
        "dtype": name,
    }
    config["tie_word_embeddings"] = False
    config["dtype"] = name
    if "vision_config" in config:
        # Never run, but engines build it and share its heads out to as many as eight devices.
        config["vision_config"] |= {
            "hidden_size": 256,
            "num_heads": 8,
            "intermediate_size": 256,
            "out_hidden_size": shape.hidden,
        }
    config[KEY] = _record(shape, padding, digests)
    return config


def padded_drafter_config(
    source: Mapping[str, Any],
    shape: PaddedShape,
    padding: Padding,
    dtype: torch.dtype,
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """Config of the drafter, in the same way."""
    config = {k: copy.deepcopy(v) for k, v in source.items() if k not in _DROPPED}
    config |= {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.draft_layers,
        "num_attention_heads": shape.draft_heads,
        "num_key_value_heads": shape.draft_kv_heads,
        "head_dim": shape.draft_head_dim,
        "intermediate_size": shape.draft_width,
        "max_position_embeddings": shape.max_positions,
        "layer_types": ["full_attention"] * shape.draft_layers,
        "num_target_layers": shape.layers,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    config["dflash_config"] |= {
        "target_layer_ids": [layer for layer, _ in padding.taps],
        "num_target_layers": shape.layers,
    }
    config[KEY] = _record(shape, padding, digests)
    return config
