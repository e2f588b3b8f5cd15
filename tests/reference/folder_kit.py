"""Changes to model folders: a config, some tensors, weights in shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})


def shard(folder: Path, parts: int) -> None:
    """Split one file of weights into shards with an index."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names, weight_map = sorted(tensors), {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        chosen = names[part::parts]
        save_file({n: tensors[n] for n in chosen}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
