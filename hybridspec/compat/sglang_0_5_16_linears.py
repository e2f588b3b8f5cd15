"""Dense projections of SGLang 0.5.16 on their instances: which are plain, and how one is replaced.

| projection | class | called as |
|---|---|---|
| in_proj_qkvz, in_proj_ba | `MergedColumnParallelLinear` | one after the other with the same tensor |
| qkv_proj, gate_up_proj | `QKVParallelLinear`, `MergedColumnParallelLinear` | `quant_method.apply(layer, x, bias)` |
| out_proj, o_proj, down_proj | `RowParallelLinear` | likewise; sums over ranks follow |
| gate of a router | `ReplicatedLinear` | likewise |
| fc of a DFLASH drafter | `torch.nn.Linear` | `forward(x)` |
"""  # noqa: E501

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# [rows, inputs] to [rows, outputs]; None: leave it to the engine.
Product = Callable[[torch.Tensor], torch.Tensor | None]


def plain_projections(model: torch.nn.Module) -> Iterator[Any]:
    """Projections that multiply with an unquantised bf16 weight without bias, in any order."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedLinearMethod,
        get_bf16_gemm_backend,
    )

    if get_bf16_gemm_backend().is_cutedsl():
        return
    for module in model.modules():
        own = isinstance(module, LinearBase)
        if own and type(module.quant_method) is not UnquantizedLinearMethod:
            continue
        if (own or type(module) is torch.nn.Linear) and _is_plain(module):
            yield module


def _is_plain(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.ndim == 2
        and weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and getattr(module, "bias", None) is None
    )


def projections_of_same_input(model: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """(in_proj_qkvz, in_proj_ba) of the Gated DeltaNet layers, called in this order."""
    from sglang.srt.models.qwen3_5 import Qwen3_5GatedDeltaNet

    for module in model.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            yield module.in_proj_qkvz, module.in_proj_ba


def projections_outside_of_passes(drafter: torch.nn.Module) -> tuple[Any, ...]:
    """The projection of the target's features, which a round calls by itself."""
    return (drafter.fc,)


def replace_product(module: Any, product: Product) -> None:
    """Let `product` multiply wherever it takes an input; the class stays as it is.

    The new method is still an `UnquantizedLinearMethod`, by which SGLang tells plain weights.
    """
    if type(module) is torch.nn.Linear:
        forward = module.forward

        def forward_replaced(input: torch.Tensor) -> torch.Tensor:
            found = product(input)
            return forward(input) if found is None else found

        module.forward = forward_replaced
        return
    module.quant_method = _method_class()(product)


def is_replaced(module: Any) -> bool:
    """Whether `replace_product` was here."""
    if type(module) is torch.nn.Linear:
        return "forward" in vars(module)
    return type(module.quant_method) is _method_class()


_METHOD_CLASS: list[type] = []


def _method_class() -> type:
    if _METHOD_CLASS:
        return _METHOD_CLASS[0]
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    class ReplacedLinearMethod(UnquantizedLinearMethod):
        def __init__(self, product: Product) -> None:
            self.product = product

        def apply(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            found = None if bias is not None else self.product(x)
            return super().apply(layer, x, bias) if found is None else found

    _METHOD_CLASS.append(ReplacedLinearMethod)
    return ReplacedLinearMethod
