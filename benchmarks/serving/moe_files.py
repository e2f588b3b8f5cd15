"""The fused-MoE configuration that was tuned on the card, where SGLang looks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
# The later file wins where both have a row count.
_TUNED = ("small_moe.json", "small_moe_shipped.json")


def tuned_configs() -> tuple[dict[int, Any], dict[int, Any]]:
    """Configurations of the gate-up and the down GEMM by rows, as `small_moe.py` found them."""
    up: dict[int, Any] = {}
    down: dict[int, Any] = {}
    for name in _TUNED:
        for row in json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]:
            if row["routes"] == "independent" and "sglang_configs" in row:
                up[row["rows"]], down[row["rows"]] = row["sglang_configs"]
    return up, down


def write_configs(folder: Path, *, gpu_name: str, triton_version: str) -> Path:
    """Write them below `folder`, which goes into SGLANG_MOE_CONFIG_DIR.

    Two ranks hold half of each expert's width: they get the same, which was tuned for the whole.

    Args:
        gpu_name: as torch names the device.
    """
    place = folder / "configs" / f"triton_{triton_version.replace('.', '_')}"
    place.mkdir(parents=True, exist_ok=True)
    for ending, configs in zip(("", "_down"), tuned_configs(), strict=True):
        content = json.dumps({str(rows): configs[rows] for rows in sorted(configs)}, indent=1)
        for width in (512, 256):
            name = f"E=256,N={width},device_name={gpu_name.replace(' ', '_')}{ending}.json"
            (place / name).write_text(content + "\n", encoding="utf-8")
    return folder
