"""A pair on the card, padded to the full shape or as it is, and its prompts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridspec.reference.config import load_drafter_config, load_target_config
from hybridspec.reference.gpu.weights import (
    DrafterWeights,
    TargetWeights,
    folder_tensors,
    load_drafter,
    load_target,
)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a pair's list."""

    category: str
    split: str
    ids: list[int]


def load_weights(
    folder: Path, *, padded: bool, device: torch.device, dtype: torch.dtype
) -> tuple[TargetWeights, DrafterWeights, dict[str, Any]]:
    """Weights of `folder/target` and `folder/drafter`, and facts for the result file."""
    if not padded:
        streams = (
            folder_tensors(folder / "target", device),
            folder_tensors(folder / "drafter", device),
        )
        configs = (load_target_config(folder / "target"), load_drafter_config(folder / "drafter"))
        facts: dict[str, Any] = {"pair": folder.name, "padded": False}
    else:
        from hybridspec.demo.padded_pair import PaddedPair
        from hybridspec.demo.padded_shape import QWEN36_35B_A3B

        pair = PaddedPair.open(folder, QWEN36_35B_A3B, dtype=dtype, device=device)
        target_json, drafter_json = pair.configs()
        with tempfile.TemporaryDirectory() as made:
            for name, content in (("target", target_json), ("drafter", drafter_json)):
                (Path(made) / name).mkdir()
                (Path(made) / name / "config.json").write_text(
                    json.dumps(content), encoding="utf-8"
                )
            configs = (
                load_target_config(Path(made) / "target"),
                load_drafter_config(Path(made) / "drafter"),
            )
        streams = (iter(pair.target_weights()), iter(pair.drafter_weights()))
        facts = {"pair": folder.name, "padded": True, **target_json["hybridspec_padding"]["source"]}
    target = load_target(configs[0], streams[0], dtype=dtype, device=device)
    drafter = load_drafter(configs[1], streams[1], dtype=dtype, device=device)
    return target, drafter, facts


def load_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON list ({cat, split, ids}) or of JSON lines ({category, split, ids})."""
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
    found = []
    for row in rows:
        split = "test" if row.get("split", "test") == "test" else "calibration"
        found.append(Prompt(row.get("category", row.get("cat", "all")), split, list(row["ids"])))
    return found


def balanced(prompts: Sequence[Prompt], count: int, split: str) -> list[Prompt]:
    """About `count` prompts of a split, as many of each category, categories in turn."""
    categories = sorted({prompt.category for prompt in prompts})
    each = max(1, count // len(categories))
    columns = []
    for category in categories:
        members = [p for p in prompts if p.category == category and p.split == split]
        step = max(1, len(members) // each)
        columns.append(members[::step][:each])
    return [column[i] for i in range(each) for column in columns if i < len(column)][:count]
