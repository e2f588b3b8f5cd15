"""Writes a Hugging Face checkpoint tensor by tensor: one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridspec.demo.padded_weights import PaddedWeights, Recipe

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_PIECE_BYTES = 64 << 20
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """One safetensors file to be.

    Attributes:
        name: of the file.
        recipes: its tensors in order.
        header: bytes that come before their data.
    """

    name: str
    recipes: tuple[Recipe, ...]
    header: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(recipe.num_bytes for recipe in self.recipes)


def _header(recipes: Iterable[Recipe]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for recipe in recipes:
        stop = offset + recipe.num_bytes
        entries[recipe.name] = {
            "dtype": _NAMES[recipe.dtype],
            "shape": list(recipe.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def plan_shards(weights: PaddedWeights, shard_bytes: int) -> tuple[Shard, ...]:
    """Files of at most `shard_bytes` of tensors each, or of one tensor that is larger."""
    groups: list[list[Recipe]] = [[]]
    used = 0
    for recipe in weights.recipes.values():
        if groups[-1] and used + recipe.num_bytes > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(recipe)
        used += recipe.num_bytes
    count = len(groups)
    return tuple(
        Shard(
            "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors",
            tuple(group),
            _header(group),
        )
        for i, group in enumerate(groups, start=1)
    )


def write_shards(folder: Path, shards: Sequence[Shard], advance: Callable[[int], None]) -> None:
    """Make every tensor and write it.

    Args:
        folder: exists and holds no weights.
        advance: called with the number of bytes written since its last call.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    for shard in shards:
        with (folder / shard.name).open("wb", buffering=0) as file:
            file.write(shard.header)
            for recipe in shard.recipes:
                _write_tensor(file.write, recipe, advance)
    if len(shards) > 1:
        total = sum(recipe.num_bytes for shard in shards for recipe in shard.recipes)
        weight_map = {recipe.name: shard.name for shard in shards for recipe in shard.recipes}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _write_tensor(
    write: Callable[[memoryview], int], recipe: Recipe, advance: Callable[[int], None]
) -> None:
    tensor = recipe.make()
    assert (tuple(tensor.shape), tensor.dtype) == (recipe.shape, recipe.dtype), recipe.name
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, recipe.num_bytes, _PIECE_BYTES):
        piece = flat[start : start + _PIECE_BYTES].cpu().numpy().data
        while piece:  # unbuffered files may take less than they are given
            done = write(piece)
            advance(done)
            piece = piece[done:]
