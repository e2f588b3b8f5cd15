"""SGLang's own pools, attention backend and expert blocks, made without an engine around them.

Classes are those of the installed SGLang; only what an engine would hand to them (arguments of the
server, the model runner, a forward batch) is made here.
"""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

ROWS = 16
INTERVAL = 4  # every fourth layer has full attention


@dataclass(frozen=True)
class Shape:
    """Sizes of a target; the defaults are Qwen3.6-35B-A3B's."""

    layers: int = 40
    key_heads: int = 16
    value_heads: int = 32
    dim: int = 128
    requests: int = 8

    @property
    def gdn_layers(self) -> list[int]:
        """Ids of the GDN layers."""
        return [layer for layer in range(self.layers) if layer % INTERVAL != INTERVAL - 1]

    @property
    def channels(self) -> int:
        """Channels of the conv."""
        return (2 * self.key_heads + self.value_heads) * self.dim


@cache
def server_args() -> Any:
    """Arguments of a server for a model that is never loaded, published as SGLang wants them."""
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path="dummy", speculative_eagle_topk=1)
    get_context().set_server_args(args)
    return args


@cache
def one_rank(device: str) -> None:
    """A process group of one rank, which SGLang's linear and expert layers ask for."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel

    server_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    init_distributed_environment(
        backend="nccl" if device == "cuda" else "gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    initialize_model_parallel()


def cache_params(shape: Shape) -> Any:
    """Sizes and dtypes of states as the config of a model gives them."""
    from sglang.srt.configs.mamba_utils import (
        Mamba2CacheParams,
        Mamba2StateDType,
        Mamba2StateShape,
    )

    return Mamba2CacheParams(
        shape=Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=shape.value_heads * shape.dim,
            n_groups=shape.key_heads,
            num_heads=shape.value_heads,
            head_dim=shape.dim,
            state_size=shape.dim,
            conv_kernel=4,
        ),
        dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
        layers=shape.gdn_layers,
    )


class GdnModel(torch.nn.Module):
    """The linear attention layers of a target, with parameters in the ranges of a trained one."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

        super().__init__()
        generator = torch.Generator(device).manual_seed(seed)
        heads = shape.value_heads
        self.layers = torch.nn.ModuleList()
        for layer_id in shape.gdn_layers:
            weights = torch.randn(shape.channels, 4, generator=generator, device=device) * 0.5
            A_log = torch.rand(heads, generator=generator, device=device) * 4 - 3
            dt_bias = torch.rand(heads, generator=generator, device=device) * 4 - 5
            self.layers.append(
                RadixLinearAttention(
                    layer_id=layer_id,
                    num_q_heads=shape.key_heads,
                    num_k_heads=shape.key_heads,
                    num_v_heads=heads,
                    head_q_dim=shape.dim,
                    head_k_dim=shape.dim,
                    head_v_dim=shape.dim,
                    conv_weights=weights.to(torch.bfloat16),
                    bias=None,
                    activation="silu",
                    A_log=A_log,
                    dt_bias=dt_bias.to(torch.bfloat16),
                )
            )

    def forward(self, mixed: Any, a: Any, forward_batch: Any, b: Any, backend: Any) -> list[Any]:
        """Outputs of all layers for rows [layers, T, ...]; the third argument as in a model."""
        return [
            backend.forward(
                layer=layer, forward_batch=forward_batch, mixed_qkv=mixed[i], a=a[i], b=b[i]
            )
            for i, layer in enumerate(self.layers)
        ]


