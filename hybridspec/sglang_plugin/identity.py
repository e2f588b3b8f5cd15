"""Identities of a pair and machine as a SGLang server runs them.

One function for both sides: the worker compares a bundle with it, and `profile-latency --engine
sglang` writes it from what the server's `/server_info` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridspec.artifacts.digest import config_digest
from hybridspec.artifacts.identity import CalibrationIdentity, CostIdentity, device_slug
from hybridspec.errors import ModelError
from hybridspec.pair import PairFolders, calibration_identity, memory_class, quantization

ENGINE = "sglang"
# Drafting, verification and acceptance run on the device; threads of the host change no latency.
HOST_THREADS = 1
TIER_HORIZON = 8


def pair_of(server: Mapping[str, Any]) -> PairFolders:
    """Folders of the pair that a server runs.

    Args:
        server: fields of its `ServerArgs`.

    Raises:
        ModelError: a model that is not a local folder, so that its digest is not known.
    """
    target = _folder(server, "model_path")
    drafter = None
    if server.get("speculative_draft_model_path"):
        drafter = _folder(server, "speculative_draft_model_path")
    return PairFolders(target, drafter, None, target.name)


def engine_cost_identity(
    server: Mapping[str, Any],
    folders: PairFolders,
    *,
    version: str,
    gpu_name: str,
    multiprocessors: int,
    torch_version: str,
    max_batch: int,
    dtype: str = "bfloat16",
    kernels: str = "",
) -> CostIdentity:
    """Identity of latencies of a pair's architecture in a SGLang server.

    Args:
        server: fields of its `ServerArgs` after they are resolved.
        version: of SGLang.
        gpu_name: marketing name of the GPU.
        torch_version: as `torch.__version__` says it.
        max_batch: largest batch measured, or served.
        dtype: of weights and activations.
        kernels: `PluginConfig.kernels`, which a server does not tell: of its own configuration
            where that is known, else as by default.
    """
    drafter = folders.drafter
    return CostIdentity(
        device=device_slug(gpu_name),
        memory_class=memory_class(gpu_name),
        cores=multiprocessors,
        threads=HOST_THREADS,
        engine=ENGINE,
        engine_version=version,
        dtype=dtype,
        architecture_digest=config_digest(folders.target),
        max_batch=max_batch,
        torch_version=".".join(torch_version.split("+")[0].split(".")[:2]),
        quantization=quantization(folders.target),
        drafter_architecture_digest=None if drafter is None else config_digest(drafter),
        tp_size=int(server.get("tp_size") or 1),
        backends=backends(server) + (f",plugin={kernels}" if kernels else ""),
        graph_tiers=graph_tiers(server),
    )


def engine_calibration_identity(
    folders: PairFolders, saved: CalibrationIdentity, *, dtype: str = "bfloat16"
) -> CalibrationIdentity:
    """Identity of the pair; sampling and prompts belong to requests, so they are as saved."""
    return calibration_identity(
        folders,
        dtype=dtype,
        temperature=saved.temperature,
        top_p=saved.top_p,
        prompts_digest=None,
    )


def backends(server: Mapping[str, Any]) -> str:
    """Kernels behind attention, linear attention and experts, as identities name them."""
    attention = server.get("decode_attention_backend") or server.get("attention_backend")
    linear = server.get("linear_attn_decode_backend") or server.get("linear_attn_backend")
    moe = server.get("moe_runner_backend")
    return f"attention={attention},linear={linear},moe={moe}"


def graph_tiers(server: Mapping[str, Any]) -> str:
    """Captured batch sizes that batches of 1 to 8 requests are padded to.

    The horizon is fixed, so that servers with other limits on their requests still compare.
    """
    config = server.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, Mapping) else getattr(config, "decode", {})
    sizes = decode.get("bs") if isinstance(decode, Mapping) else getattr(decode, "bs", None)
    padded = {
        min((s for s in sizes or () if s >= n), default=0) for n in range(1, TIER_HORIZON + 1)
    }
    tiers = sorted(padded - {0})
    return "masked:" + ",".join(map(str, tiers)) if tiers else "none"


def _folder(server: Mapping[str, Any], name: str) -> Path:
    value = str(server.get(name) or "")
    folder = Path(value)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{name} {value!r} is no local model folder, so its digest is not known: name the "
            "folder that holds its config.json and weights"
        )
    return folder
