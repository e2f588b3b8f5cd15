"""What graph controls promise before there is a GPU: bodies, struct layouts, PTX, refusals."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.errors import EnvironmentMissing, UsageError
from hybridspec.reference.gpu.conditional import (
    KERNEL_NAME,
    SET_SWITCH_PTX,
    check_body,
    check_lengths,
    check_table,
)
from hybridspec.reference.gpu.control import (
    DEFAULT_BODIES,
    GraphControl,
    body_of_length,
    check_bodies,
    make_control,
)
from hybridspec.reference.gpu.driver import (
    ConditionalNodeParams,
    Driver,
    KernelNodeParams,
    NodeParams,
    check_version,
)

triton = pytest.importorskip("triton")
NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia"


@given(st.sets(st.integers(1, 16), min_size=1), st.integers(1, 16))
def test_every_length_gets_the_smallest_body_that_holds_it(chosen: set[int], max_rows: int) -> None:
    bodies = check_bodies(sorted(chosen), max_rows=max_rows)
    assert bodies[-1] == max_rows
    table = body_of_length(bodies, max_rows=max_rows)
    assert len(table) == max_rows + 1
    for length, index in enumerate(table):
        assert bodies[index] >= length
        assert index == 0 or bodies[index - 1] < length
    check_table(table, num_bodies=len(bodies))


def test_default_bodies() -> None:
    table = body_of_length(DEFAULT_BODIES, max_rows=16)
    assert [DEFAULT_BODIES[i] for i in table] == [1, 1, 2, 4, 4, *[8] * 4, *[16] * 8]
    assert check_bodies(DEFAULT_BODIES, max_rows=6) == (1, 2, 4, 6)


@pytest.mark.parametrize("bodies", [(), (0, 4), (4, 2), (4, 4)])
def test_bodies_that_do_not_rise_are_refused(bodies: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="rising"):
        check_bodies(bodies, max_rows=16)


def test_a_table_that_would_run_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"0\.\.1"):
        check_table([0, 1, 2], num_bodies=2)
    with pytest.raises(UsageError):
        check_table([0, -1], num_bodies=2)
    with pytest.raises(UsageError):
        check_table([], num_bodies=2)


def test_bodies_hold_only_what_they_may() -> None:
    check_body({"kernel": 3, "memset": 1, "memcpy": 1, "empty": 1}, index=0)
    with pytest.raises(UsageError, match=r"body 2 .* empty"):
        check_body({}, index=2)
    with pytest.raises(UsageError, match="'event wait'"):
        check_body({"kernel": 3, "event wait": 1}, index=0)


def test_lengths_must_be_what_the_kernel_reads() -> None:
    check_lengths(torch.ones(4, dtype=torch.int32))
    for wrong in (
        torch.ones(4, dtype=torch.int64),
        torch.ones(2, 2, dtype=torch.int32),
        torch.ones(8, dtype=torch.int32)[::2],
        torch.ones(0, dtype=torch.int32),
    ):
        with pytest.raises(UsageError, match="lengths"):
            check_lengths(wrong)


def test_struct_layouts() -> None:
    assert ctypes.sizeof(NodeParams) == 256
    assert ctypes.sizeof(ConditionalNodeParams) == 32
    assert ctypes.sizeof(KernelNodeParams) == 72
    assert NodeParams.kind.offset == 16
    assert NodeParams.reserved2.offset == 248


def test_struct_layouts_are_those_of_the_header(tmp_path: Path) -> None:
    header = NVIDIA / "include" / "cuda.h"
    if not header.exists():
        pytest.skip("triton came without cuda.h")
    structs = {
        "CUDA_CONDITIONAL_NODE_PARAMS": ConditionalNodeParams,
        "CUDA_KERNEL_NODE_PARAMS_v2": KernelNodeParams,
        "CUgraphNodeParams": NodeParams,
    }
    lines = ["#include <cuda.h>", "#include <stddef.h>", ""]
    for name, struct in structs.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}");')
        for field, *_ in struct._fields_:
            if field == "kind":  # the header's union has no name
                field, offset = "conditional", NodeParams.kind.offset
            else:
                offset = getattr(struct, field).offset
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {offset}, "{field}");')
    source = tmp_path / "layouts.c"
    source.write_text("\n".join(lines) + "\n")
    try:
        built = subprocess.run(
            ["cc", "-fsyntax-only", f"-I{header.parent}", str(source)],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("no C compiler")
    assert built.returncode == 0, built.stderr


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_ptx_assembles(architecture: str, tmp_path: Path) -> None:
    assembler = NVIDIA / "bin" / "ptxas"
    if not assembler.exists():
        pytest.skip("triton came without ptxas")
    source, cubin = tmp_path / "set.ptx", tmp_path / "set.cubin"
    source.write_text(SET_SWITCH_PTX)
    built = subprocess.run(
        [str(assembler), f"--gpu-name={architecture}", str(source), "-o", str(cubin)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    image = cubin.read_bytes()
    assert KERNEL_NAME.encode() in image
    assert b"cudaGraphSetConditional" in image, "left for the driver to resolve"


def test_driver_that_is_not_there_or_too_old_is_refused() -> None:
    with pytest.raises(EnvironmentMissing, match=r"libcuda-not-there.*--graph-control masked"):
        Driver("libcuda-not-there.so.1")
    check_version(12080)
    check_version(13000)
    with pytest.raises(EnvironmentMissing, match=r"CUDA 12\.4; .* 12\.8"):
        check_version(12040)


def test_a_library_without_the_calls_is_refused() -> None:
    with pytest.raises(EnvironmentMissing, match="cuDriverGetVersion"):
        Driver("libc.so.6")


def test_names() -> None:
    for name in ("masked", "host"):
        control: GraphControl = make_control(name)
        assert control.name == name
        with pytest.raises(UsageError, match="capture first"):
            control.replay()
    with pytest.raises(UsageError, match="'eager' is unknown: use masked, switch, host"):
        make_control("eager")