class Target:
    """Pools and backends of one target, with SGLang's snapshots or compact."""

    def __init__(self, shape: Shape, device: torch.device, *, compact: bool, seed: int = 0) -> None:
        from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
        from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
        from sglang.srt.layers.attention.linear.utils import initialize_linear_attn_config
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool

        class NoAttention(AttentionBackend):
            """Full attention layers are no part of this."""

            needs_cpu_seq_lens = False

            def __init__(self, request_pool: Any) -> None:
                self.token_to_kv_pool = None
                self.req_to_token_pool = request_pool

            def init_forward_metadata(self, forward_batch: Any) -> None: ...
            def init_forward_metadata_out_graph(
                self, forward_batch: Any, in_capture: bool = False
            ) -> None: ...
            def init_forward_metadata_in_graph(self, forward_batch: Any) -> None: ...
            def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...

        args = server_args()
        initialize_linear_attn_config(args)
        self.shape, self.device = shape, device
        made_by = HybridReqToTokenPool.mamba_pool_cls
        if not compact:
            HybridReqToTokenPool.mamba_pool_cls = MambaPool
        try:
            self.pool = HybridReqToTokenPool(
                size=shape.requests,
                mamba_size=shape.requests,
                mamba_spec_state_size=shape.requests,
                max_context_len=64,
                device=str(device),
                enable_memory_saver=False,
                cache_params=cache_params(shape),
                mamba_layer_ids=shape.gdn_layers,
                enable_mamba_extra_buffer=False,
                speculative_num_draft_tokens=ROWS,
                speculative_eagle_topk=1,
            )
        finally:
            HybridReqToTokenPool.mamba_pool_cls = made_by
        self.model = GdnModel(shape, device, seed)
        self.runner = SimpleNamespace(
            device=str(device),
            server_args=args,
            is_draft_worker=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool=None,
            model=self.model,
        )
        self.gdn = GDNAttnBackend(self.runner)
        self.hybrid = HybridLinearAttnBackend(NoAttention(self.pool), self.gdn, [])
        self.runner.attn_backend = self.hybrid
        self.hybrid.init_cuda_graph_state(shape.requests, shape.requests * ROWS)

    @property
    def state_XSHVK(self) -> torch.Tensor:
        """Recurrent states of all layers."""
        return self.pool.mamba_pool.mamba_cache.temporal

    @property
    def windows_XSCW(self) -> torch.Tensor:
        """Conv windows of all layers."""
        return self.pool.mamba_pool.mamba_cache.conv[0]

    def fill(self, seed: int) -> None:
        """Random states and windows in every slot."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for pool, scale in ((self.state_XSHVK, 0.1), (self.windows_XSCW, 1.0)):
            values = torch.randn(pool.shape, generator=generator, device=self.device) * scale
            pool.copy_(values)

    def batch(self, slots: Sequence[int], padded_to: int | None = None) -> Any:
        """A batch of requests that hold these slots, padded to the size of a graph."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        size = padded_to or len(slots)
        indices = torch.zeros(size, dtype=torch.int64, device=self.device)
        indices[: len(slots)] = torch.arange(1, len(slots) + 1, device=self.device)
        mapping = self.pool.req_index_to_mamba_index_mapping
        mapping[1 : len(slots) + 1] = torch.tensor(slots, dtype=torch.int32, device=self.device)
        return SimpleNamespace(
            batch_size=size,
            req_pool_indices=indices,
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=SimpleNamespace(draft_token_num=ROWS),
            seq_lens_cpu=None,
            num_padding=size - len(slots),
            mamba_track_mask=None,
            mamba_track_indices=None,
        )

    def prepare(self, batch: Any, *, capture: bool = False) -> None:
        """Metadata of a batch, as the runner writes it before a capture or a replay."""
        self.hybrid.init_forward_metadata_out_graph(batch, in_capture=capture)

    def run(self, batch: Any, mixed_XTC: Any, a_XTH: Any, b_XTH: Any) -> list[torch.Tensor]:
        """All layers; eager unless it is captured."""
        return self.model.forward(mixed_XTC, a_XTH, batch, b_XTH, self.hybrid)


def rows_of(shape: Shape, batch: int, device: torch.device, seed: int) -> tuple[Any, Any, Any]:
    """Random rows of all layers: mixed [X, T, C], a and b [X, T, HV], bf16."""
    generator = torch.Generator(device).manual_seed(seed)
    layers, tokens = len(shape.gdn_layers), batch * ROWS

    def random(width: int) -> torch.Tensor:
        values = torch.randn(layers, tokens, width, generator=generator, device=device)
        return values.to(torch.bfloat16)

    return random(shape.channels), random(shape.value_heads), random(shape.value_heads)


def expert_block(
    device: torch.device,
    *,
    hidden: int = 2048,
    width: int = 512,
    experts: int = 256,
    top_k: int = 8,
    layer_id: int = 0,
    seed: int = 0,
    second_stream: bool = True,
) -> Any:
    """A mixture-of-experts block of the target with random bf16 weights."""
    from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock

    one_rank(device.type)
    config = SimpleNamespace(
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        hidden_size=hidden,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=width,
        hidden_act="silu",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        stream = torch.cuda.Stream() if second_stream and device.type == "cuda" else None
        with torch.device(device):
            block = Qwen2MoeSparseMoeBlock(layer_id, config, alt_stream=stream)  # pyright: ignore
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in block.parameters():
        values = torch.randn(parameter.shape, generator=generator, device=device)
        parameter.data.copy_(values / math.sqrt(parameter.shape[-1]))
        parameter.requires_grad_(False)
    method = block.experts.quant_method
    method.process_weights_after_loading(block.experts)
    return block
