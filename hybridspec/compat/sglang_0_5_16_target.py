"""Names and signatures of SGLang 0.5.16 that the target half of the plugin builds on.

Everything is imported when it is called: SGLang need not be there to import this module, and it is
not imported into processes that do not run the model.
"""

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybridspec.errors import EngineRefusal
from hybridspec.kernels.gdn.dispatch import architecture_of
from hybridspec.kernels.small_moe.tiles import MEASURED_ARCHITECTURE, MEASURED_SHAPE

RELEASE = "0.5.16"
# What `forward_extend` of the GDN backend is called with by its hybrid backend.
FORWARD_EXTEND = ("layer", "forward_batch", "mixed_qkv", "a", "b")
COMMIT = ("last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track", "model")


def state_pool_class() -> type:
    """Pool of recurrent states and conv windows, one slot a request."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    return MambaPool


def request_pool_class() -> type:
    """Pool that makes the state pool through its attribute `mamba_pool_cls`."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    return HybridReqToTokenPool


def memory_configurator_class() -> type:
    """What counts memory for states in `_handle_max_mamba_cache(total_rest_memory)`, GiB."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    return KVCacheConfigurator


def most_requests(configurator: Any) -> int:
    """Requests that `_handle_max_mamba_cache` has reserved memory of verification for."""
    args = configurator.server_args
    running = args.max_running_requests // configurator.ps.attn_dp_size
    return min(running, args.max_mamba_cache_size // configurator._calculate_mamba_ratio())


def verifies_with_gdn(configurator: Any) -> bool:
    """Whether the model has GDN layers and this process verifies drafts with it."""
    return (
        configurator.hybrid_gdn_config is not None
        and not configurator.is_draft_worker
        and not configurator.spec_algorithm.is_none()
    )


def gdn_backend(model_runner: Any) -> tuple[Any, Any]:
    """The hybrid attention backend of a target and the GDN backend inside it.

    Raises:
        EngineRefusal: the target is not a GDN hybrid, or its backend is another.
    """
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    hybrid = model_runner.attn_backend
    gdn = getattr(hybrid, "linear_attn_backend", None)
    if not (isinstance(hybrid, HybridLinearAttnBackend) and isinstance(gdn, GDNAttnBackend)):
        raise EngineRefusal(
            f"the target's attention backend is {type(hybrid).__name__} with "
            f"{type(gdn).__name__}; HYBRIDSPEC verifies Gated DeltaNet layers in "
            "HybridLinearAttnBackend with GDNAttnBackend: serve a GDN hybrid with "
            "--linear-attn-backend triton"
        )
    return hybrid, gdn


def linear_attention_layers(model: torch.nn.Module) -> list[Any]:
    """Linear attention layers of a model in order of their layer ids."""
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    found = [module for module in model.modules() if isinstance(module, RadixLinearAttention)]
    return sorted(found, key=lambda layer: layer.layer_id)


def expert_blocks(model: torch.nn.Module) -> list[Any]:
    """Mixture-of-experts blocks of a model in order of their layer ids."""
    from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock

    found = [module for module in model.modules() if isinstance(module, Qwen2MoeSparseMoeBlock)]
    return sorted(found, key=lambda block: block.layer_id)


def unquantised_weights(block: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """[experts, 2 width, hidden] and [experts, hidden, width] of a block, if its runner is Triton's
    and keeps plain bf16 weights.
    """
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    experts = block.experts
    method = getattr(experts, "quant_method", None)
    runner = getattr(method, "runner", None)
    if not (
        isinstance(method, UnquantizedFusedMoEMethod)
        and runner is not None
        and runner.runner_backend.is_triton()
    ):
        return None
    return experts.w13_weight.data, experts.w2_weight.data


@dataclass(frozen=True)
class PlainRouter:
    """A router that is a softmax over all experts and the largest of it, nothing else.

    Attributes:
        renormalize: whether weights are divided by their sum.
        routes: makes what the experts take of weights, ids and logits.
    """

    top_k: int
    renormalize: bool
    routes: Callable[..., Any]


def plain_router(block: Any) -> PlainRouter | None:
    """The router of a block if SGLang runs it as `jit_kernel.moe_fused_gate` on CUDA and does
    nothing else with its routes; None otherwise.
    """
    router: Any = getattr(block, "topk", None)
    if type(router).__module__ != "sglang.srt.layers.moe.topk":
        return None
    from sglang.srt.environ import envs
    from sglang.srt.eplb import expert_distribution
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.utils import get_moe_runner_backend
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    config, runner = router.topk_config, get_moe_runner_backend()
    plain = (
        type(router) is topk.TopK
        and router._forward_method == router.forward_cuda
        and router.waterfill_balancer is None
        and not router.enable_waterfill
        and (runner.is_auto() or runner.is_triton())
        and config.output_format in (None, topk.TopKOutputFormat.STANDARD)
        and config.scoring_func == "softmax"
        and not config.use_grouped_topk
        and config.num_fused_shared_experts == 0
        and config.custom_routing_function is None
        and config.correction_bias is None
        and not config.apply_routed_scaling_factor_on_output
    )
    # Other code that sees routes, or writes them.
    recorder = expert_distribution.get_global_expert_distribution_recorder()
    captures = config.allow_routed_experts_capture and get_global_experts_capturer() is not None
    watched = captures or type(recorder) is not expert_distribution._ExpertDistributionRecorderNoop
    fused = envs.SGLANG_OPT_USE_JIT_KERNEL_FUSED_TOPK.get()
    simulated = (
        envs.SGLANG_SIMULATE_UNIFORM_EXPERTS.get()
        or envs.SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS.get()
        or topk._SGLANG_EXPERIMENTAL_LORA_OPTI
    )
    if not plain or watched or not fused or simulated:
        return None
    return PlainRouter(config.top_k, bool(config.renormalize), topk.StandardTopKOutput)


def plain_gate(block: Any) -> torch.Tensor | None:
    """[experts, hidden] of a block whose router logits are its product with a row, nothing else."""
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    gate = block.gate
    if type(gate) is not ReplicatedLinear or gate.bias is not None:
        return None
    return gate.weight.data if type(gate.quant_method) is UnquantizedLinearMethod else None


def overlaps_lora() -> bool:
    """Whether blocks hand the shared expert's output to the experts, to be added there."""
    from sglang.srt.models import qwen2_moe

    return bool(qwen2_moe._SGLANG_EXPERIMENTAL_LORA_OPTI)


def has_measured_experts(model: torch.nn.Module) -> bool:
    """Whether all experts are of the shape, type and GPU that `small_moe` was measured with."""
    blocks = [block for block in expert_blocks(model) if not getattr(block, "is_nextn", False)]
    return bool(blocks) and all(_is_measured(block) for block in blocks)


def _is_measured(block: Any) -> bool:
    weights = unquantised_weights(block)
    if weights is None or block.enable_shared_expert_fusion or plain_gate(block) is None:
        return False
    down_EHI = weights[1]
    shape = (*down_EHI.shape, block.topk.topk_config.top_k)
    return (
        shape == MEASURED_SHAPE
        and down_EHI.dtype == torch.bfloat16
        and architecture_of(down_EHI.device) == MEASURED_ARCHITECTURE
    )


def is_verification(forward_batch: Any) -> bool:
    """Whether a pass verifies drafts with the target."""
    return forward_batch.forward_mode.is_target_verify()


def gibibytes(number: float) -> float:
    """Bytes in the unit of SGLang's own accounting."""
    return number / (1 << 30)
