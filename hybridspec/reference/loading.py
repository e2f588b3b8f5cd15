"""From two Hugging Face folders to an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridspec.errors import EnvironmentMissing, UsageError
from hybridspec.policy import Policy
from hybridspec.reference.config import check_pair, load_drafter_config, load_target_config
from hybridspec.reference.drafter import Drafter
from hybridspec.reference.engine import Engine
from hybridspec.reference.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_pair(
    target_folder: Path | str,
    drafter_folder: Path | str | None,
    *,
    dtype: str | torch.dtype = "float32",
    device: str = "cpu",
    max_batch: int = 8,
    max_context: int | None = None,
    policy: Policy | None = None,
) -> Engine:
    """Load a target and its drafter.

    Args:
        target_folder: `Qwen3_5MoeForConditionalGeneration` (or Qwen3-Next) in Hugging Face layout.
        drafter_folder: its `DFlashDraftModel`, or None for plain decoding only.
        dtype: `float32` or `bfloat16`; recurrent state and norms stay fp32.
        device: `cpu`, `cuda` or `cuda:N`.
        max_batch: requests at once.
        max_context: tokens a request, the target's own limit by default and at most.
        policy: chooses verify lengths.

    Raises:
        ModelError: a folder that is no such model, is damaged, or a drafter of another target.
        UsageError: an unknown dtype or a context beyond the target's.
        EnvironmentMissing: the device is not there.
    """
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is unknown: use {' or '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentMissing(f"device {device} asked for, but torch sees no CUDA: use cpu")
    target_path = Path(target_folder)
    config = load_target_config(target_path)
    limit = config.max_position_embeddings
    if max_context is None:
        max_context = limit
    if not 2 <= max_context <= limit:
        raise UsageError(f"max_context {max_context} must lie in 2..{limit}, the target's limit")
    drafter_config = None
    if drafter_folder is not None:
        drafter_config = load_drafter_config(Path(drafter_folder))
        check_pair(config, drafter_config, Path(drafter_folder))
    target = Target(
        target_path,
        config,
        dtype=dtype,
        device=where,
        max_positions=max_context + 1,
        feature_layers=drafter_config.target_layer_ids if drafter_config else (),
    )
    drafter = None
    if drafter_config is not None:
        drafter = Drafter(
            Path(str(drafter_folder)),
            drafter_config,
            embedding_VH=target.embedding_VH,
            lm_head_VH=target.lm_head_VH,
            dtype=dtype,
            device=where,
            max_positions=max_context,
        )
    return Engine(target, drafter, max_batch=max_batch, max_context=max_context, policy=policy)
