"""SGLang's own text model with the target half installed: rows that count, eager and in a graph.

Attention of the full attention layers is over the block alone, which is all that this needs: rows
that count must not depend on rows that do not.
"""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import torch
from sglang_target.engine import ROWS, Shape, Target, one_rank, server_args
from sglang_target.stages import Report

LENGTHS = [[16, 16], [5, 9], [1, 2], [13, 3], [16, 1], [2, 0]]


class Batch(SimpleNamespace):
    """A forward batch; what was not set is None, as the fields of SGLang's are."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def text_model(shape: Shape, device: torch.device, *, experts: int, hidden: int, width: int) -> Any:
    """Qwen3.5-MoE's decoder with random weights."""
    one_rank(device.type)
    from sglang.srt.configs.qwen3_5 import Qwen3_5MoeTextConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.models.qwen3_5 import Qwen3_5MoeForCausalLM

    args = server_args()
    object.__setattr__(args, "device", device.type)
    initialize_dp_attention(
        args, SimpleNamespace(hidden_size=hidden, dtype=torch.bfloat16, hf_config=None)
    )
    kinds = [
        "linear_attention" if layer in shape.gdn_layers else "full_attention"
        for layer in range(shape.layers)
    ]
    config = Qwen3_5MoeTextConfig(
        hidden_size=hidden,
        num_hidden_layers=shape.layers,
        full_attention_interval=4,
        layer_types=kinds,
        num_attention_heads=max(2, hidden // 128),
        num_key_value_heads=2 if hidden >= 1024 else 1,
        head_dim=64,
        attn_output_gate=True,
        attention_bias=False,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=shape.key_heads,
        linear_num_value_heads=shape.value_heads,
        linear_key_head_dim=shape.dim,
        linear_value_head_dim=shape.dim,
        num_experts=experts,
        num_experts_per_tok=min(8, experts // 4),
        moe_intermediate_size=width,
        shared_expert_intermediate_size=width,
        norm_topk_prob=True,
        vocab_size=512,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3_5MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, device=device)
        scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.1
        parameter.data.copy_(values * scale)
    for block in model.modules():
        method = getattr(block, "quant_method", None)
        if hasattr(block, "w13_weight") and method is not None:
            method.process_weights_after_loading(block)
    return model


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, *_: Any, **__: Any
) -> torch.Tensor:
    """Causal attention inside each block."""

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, ROWS, x.numel() // x.shape[0] // layer.qk_head_dim, layer.qk_head_dim)

    query, key, value = (heads(x).transpose(1, 2).float() for x in (q, k, v))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(layer.qk_head_dim)
    ahead = torch.ones(ROWS, ROWS, dtype=torch.bool, device=q.device).triu(1)
    out = scores.masked_fill(ahead, -math.inf).softmax(-1) @ value
    return out.transpose(1, 2).reshape(q.shape[0], -1).to(q.dtype)


def rows(
    report: Report,
    device: torch.device,
    shape: Shape,
    *,
    experts: int = 256,
    hidden: int = 2048,
    width: int = 512,
    requests: int = 2,
) -> None:
    """Lengths change; rows that count keep the bits of the full pass, all rows stay finite."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

    from hybridspec.sglang_plugin.round_state import RoundState, TargetOptions
    from hybridspec.sglang_plugin.target.install import install_target
    from hybridspec.sglang_plugin.target.memory import install_memory_patch

    install_memory_patch()
    target = Target(shape, device, compact=True)
    model = text_model(shape, device, experts=experts, hidden=hidden, width=width)
    report.say("model made")
    target.runner.model = model
    target.hybrid.full_attn_layers = [
        layer for layer in range(shape.layers) if layer not in shape.gdn_layers
    ]
    target.hybrid.full_attn_backend.forward_extend = block_attention
    state = RoundState(shape.requests, device)
    signature = inspect.signature(model.forward)
    install_target(target.runner, state, TargetOptions())
    report.require("signature of forward", inspect.signature(model.forward) == signature)
    target.fill(1)
    slots = [2, 1][:requests]
    batch = Batch(**vars(target.batch(slots)))
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(0, 512, (requests * ROWS,), generator=generator, device=device)
    batch.input_ids = ids
    batch.positions = torch.arange(requests * ROWS, device=device) % ROWS
    before = target.state_XSHVK.clone(), target.windows_XSCW.clone()

    def run() -> torch.Tensor:
        with forward_context(ForwardContext(attn_backend=target.hybrid)):
            out = model.forward(ids, batch.positions, batch)
        out = out[0] if isinstance(out, tuple) else out
        return out.view(requests, ROWS, -1)

    def set_lengths(lengths: list[int]) -> None:
        column = torch.zeros(state.max_requests, dtype=torch.int32)
        column[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
        state.lengths_B.copy_(column)
        state.router_rows_B.copy_(column)

    def compare(what: str, full: torch.Tensor, found: torch.Tensor, lengths: list[int]) -> None:
        same = all(
            torch.equal(full[request, :length], found[request, :length])
            for request, length in enumerate(lengths)
        )
        report.require(f"{what} {lengths}: rows that count", same)
        report.require(f"{what} {lengths}: finite", bool(found.isfinite().all()))

    target.prepare(batch)
    set_lengths([ROWS] * requests)
    full = run()
    report.require("full pass: finite", bool(full.isfinite().all()))
    report.say("one pass")
    eager = LENGTHS[1:3] if device.type == "cpu" else LENGTHS
    for lengths in eager:
        set_lengths(lengths[:requests])
        compare("eager", full, run(), lengths[:requests])
    if device.type == "cuda":
        set_lengths([ROWS] * requests)
        with model_capture_mode():
            target.prepare(batch, capture=True)
            for _ in range(2):
                run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run()
        target.prepare(batch)
        graph.replay()
        full = out.clone()
        for lengths in LENGTHS:
            set_lengths(lengths[:requests])
            graph.replay()
            compare("graph", full, out, lengths[:requests])
    same = torch.equal(before[0], target.state_XSHVK)
    same &= torch.equal(before[1], target.windows_XSCW)
    report.require("passes leave states and windows", same)
