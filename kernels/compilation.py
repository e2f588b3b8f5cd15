"""Compiling kernels for a GPU that is not there, to see registers and spills before any run."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """One shipped configuration of a kernel.

    Attributes:
        name: what a test report shows.
        kernel: the `triton.jit` function.
        signature: type of every argument in order: `*fp32`, `*bf16`, `*i32`, `i32`, `fp32`,
            `constexpr`.
        constexprs: value of every constexpr argument.
        divisible_by_16: integer arguments that are multiples of 16 (strides, usually). Pointers
            always are.
        dependent_launch: compiled for programmatic dependent launch (sm_90 and later only).
        architectures: compute capabilities it ships for.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible_by_16: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 1
    dependent_launch: bool = False
    architectures: tuple[int, ...] = field(default=(80, 90))


@dataclass(frozen=True)
class Resources:
    """What the assembler says about a compiled kernel; spills in bytes."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    barriers: int


def compile_for(case: CompileCase, architecture: int) -> tuple[Any, Resources]:
    """Compile a case for `sm_<architecture>` without a GPU.

    Returns:
        Triton's compiled kernel (its `asm` holds `ttgir`, `ptx` and `cubin`) and its resources.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(case.signature.items())
        if kind.startswith("*") or name in case.divisible_by_16
    }
    source = ASTSource(case.kernel, dict(case.signature), dict(case.constexprs), attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if case.dependent_launch:
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return compiled, _assemble(compiled, architecture)


def disassemble(compiled: Any) -> str:
    """SASS of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        return _tool("cuobjdump", "--dump-sass", str(path))


def _assemble(compiled: Any, architecture: int) -> Resources:
    suffix = "a" if architecture >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"])
        report = _tool(
            "ptxas", "-v", f"--gpu-name=sm_{architecture}{suffix}", str(path), "-o", f"{path}.cubin"
        )
    numbers = {
        key: int(found.group(1)) if (found := re.search(pattern, report)) else 0
        for key, pattern in {
            "registers": r"Used (\d+) registers",
            "stores": r"(\d+) bytes spill stores",
            "loads": r"(\d+) bytes spill loads",
        }.items()
    }
    barriers = len(re.findall(r"\bbar\.sync\b|\bbarrier\.sync\b", compiled.asm["ptx"]))
    return Resources(
        numbers["registers"],
        numbers["stores"],
        numbers["loads"],
        int(compiled.metadata.shared),
        barriers,
    )


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
