"""What attention of blocks builds on in SGLang 0.5.16's Triton backend, and what does not fit.

Everything is imported when it is called, as in `sglang_0_5_16_target`.
"""

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch

from hybridspec.kernels.block_attention.attention import HEAD_DIMS

# Parameters that are passed on, in order, and those that only SGLang's kernel serves.
FORWARD_EXTEND = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
SERVED_BY_STOCK = ("sinks", "score_mod", "aux_tensors")
OUT_GRAPH = ("forward_batch", "in_capture")
# What a captured verify pass of SGLang's kernels reads and nothing of ours does.
REFILLED = "_update_target_verify_buffers"
DTYPES = (torch.bfloat16, torch.float32)


def full_attention_backend(model_runner: Any) -> Any:
    """The backend of full-attention layers: of a hybrid the one inside."""
    backend = model_runner.attn_backend
    return getattr(backend, "full_attn_backend", backend)


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """Full-attention layers of a model in order of their layer ids."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found = [module for module in model.modules() if isinstance(module, RadixAttention)]
    return sorted(found, key=lambda layer: layer.layer_id)


def backend_does_not_fit(backend: Any, rows: int) -> str | None:
    """Why blocks of `rows` rows stay with SGLang's kernels, None where they need not."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    if type(backend) is not TritonAttnBackend:
        return f"the attention backend is {type(backend).__name__}, not TritonAttnBackend"
    reasons = {
        "it has latent attention": backend.use_mla,
        "contexts are shared between ranks": backend.dcp_size > 1,
        "inference is deterministic": backend.enable_deterministic,
        "caches of sliding windows have slots of their own": backend.use_sliding_window_kv_pool,
        "slots are virtual": backend._translate_kv_loc is not None,
        f"blocks have {backend.num_draft_tokens} rows": backend.num_draft_tokens != rows,
        "drafts are trees": backend.topk > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def form_of(layer: Any, backend: Any) -> bool | str:
    """Whether a layer is causal inside the block, or why it stays with SGLang's kernel."""
    from sglang.srt.layers.radix_attention import AttentionType

    reasons = {
        "a sliding window": (layer.sliding_window_size or -1) > -1,
        "a logit cap": layer.logit_cap > 0,
        "a temperature": layer.xai_temperature_len > 0,
        "scaled keys": layer.k_scale is not None or layer.v_scale is not None,
        "cross attention": layer.is_cross_attention,
        "bidirectional parts": layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL,
        "two head dimensions": layer.qk_head_dim != layer.v_head_dim,
        f"heads of {layer.qk_head_dim}": layer.qk_head_dim not in HEAD_DIMS,
        "unequal groups of heads": layer.tp_q_head_num % layer.tp_k_head_num != 0,
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    keys, values = caches(layer, backend)
    for cache in (keys, values):
        if cache.ndim != 3 or cache.dtype not in DTYPES or cache.stride(1) != layer.qk_head_dim:
            return f"caches of {cache.dtype} with shape {tuple(cache.shape)}"
    return layer.attn_type != AttentionType.ENCODER_ONLY


def caches(layer: Any, backend: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, [slots, kv heads, D]."""
    pool = backend.token_to_kv_pool
    return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)


def save_rows(
    backend: Any, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write keys and values of the block into the caches, as the backend does ahead of attention.

    Args:
        k, v: [rows of all requests, kv heads, D].
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    metadata = backend.forward_metadata
    where = KVWriteLoc(
        forward_batch.out_cache_loc,
        metadata.swa_out_cache_loc,
        full_loc=metadata.out_cache_loc_full_physical,
    )
    backend._set_kv_buffer(forward_batch, layer, where, k, v)


def out_of(forward_batch: Any, q: torch.Tensor) -> torch.Tensor:
    """Where the attention of a pass is written, [rows of all requests, heads x D]."""
    given = getattr(forward_batch, "_attn_output", None)
    return torch.empty_like(q, memory_format=torch.contiguous_format) if given is None else given


def masks(backend: Any, forward_batch: Any) -> bool:
    """Whether a verify pass comes with a mask of its own."""
    metadata = backend.forward_metadata
    return (
        getattr(forward_batch.spec_info, "custom_mask", None) is not None
        or getattr(metadata, "custom_mask", None) is not None
        or getattr(forward_batch.spec_info, "ragged_verify_layout", None) is not None
    )
