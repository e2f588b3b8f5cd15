"""Runs inside SGLang's environment: routers and blocks of experts as the fused router meets them.

    python router_facts.py BENCHMARKS

Writes one JSON object as the last line. No kernel is launched.
"""

# SGLang and what it brings lie in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import cpu_torchvision  # noqa: F401  # first: SGLang imports torchvision
import torch

sys.path.append(sys.argv[1])

CPU = torch.device("cpu")
SIZES = {"hidden": 128, "width": 64, "experts": 16, "top_k": 4}


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names in order, `=` behind those with a default."""
    return [
        name + ("" if value.default is value.empty else "=")
        for name, value in inspect.signature(function).parameters.items()
    ]


def made_for_cuda() -> Any:
    """A block whose router takes the branch of a CUDA device."""
    from sglang_target.engine import expert_block

    block = expert_block(CPU, **SIZES)
    block.topk._forward_method = block.topk.forward_cuda
    return block


def is_plain(change: Callable[[Any], None]) -> bool:
    """Whether a block counts as plain after a change."""
    from hybridspec.compat import sglang_0_5_16_target as compat

    block = made_for_cuda()
    change(block)
    return compat.plain_router(block) is not None


def configured(**fields: Any) -> Callable[[Any], None]:
    """Sets fields of the router's configuration, each of which must be there."""

    def change(block: Any) -> None:
        for name, value in fields.items():
            getattr(block.topk.topk_config, name)
            setattr(block.topk.topk_config, name, value)

    return change


def facts() -> dict[str, Any]:
    """Everything that the fused router and the two streams are built on."""
    from sglang.jit_kernel import moe_fused_gate
    from sglang.srt.eplb import expert_distribution
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock
    from sglang.srt.runtime_context import get_flags, get_resources
    from sglang_target.engine import expert_block

    from hybridspec.compat import sglang_0_5_16_target as compat

    found: dict[str, Any] = {}
    block = made_for_cuda()
    plain = compat.plain_router(block)
    assert plain is not None
    found["plain"] = {
        "top_k": plain.top_k,
        "renormalize": plain.renormalize,
        "routes": list(inspect.signature(plain.routes).parameters),
        "standard": plain.routes is topk.StandardTopKOutput,
    }
    changes: dict[str, Callable[[Any], None]] = {
        "nothing": lambda block: None,
        "scoring": configured(scoring_func="sigmoid"),
        "groups": configured(use_grouped_topk=True),
        "bias": configured(correction_bias=torch.zeros(16)),
        "shared": configured(num_fused_shared_experts=1),
        "custom": configured(custom_routing_function=print),
        "scale": configured(apply_routed_scaling_factor_on_output=True),
        "format": configured(output_format=topk.TopKOutputFormat.BYPASSED),
        "native": lambda block: setattr(block.topk, "_forward_method", block.topk.forward_native),
        "waterfill": lambda block: setattr(block.topk, "waterfill_balancer", object()),
    }
    found["is_plain"] = {name: is_plain(change) for name, change in changes.items()}

    def with_flag(name: str, value: str) -> bool:
        os.environ[name] = value
        try:
            return is_plain(changes["nothing"])
        finally:
            del os.environ[name]

    for name, value in (
        ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "1"),
        ("SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS", "1"),
        ("SGLANG_OPT_USE_JIT_KERNEL_FUSED_TOPK", "0"),
    ):
        found["is_plain"][name] = with_flag(name, value)
    resources, moe = get_resources(), get_flags().moe
    before = resources.experts_capturer
    resources.experts_capturer = object()
    found["is_plain"]["captured"] = is_plain(changes["nothing"])
    found["is_plain"]["captured, but not here"] = is_plain(
        configured(allow_routed_experts_capture=False)
    )
    resources.experts_capturer = before
    before = resources.expert_distribution_recorder
    resources.expert_distribution_recorder = object.__new__(
        expert_distribution._ExpertDistributionRecorderReal
    )
    found["is_plain"]["recorded"] = is_plain(changes["nothing"])
    resources.expert_distribution_recorder = before
    before = moe.runner_backend
    for backend in (MoeRunnerBackend.TRITON, MoeRunnerBackend.FLASHINFER_TRTLLM_ROUTED):
        found["is_plain"][backend.value] = is_plain(
            lambda block, backend=backend: setattr(moe, "runner_backend", backend)
        )
        moe.runner_backend = before

    found["parameters"] = {
        "moe_fused_gate": parameters(moe_fused_gate.moe_fused_gate),
        "dual_stream": parameters(Qwen2MoeSparseMoeBlock.forward_normal_dual_stream),
        "shared": parameters(Qwen2MoeSparseMoeBlock._forward_shared_experts),
        "experts": parameters(Qwen2MoeSparseMoeBlock._forward_router_experts),
    }
    on_cpu = expert_block(CPU, **SIZES)
    found["no_second_stream_on_cpu"] = on_cpu.alt_stream is None
    found["not_plain_on_cpu"] = compat.plain_router(on_cpu) is None
    found["overlaps_lora"] = compat.overlaps_lora()
    found["experts_in_place"] = on_cpu.experts.moe_runner_config.inplace
    x = torch.randn(3, SIZES["hidden"]).bfloat16()
    found["logits"] = str(on_cpu.gate(x)[0].dtype)
    before_x = x.clone()
    on_cpu._forward_shared_experts(x, apply_gate=False)
    weight = compat.plain_gate(on_cpu)
    assert weight is not None
    found["gate"] = {
        "shape": list(weight.shape),
        "dtype": str(weight.dtype),
        "product": torch.equal(on_cpu.gate(x)[0], x @ weight.T),
    }
    on_cpu.gate.bias = torch.nn.Parameter(torch.zeros(SIZES["experts"]))
    found["gate"]["with bias"] = compat.plain_gate(on_cpu) is not None
    on_cpu.gate.bias = None
    on_cpu.gate.quant_method = object()
    found["gate"]["quantised"] = compat.plain_gate(on_cpu) is not None
    found["shared_expert_keeps_its_input"] = torch.equal(x, before_x)
    return found


if __name__ == "__main__":
    print(json.dumps(facts()))
