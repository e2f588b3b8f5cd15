"""A pair's folders to a probe of its captured rounds, and whether it can have one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from hybridspec.errors import ModelError
from hybridspec.kernels.gdn.inputs import HEAD_DIMS
from hybridspec.kernels.small_moe.tiles import tiles_for
from hybridspec.reference.config import TargetConfig, load_drafter_config, load_target_config
from hybridspec.reference.gpu.control import make_control
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.measured import EngineRound
from hybridspec.reference.gpu.profile import GpuProbe
from hybridspec.reference.gpu.weights import folder_tensors, load_drafter, load_target


def captured_refusal(config: TargetConfig, *, dtype: str, device: str) -> str | None:
    """Why rounds of this target cannot be captured here, or None where they can."""
    if not device.startswith("cuda"):
        return f"the device is {device}; captured rounds need a GPU"
    if dtype != "bfloat16":
        return f"the type is {dtype}; the kernels of captured rounds take bfloat16"
    if config.architecture == "Qwen3NextForCausalLM":
        return "Qwen3NextForCausalLM stores projections head by head, which they do not read"
    for dim in (config.gdn_key_dim, config.gdn_value_dim):
        if dim not in HEAD_DIMS:
            return f"GDN heads of {dim} dimensions; the kernels take {HEAD_DIMS}"
    tiles = [tiles_for(rows, 90) for rows in (1, 2, 16)]
    for name, size, parts in (
        ("hidden size", config.hidden_size, {n for t in tiles for n in (t.gate_up_k, t.down_n)}),
        (
            "expert width",
            config.expert_width,
            {n for t in tiles for n in (t.gate_up_n, 16 * t.down_parts)},
        ),
    ):
        for part in sorted(parts):
            if size % part:
                return f"{name} {size} is not a multiple of {part}, as the MoE kernels need it"
    return None


def tensors_of(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors of a model folder, or of a padded pair that is made while it loads.

    Raises:
        ModelError: a padded folder without weights, and no source pair named.
    """
    from hybridspec.demo.sglang_weights import SOURCE_ENV, is_weightless, make_weights

    if not is_weightless(folder):
        return folder_tensors(folder, device)
    source = os.environ.get(SOURCE_ENV)
    if not source:
        raise ModelError(
            f"{folder} is of a padded pair without weights: name the pair that it was made from "
            f"in {SOURCE_ENV}"
        )
    return make_weights(folder, Path(source), device)


def pair_probe(
    target: Path,
    drafter: Path,
    *,
    device: str,
    max_batch: int,
    max_context: int,
    texts: Sequence[Sequence[int]],
    identity: Mapping[str, str],
    control: str = "masked",
) -> GpuProbe:
    """Load a pair once and measure its captured rounds at every batch size up to `max_batch`.

    Args:
        target, drafter: folders in Hugging Face layout.
        texts: token ids that contexts are cut from.
        identity: facts that bind the measurement.
        control: as `--graph-control` names it.

    Raises:
        ModelError: a folder that is no such model.
        EnvironmentMissing: `switch` without a driver that has SWITCH nodes.
    """
    make_control(control)
    where = torch.device(device)
    target_weights = load_target(
        load_target_config(target),
        tensors_of(target, where),
        dtype=torch.bfloat16,
        device=where,
    )
    drafter_weights = load_drafter(
        load_drafter_config(drafter),
        tensors_of(drafter, where),
        dtype=torch.bfloat16,
        device=where,
    )

    def make_round(batch: int) -> EngineRound:
        engine = GpuEngine(target_weights, drafter_weights, batch=batch, max_context=max_context)
        return EngineRound(engine, texts)

    return GpuProbe(
        make_round, partial(make_control, control), max_batch=max_batch, identity=identity
    )
