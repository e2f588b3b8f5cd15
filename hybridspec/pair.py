"""A pair as a command names it: where its folders lie, what it runs on, and its identities."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hybridspec
from hybridspec.artifacts.digest import config_digest, model_digest
from hybridspec.artifacts.identity import (
    CalibrationIdentity,
    CostIdentity,
    cpu_slug,
    device_slug,
    usable_cores,
)
from hybridspec.errors import EnvironmentMissing, ModelError, UsageError

EMBEDDED_NAME = "hybridspec-embedded"
REFERENCE_ENGINE = "reference"
_HBM_GPUS = ("a100", "a30", "h100", "h200", "h20", "gh200", "b200", "b300", "gb200", "mi2", "mi3")
_GDDR_GPUS = ("rtx", "l40", "l4", "a10", "a40", "t4", "geforce")


@dataclass(frozen=True)
class PairFolders:
    """Folders of one pair.

    Attributes:
        drafter: None for plain decoding only.
        prompts: bundled prompts of the embedded pair; None for a pair of the user's.
        name: what a server calls it.
    """

    target: Path
    drafter: Path | None
    prompts: Path | None
    name: str


def pair_folders(
    target: Path | None, drafter: Path | None, *, drafter_needed: bool = True
) -> PairFolders:
    """The folders that a command line names; without a target those of the embedded pair.

    Raises:
        UsageError: a drafter without its target, or a target without the drafter it needs.
        EnvironmentMissing: the embedded pair is not installed.
    """
    if target is None:
        if drafter is not None:
            raise UsageError(
                f"--drafter {drafter} is given without TARGET; a drafter belongs to one target: "
                "name both folders, or neither for the embedded pair"
            )
        from hybridspec.demo import assets

        embedded_target, embedded_drafter, prompts = assets.require()
        return PairFolders(embedded_target, embedded_drafter, prompts, EMBEDDED_NAME)
    if drafter is None and drafter_needed:
        raise UsageError(
            f"TARGET {target} is given without its drafter; drafting needs one: add --drafter DIR"
        )
    return PairFolders(target, drafter, None, target.resolve().name)


@dataclass(frozen=True)
class Placement:
    """Where and how an engine computes.

    Attributes:
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: `float32` or `bfloat16`.
        threads: CPU threads.
    """

    device: str
    dtype: Literal["float32", "bfloat16"]
    threads: int


def place(
    *, device: str, dtype: Literal["auto", "float32", "bfloat16"], threads: int | None
) -> Placement:
    """Settle `auto` and set the number of threads of this process.

    Raises:
        UsageError: no such kind of device.
        EnvironmentMissing: the device is not there.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise UsageError(f"device {device!r} is unknown: use auto, cpu, cuda or cuda:N")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise EnvironmentMissing(
                f"device {device} is asked for, but torch sees {count} CUDA devices: use "
                "--device cpu, or see `hybridspec doctor`"
            )
    if threads is not None:
        torch.set_num_threads(threads)
    if dtype == "auto":
        dtype = "float32" if kind == "cpu" else "bfloat16"
    return Placement(device=device, dtype=dtype, threads=torch.get_num_threads())


def calibration_identity(
    folders: PairFolders,
    *,
    dtype: str,
    temperature: float,
    top_p: float,
    prompts_digest: str | None,
) -> CalibrationIdentity:
    """Identity of hazards and routing of this pair.

    Raises:
        ModelError: a folder that is no model folder, or no drafter.
    """
    if folders.drafter is None:
        raise ModelError(f"target {folders.target} has no drafter, so there are no hazards of it")
    return CalibrationIdentity(
        target_digest=model_digest(folders.target),
        drafter_digest=model_digest(folders.drafter),
        dtype=dtype,
        temperature=temperature,
        top_p=top_p,
        prompts_digest=prompts_digest,
        quantization=quantization(folders.target),
    )


def cost_identity(folders: PairFolders, placement: Placement, *, max_batch: int) -> CostIdentity:
    """Identity of latencies of this pair's architecture on this machine."""
    import torch

    if placement.device == "cpu":
        device, memory, cores = cpu_slug(), "ram", usable_cores()
    else:
        properties = torch.cuda.get_device_properties(torch.device(placement.device))
        device, cores = device_slug(properties.name), properties.multi_processor_count
        memory = memory_class(properties.name)
    drafter = folders.drafter
    return CostIdentity(
        device=device,
        memory_class=memory,
        cores=cores,
        threads=placement.threads,
        engine=REFERENCE_ENGINE,
        engine_version=hybridspec.__version__,
        dtype=placement.dtype,
        architecture_digest=config_digest(folders.target),
        max_batch=max_batch,
        torch_version=".".join(torch.__version__.split("+")[0].split(".")[:2]),
        quantization=quantization(folders.target),
        drafter_architecture_digest=None if drafter is None else config_digest(drafter),
    )


def memory_class(gpu_name: str) -> str:
    """`hbm`, `gddr` or `unknown`, by the marketing name of a GPU."""
    words = gpu_name.lower().replace("-", " ").split()
    for kind, prefixes in (("hbm", _HBM_GPUS), ("gddr", _GDDR_GPUS)):
        if any(word.startswith(prefix) for word in words for prefix in prefixes):
            return kind
    return "unknown"


def quantization(folder: Path) -> str:
    """Scheme of the weights that `config.json` names, `none` without one."""
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return "none"  # digests and the loader refuse such a folder with their own words
    for part in (config, config.get("text_config") if isinstance(config, dict) else None):
        scheme = part.get("quantization_config") if isinstance(part, dict) else None
        if isinstance(scheme, dict):
            return str(scheme.get("quant_method") or "unknown")
    return "none"
