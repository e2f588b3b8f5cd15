"""SGLang's Triton attention backend with its pools and layers, without an engine around them."""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang_target.engine import ROWS, one_rank, server_args


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of attention layers; the defaults are one layer of Qwen3.6-35B-A3B's target."""

    layers: int = 1
    heads: int = 16
    kv_heads: int = 2
    dim: int = 256
    requests: int = 8
    contexts: int = 1024
    both_ways: bool = False


class AttentionTarget:
    """A model of attention layers, its pools and its backend; slots of a request are scattered."""

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        **layer_options: Any,
    ) -> None:
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
        from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from transformers import PretrainedConfig

        one_rank(device.type)
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(seed)
        width = shape.contexts + 2 * ROWS
        self.requests = ReqToTokenPool(
            size=shape.requests,
            max_context_len=width,
            device=str(device),
            enable_memory_saver=False,
        )
        slots = shape.requests * width
        self.pool = MHATokenToKVPool(
            size=slots,
            page_size=1,
            dtype=dtype,
            head_num=shape.kv_heads,
            head_dim=shape.dim,
            layer_num=shape.layers,
            device=str(device),
            enable_memory_saver=False,
        )
        # Slot 0 is where SGLang sends what nobody needs.
        order = torch.randperm(slots, generator=self.generator, device=device) + 1
        self.requests.req_to_token[1 : shape.requests + 1, :width] = order.view(-1, width).int()
        attn_type = AttentionType.ENCODER_ONLY if shape.both_ways else AttentionType.DECODER
        self.model = torch.nn.ModuleList(
            RadixAttention(
                shape.heads,
                shape.dim,
                shape.dim**-0.5,
                shape.kv_heads,
                layer_id=layer,
                **{"attn_type": attn_type, **layer_options},
            )
            for layer in range(shape.layers)
        )
        text_config = PretrainedConfig()
        model_config = SimpleNamespace(
            attention_arch=None,
            num_attention_heads=shape.heads,
            get_num_kv_heads=lambda ranks: shape.kv_heads // ranks,
            v_head_dim=shape.dim,
            swa_v_head_dim=shape.dim,
            context_len=width,
            is_encoder_decoder=False,
            hf_config=text_config,
            hf_text_config=text_config,
            linear_attn_registry_result=None,
        )
        args = server_args()
        args.override("blocks", speculative_num_draft_tokens=ROWS)
        self.runner = SimpleNamespace(
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=object(),
            sliding_window_size=None,
            page_size=1,
            server_args=args,
            model_config=model_config,
            device=str(device),
            gpu_id=0,
            is_draft_worker=False,
            model=self.model,
        )
        self.backend = TritonAttnBackend(self.runner)
        self.runner.attn_backend = self.backend
        self.backend.init_cuda_graph_state(shape.requests, shape.requests * ROWS)

    def normal(self, *sizes: int) -> torch.Tensor:
        """Random values in the dtype of the caches."""
        values = torch.randn(sizes, generator=self.generator, device=self.device)
        return values.to(self.pool.dtype)

    def fill(self) -> None:
        """Random keys and values in every slot of every layer."""
        for cache in (*self.pool.k_buffer, *self.pool.v_buffer):
            cache.copy_(self.normal(*cache.shape))

    def batch(self, contexts: Sequence[int]) -> Any:
        """A verify pass of one block a request, as a runner's static buffers hold it."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        size = len(contexts)
        batch = SimpleNamespace(
            batch_size=size,
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=torch.arange(size, 0, -1, device=self.device),
            seq_lens=torch.zeros(size, dtype=torch.int64, device=self.device),
            seq_lens_sum=None,
            encoder_lens=None,
            seq_lens_cpu=None,
            out_cache_loc=torch.zeros(size * ROWS, dtype=torch.int64, device=self.device),
            spec_info=SimpleNamespace(draft_token_num=ROWS, custom_mask=None),
        )
        self.move(batch, contexts)
        return batch

    def move(self, batch: Any, contexts: Sequence[int]) -> None:
        """Other contexts of the same requests, in place, with the slots of their blocks."""
        batch.seq_lens.copy_(torch.tensor(contexts))
        for i, context in enumerate(contexts):
            block = slice(context, context + ROWS)
            batch.out_cache_loc[i * ROWS : (i + 1) * ROWS] = self.requests.req_to_token[
                batch.req_pool_indices[i], block
            ]

    def rows(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the blocks of so many requests; values out of a projection
        in which they are not contiguous, as a model's are.
        """
        shape, tokens = self.shape, size * ROWS
        q = self.normal(tokens, shape.heads * shape.dim)
        k = self.normal(tokens, shape.kv_heads * shape.dim)
        v = self.normal(tokens, 2 * shape.kv_heads * shape.dim)[:, : shape.kv_heads * shape.dim]
        return q, k, v

    def forward(self, q: Any, k: Any, v: Any, batch: Any) -> list[torch.Tensor]:
        """Outputs [rows, heads x D] of every layer for the same rows."""
        heads = (self.shape.kv_heads, self.shape.dim)
        return [
            self.backend.forward(q, k.view(-1, *heads), v.view(-1, *heads), layer, batch)
            for layer in self.model
        ]
