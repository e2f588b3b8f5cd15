"""Runs inside SGLang's environment: the target half on SGLang's own pools, backend and blocks.

    python target_facts.py BENCHMARKS

BENCHMARKS is the folder of `sglang_target/engine.py`, which makes them without an engine. Writes
one JSON object as the last line. No kernel is launched: the interpreter needs another numpy.
"""

# SGLang and what it brings lie in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cpu_torchvision  # noqa: F401  # first: SGLang imports torchvision
import torch

sys.path.append(sys.argv[1])

GIB = 1 << 30
CPU = torch.device("cpu")


def refusal(call: Callable[[], Any]) -> str:
    """Name and message of what is raised."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def budget(**arguments: Any) -> float:
    """GiB that SGLang's accounting leaves of 100 GiB for keys and values, full shape."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang_target.engine import ROWS, Shape, cache_params

    args = SimpleNamespace(
        max_mamba_cache_size=None,
        max_running_requests=48,
        disable_radix_cache=True,
        speculative_num_draft_tokens=ROWS,
    )
    args.override = lambda source, **fields: vars(args).update(fields)
    vars(args).update(arguments)
    configurator = object.__new__(KVCacheConfigurator)
    configurator.server_args = args
    configurator.ps = SimpleNamespace(attn_dp_size=1)
    configurator.mambaish_config = SimpleNamespace(mamba2_cache_params=cache_params(Shape()))
    configurator.hybrid_gdn_config = object()
    configurator.is_draft_worker = False
    configurator.spec_algorithm = SpeculativeAlgorithm.DFLASH
    return configurator._handle_max_mamba_cache(100.0)


def facts() -> dict[str, Any]:
    """Everything, in the order in which a worker meets it."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
    from sglang_target.engine import Shape, Target, cache_params, expert_block

    from hybridspec.compat import sglang_0_5_16_target as compat
    from hybridspec.sglang_plugin.round_state import RoundState, TargetOptions
    from hybridspec.sglang_plugin.target.install import install_target
    from hybridspec.sglang_plugin.target.memory import install_memory_patch, report_of

    found: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {"requests": {}, "slots": {"max_mamba_cache_size": 20}}
    found["stock_budget"] = {name: budget(**case) for name, case in cases.items()}
    install_memory_patch()
    install_memory_patch()
    found["budget"] = {name: budget(**case) for name, case in cases.items()}
    params = cache_params(Shape())
    found["per_request"] = {
        name: value
        for name, value in vars(report_of(params, params.layers, 1, 16)).items()
        if name != "requests"
    }

    shape = Shape(layers=4, key_heads=1, value_heads=2, dim=64, requests=3)
    target = Target(shape, CPU, compact=True)
    pool = target.pool.mamba_pool
    found["pool"] = {
        "subclass": isinstance(pool, MambaPool)
        and type(pool) is HybridReqToTokenPool.mamba_pool_cls,
        "speculative": isinstance(pool.mamba_cache, MambaPool.SpeculativeState),
        "snapshots": pool.mamba_cache.intermediate_ssm is not None,
        "layer_cache": isinstance(pool.mamba2_layer_cache(1), MambaPool.SpeculativeState),
        "gib": pool.mem_usage,
        "expected_gib": (
            pool.hybridspec_memory.used_bytes
            + pool.mamba_cache.temporal.nbytes
            + pool.mamba_cache.conv[0].nbytes
        )
        / GIB,
        "layer_ids": list(pool.hybridspec_buffers.shape.layer_ids),
    }
    sizes = {"hidden": 128, "width": 64, "experts": 16, "top_k": 4}
    target.model.blocks = torch.nn.ModuleList(
        [expert_block(CPU, layer_id=layer, **sizes) for layer in (1, 0)]
    )

    def install(runner: Any = target.runner, requests: int = 3, **options: Any) -> Any:
        return install_target(runner, RoundState(requests, CPU), TargetOptions(**options))

    plain_pool = SimpleNamespace(mamba_pool=object())
    found["refusals"] = {
        "no memory patch": refusal(
            lambda: install(
                SimpleNamespace(**vars(target.runner) | {"req_to_token_pool": plain_pool})
            )
        ),
        "small round": refusal(lambda: install(requests=2)),
        "no tables": refusal(lambda: install(correction="select", lookahead=1)),
        "other backend": refusal(
            lambda: install(SimpleNamespace(**vars(target.runner) | {"attn_backend": object()}))
        ),
    }
    target.pool.enable_mamba_extra_buffer = True
    found["refusals"]["extra buffer"] = refusal(install)
    target.pool.enable_mamba_extra_buffer = False
    found["refusals"]["ring"] = refusal(
        lambda: type(pool)(
            size=1,
            spec_state_size=1,
            cache_params=cache_params(shape),
            mamba_layer_ids=shape.gdn_layers,
            device="cpu",
            speculative_num_draft_tokens=16,
            enable_gdn_replayssm_spec=True,
        )
    )
    found["untouched"] = "forward_extend" not in vars(target.gdn)

    found["measured_experts"] = measured_experts(compat, target.model)
    signature = str(inspect.signature(target.model.forward))
    half = install()
    blocks = list(target.model.blocks)
    found["installed"] = {
        "forward_extend": target.gdn.forward_extend == half.verification.forward_extend,
        "commit": target.hybrid.update_mamba_state_after_mtp_verify
        == half.state_commit.update_mamba_state_after_mtp_verify,
        "experts": ["_forward_router_experts" in vars(block) for block in blocks],
        "forward": "forward" in vars(target.model)
        and str(inspect.signature(target.model.forward)) == signature,
        "first_router_layer": half.experts.first_router_layer,
        "memory": dataclasses.asdict(half.memory),
        "small_moe_weights": [
            list(weights.shape) for weights in compat.unquantised_weights(blocks[0]) or ()
        ],
        "classes_untouched": all(
            name not in str(vars(kind)[method])
            for kind, method, name in (
                (type(target.gdn), "forward_extend", "GdnVerification"),
                (type(blocks[0]), "_forward_router_experts", "forward_masked"),
            )
        ),
    }
    names = set(inspect.signature(type(target.gdn).forward_extend).parameters)
    found["forward_extend_parameters"] = set(compat.FORWARD_EXTEND) <= names
    commit = type(target.hybrid).update_mamba_state_after_mtp_verify
    found["commit_parameters"] = list(inspect.signature(commit).parameters)[1:] == list(
        compat.COMMIT
    )
    return found


def measured_experts(compat: Any, model: Any) -> list[bool]:
    """As they are; where these were what was measured; of another type; without experts."""
    blocks = compat.expert_blocks(model)
    down = blocks[0].experts.w2_weight
    found = [compat.has_measured_experts(model)]
    shape = (*down.shape, blocks[0].topk.topk_config.top_k)
    here = {"MEASURED_SHAPE": shape, "MEASURED_ARCHITECTURE": 0}
    with mock.patch.multiple(compat, **here):
        found.append(compat.has_measured_experts(model))
        kept = down.data
        down.data = down.data.float()
        found.append(compat.has_measured_experts(model))
        down.data = kept
        found.append(compat.has_measured_experts(torch.nn.Linear(1, 1)))
    return found


if __name__ == "__main__":
    print(json.dumps(facts()))
