"""Runs inside SGLang's environment: projections of SGLang's own modules, replaced.

    python linears_facts.py BENCHMARKS

BENCHMARKS is the folder of `sglang_target/engine.py`, which makes blocks without an engine. Writes
one JSON object as the last line. No kernel is launched: the interpreter needs another numpy, so the
products of our kernel are taken by torch here.
"""

# SGLang and what it brings lie in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import cpu_torchvision  # noqa: F401  # first: SGLang imports torchvision
import torch

sys.path.append(sys.argv[1])
CPU = torch.device("cpu")
HIDDEN, ROWS = 128, 16


def gated_delta_net() -> Any:
    """One Gated DeltaNet layer of SGLang's Qwen3.5, small."""
    from sglang.srt.models.qwen3_5 import Qwen3_5GatedDeltaNet

    config: Any = SimpleNamespace(
        hidden_size=HIDDEN, linear_num_value_heads=4, linear_num_value_heads_cpu=4,
        linear_num_key_heads=2, linear_num_key_heads_cpu=2, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_conv_kernel_dim=4, hidden_act="silu",
        output_gate_type="swish", rms_norm_eps=1e-6, dtype=torch.bfloat16,
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0)


def drafter() -> Any:
    """A DFLASH drafter of SGLang of one layer."""
    from sglang.srt.models import dflash

    # Rotary embeddings have no projections, and take another package on CPU.
    dflash.get_rope = lambda *_, **__: torch.nn.Identity()
    config = SimpleNamespace(
        hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, intermediate_size=192, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
        max_position_embeddings=256, hidden_act="silu", num_target_layers=4,
        layer_types=["full_attention"], vocab_size=256,
        dflash_config={"target_layer_ids": [0, 2], "block_size": 16, "mask_token_id": 1},
        block_size=16,
    )  # fmt: skip
    return dflash.DFlashDraftModel(config)


def in_bf16(make: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = make()
    finally:
        torch.set_default_dtype(before)
    for parameter in made.parameters():
        parameter.requires_grad_(False).copy_(torch.randn(parameter.shape) / 11)
    return made


def facts() -> dict[str, Any]:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.speculative.dflash_utils import can_dflash_slice_qkv_weight
    from sglang_target.engine import expert_block, one_rank

    from hybridspec.compat import sglang_0_5_16_linears as compat
    from hybridspec.kernels.skinny_linear.tiles import Tiles
    from hybridspec.sglang_plugin.target import linears
    from hybridspec.sglang_plugin.target.scope import VerifyScope

    one_rank("cpu")
    taken: list[tuple[int, int]] = []

    def product(x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        taken.append((len(weight), len(x)))
        return torch.nn.functional.linear(x, weight)

    def pair(
        x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Told from the engine's by their signs.
        taken.append((len(first) + len(second), len(x)))
        return -torch.nn.functional.linear(x, first), -torch.nn.functional.linear(x, second)

    linears.skinny_linear, linears.skinny_linear_pair = product, pair
    # Everything but the shared expert's projections, up to 32 rows.
    linears.tiles_for = lambda rows, outputs, inputs, _, beside=0: (
        Tiles(16, 16, 1) if rows <= 32 and (inputs, outputs) != (HIDDEN, 2 * 48) else None
    )
    gdn = in_bf16(gated_delta_net)
    experts = expert_block(CPU, hidden=HIDDEN, width=48, experts=16, top_k=2)
    # As a decoder layer names them.
    model = torch.nn.ModuleDict({"linear_attn": gdn, "mlp": experts})
    x = torch.randn(ROWS, HIDDEN).bfloat16()
    found: dict[str, Any] = {}
    stock = [part.clone() for part in gdn._forward_input_proj(x)]
    stock_gate = experts.gate(x)[0].clone()

    scope = VerifyScope()
    half = linears.install_projections(model, scope, CPU)
    found["sentence"] = half.sentence()
    outside = gdn._forward_input_proj(x)
    found["outside the scope"] = {
        "taken": list(taken),
        "equal": all(map(torch.equal, outside, stock)),
    }
    with scope.entered():
        inside = gdn._forward_input_proj(x)
        found["pair"] = {
            "taken": list(taken),
            "both are ours": all(torch.equal(a, -b) for a, b in zip(inside, stock, strict=True)),
        }
        taken.clear()
        later = gdn.in_proj_ba(x)[0]
        gdn.in_proj_qkvz(x)
        other = gdn.in_proj_ba(x.clone())[0]
        found["second alone is the engine's"] = torch.equal(later, stock[1])
        found["second of another input is the engine's"] = torch.equal(other, stock[1])
        taken.clear()
        found["gate"] = torch.equal(experts.gate(x)[0], stock_gate) and taken == [(16, ROWS)]
        taken.clear()
        gdn.out_proj(torch.randn(ROWS, 256).bfloat16())
        found["out_proj"] = taken == [(HIDDEN, ROWS)]
        taken.clear()
        experts.shared_expert.gate_up_proj(x)
        experts.gate(torch.randn(33, HIDDEN).bfloat16())
        found["without tiles"] = list(taken)
    found["classes"] = all(
        isinstance(module.quant_method, UnquantizedLinearMethod)
        for module in (gdn.in_proj_qkvz, gdn.in_proj_ba, gdn.out_proj, experts.gate)
    )
    found["replaced"] = [
        compat.is_replaced(module)
        for module in (gdn.in_proj_qkvz, experts.gate, experts.shared_expert.gate_up_proj)
    ]
    found["conv is left alone"] = type(gdn.conv1d.quant_method) is UnquantizedLinearMethod

    draft = in_bf16(drafter)
    attention = draft.layers[0].self_attn
    features = torch.randn(ROWS, draft.fc.in_features).bfloat16()
    context = draft.project_target_hidden
    taken.clear()
    half = linears.install_drafter_projections(draft, CPU)
    found["drafter"] = {"sentence": half.sentence(), "watched": "forward" in vars(draft)}
    draft.fc(features)
    attention.qkv_proj(x)
    found["drafter"]["outside"] = list(taken)
    found["drafter"]["fc is what features go through"] = "fc" in context.__func__.__code__.co_names
    with half.scope.entered():
        attention.qkv_proj(x)
        draft.layers[0].mlp.gate_up_proj(x)
    found["drafter"]["inside"] = list(taken)
    found["drafter"]["still plain for SGLang"] = can_dflash_slice_qkv_weight(attention.qkv_proj)[0]

    quantised = in_bf16(gated_delta_net)
    quantised.out_proj.quant_method = type("Other", (UnquantizedLinearMethod,), {})()
    quantised.in_proj_ba.float()
    half = linears.install_projections(quantised, scope, CPU)
    found["others"] = half.sentence()
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        print(json.dumps(facts()))
