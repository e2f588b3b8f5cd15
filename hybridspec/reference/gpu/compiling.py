"""Configurations of this package's kernels at the full shape, to compile without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridspec.kernels.compilation import CompileCase
from hybridspec.reference.gpu import cursors, flash, heads, norms, routing

_INTEGERS = frozenset(
    (
        "p_anchors",
        "p_drafts",
        "p_starts",
        "p_lengths",
        "p_limits",
        "p_fixed",
        "p_caps",
        "p_ids",
        "p_forced",
        "p_tokens",
        "p_commit_rows",
        "p_fallback",
    )
)
_WIDE = frozenset(
    ("p_weight", "p_cos", "p_sin", "p_sums", "p_peaks", "p_parts", "p_weights", "p_p1")
)


def _case(
    name: str,
    kernel: Any,
    constexprs: Mapping[str, Any],
    *,
    numbers: Mapping[str, str] | None = None,
    wide: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 3,
) -> CompileCase:
    """A case whose pointers are bf16 but for those known by name; numbers are i32."""
    signature = {}
    for argument in kernel.arg_names:
        if argument in constexprs:
            signature[argument] = "constexpr"
        elif argument in _INTEGERS:
            signature[argument] = "*i32"
        elif argument == "p_verify_us":
            signature[argument] = "*fp64"
        elif argument in _WIDE or argument in wide:
            signature[argument] = "*fp32"
        elif argument.startswith("p_"):
            signature[argument] = "*bf16"
        else:
            signature[argument] = (numbers or {}).get(argument, "i32")
    if "DEPENDENT" in kernel.arg_names:
        constexprs = {**constexprs, "DEPENDENT": True}
        signature["DEPENDENT"] = "constexpr"
    strides = frozenset(a for a in kernel.arg_names if a.startswith("stride"))
    return CompileCase(
        name,
        kernel,
        signature,
        dict(constexprs),
        divisible_by_16=frozenset() if "router" in name else strides,
        num_warps=num_warps,
        num_stages=num_stages,
        dependent_launch="DEPENDENT" in kernel.arg_names,
        architectures=(90,),
    )


def _attention_cases() -> list[CompileCase]:
    cases = []
    # Target, drafter, and the target's plain decoding.
    whole, masked = flash.MAX_QUERY_ROWS, flash.MASKED_QUERY_ROWS
    for name, rows, count, kv, dim, half, causal, most in (
        ("target", 16, 16, 2, 256, 32, True, masked),
        ("target-wide", 16, 16, 2, 256, 32, True, whole),
        ("drafter", 16, 32, 4, 128, 64, False, whole),
        ("plain", 1, 16, 2, 256, 32, True, masked),
    ):
        grouped = count // kv * rows
        block_m = min(most, max(16, grouped))
        shape = {"ROWS": rows, "HEADS": count, "D": dim}
        pieces = {"BLOCK_N": flash.BLOCK_KEYS, "SPLITS": 32}
        cases += [
            _case(
                f"heads-{name}",
                heads.heads_kernel,
                {**shape, "KV_HEADS": kv, "HALF": half},
                numbers={"eps": "fp32"},
                num_warps=1,
            ),
            _case(
                f"pieces-{name}",
                flash.pieces_kernel,
                {
                    **shape,
                    **pieces,
                    "KV_HEADS": kv,
                    "BLOCK_M": block_m,
                    "TILES": -(-grouped // block_m),
                    "CAUSAL": causal,
                    "MASKED": causal,
                },
                num_warps=flash.piece_warps(block_m, dim),
                num_stages=2,
            ),
            _case(
                f"combine-{name}",
                flash.combine_kernel,
                {**shape, **pieces, "GATED": causal, "MASKED": causal},
            ),
        ]
    inject = {"ROWS": 16, "LAYERS": 8, "KV_HEADS": 4, "D": 128, "HALF": 64}
    cases.append(_case("inject", heads.inject_kernel, inject, numbers={"eps": "fp32"}, num_warps=1))
    return cases


def compile_cases() -> list[CompileCase]:
    """Every kernel of the package as it is launched at the full shape."""
    size = {"HIDDEN": 2048, "BLOCK": 2048}
    eps = {"eps": "fp32"}
    cases = _attention_cases()
    for fill in (False, True):
        shape = {**size, "ROWS": 16, "DRAFTS": 15, "FILL": fill}
        cases.append(_case(f"embed-fill{fill}", norms.embed_kernel, shape, numbers=eps))
    for shared, feature in ((False, False), (True, False), (True, True)):
        shape = {**size, "SHARED": shared, "FEATURE": feature}
        name = f"add-norm-router{shared}{feature}"
        cases.append(_case(name, norms.add_norm_kernel, shape, numbers=eps))
    cases.append(_case("norm", norms.norm_kernel, size, numbers=eps))
    gated = {"HEADS": 32, "DIM": 128, "PART": 8}
    cases.append(_case("gated-norm", norms.gated_norm_kernel, gated, numbers=eps, wide=("p_x",)))
    cases.append(_case("swiglu", norms.swiglu_kernel, {"WIDTH": 6144, "BLOCK": 1024}))
    routed = {
        "ROWS": 16, "EXPERTS": 256, "BLOCK_E": 256, "TOP_K": 8, "BLOCK_K": 8,
        "SHARED": 512, "BLOCK_S": 512, "NORMALISE": True,
    }  # fmt: skip
    for masked, forced in ((False, False), (True, False), (True, True)):
        shape = {**routed, "MASKED": masked, "FORCED": forced}
        name = f"router-{masked}{forced}"
        cases.append(_case(name, routing.route_kernel, shape, num_warps=1))
    for fixed in (False, True):
        cases.append(_case(f"begin-{fixed}", cursors.begin_kernel, {"FIXED": fixed}, num_warps=1))
    cases.append(_case("quotient", cursors.quotient_kernel, {"DRAFTS": 15}, num_warps=1))
    cases.append(_case("advance", cursors.advance_kernel, {"ROWS": 16}, num_warps=1))
    return cases
