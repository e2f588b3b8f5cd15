"""One graph of captured torch graphs: prefix, a kernel that sets the condition, SWITCH, bodies.

The condition is set on the device from the round's lengths, so nothing is read on the host and no
work is repeated. Bodies are child graph nodes, copies of graphs that torch captured: torch keeps
the memory of a capture for its own `CUDAGraph` object only, so those are kept here.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from hybridspec.errors import UsageError
from hybridspec.reference.gpu.capture import CapturedGraph
from hybridspec.reference.gpu.driver import Driver

KERNEL_NAME = "hybridspec_set_switch"
# `cudaGraphSetConditional` is a function of the device runtime that the driver itself provides when
# it loads the module. The index of the body is that of the longest request. Lengths are cut to
# 0..max_length first: a condition that names no body would run none, silently.
SET_SWITCH_PTX = f"""
.version 7.0
.target sm_80
.address_size 64

.extern .func cudaGraphSetConditional (.param .b64 handle, .param .b32 value);

.visible .entry {KERNEL_NAME} (
    .param .u64 p_handle,
    .param .u64 p_body_of_length,
    .param .u64 p_lengths,
    .param .s32 p_batch,
    .param .s32 p_max_length
)
{{
    .reg .pred %more;
    .reg .b32 %length, %longest, %index, %batch, %body;
    .reg .b64 %handle, %table, %lengths, %offset;

    ld.param.u64 %handle, [p_handle];
    ld.param.u64 %table, [p_body_of_length];
    ld.param.u64 %lengths, [p_lengths];
    ld.param.s32 %batch, [p_batch];
    cvta.to.global.u64 %table, %table;
    cvta.to.global.u64 %lengths, %lengths;
    mov.s32 %longest, 0;
    mov.s32 %index, 0;
next_request:
    ld.global.s32 %length, [%lengths];
    max.s32 %longest, %longest, %length;
    add.s64 %lengths, %lengths, 4;
    add.s32 %index, %index, 1;
    setp.lt.s32 %more, %index, %batch;
    @%more bra next_request;

    ld.param.s32 %length, [p_max_length];
    min.s32 %longest, %longest, %length;
    mul.wide.s32 %offset, %longest, 4;
    add.s64 %table, %table, %offset;
    ld.global.u32 %body, [%table];
    {{
        .param .b64 handle;
        .param .b32 value;
        st.param.b64 [handle], %handle;
        st.param.b32 [value], %body;
        call.uni cudaGraphSetConditional, (handle, value);
    }}
    ret;
}}
"""
# What CUDA allows in the body of a conditional node.
BODY_KINDS = frozenset({"kernel", "memcpy", "memset", "empty", "conditional"})


class SwitchGraph:
    """An instantiated graph with one SWITCH node.

    Args:
        driver: of this machine.
        prefix: captured with `keep_graph=True`; leaves the lengths on the device.
        bodies: captured likewise; each has at least one node.
        body_of_length: index of the body for each length 0..max, of the longest request.
        lengths_B: int32 [batch], contiguous, on the device; written by `prefix`.

    Raises:
        UsageError: a table that names no body, or lengths of another kind.
        UsageError: a body without a node, or with one that conditional nodes must not hold.
        EnvironmentMissing: the driver refused.
    """

    def __init__(
        self,
        driver: Driver,
        prefix: CapturedGraph,
        bodies: Sequence[CapturedGraph],
        body_of_length: Sequence[int],
        lengths_B: torch.Tensor,
    ) -> None:
        check_table(body_of_length, num_bodies=len(bodies))
        check_lengths(lengths_B)
        self._driver = driver
        table = torch.tensor(body_of_length, dtype=torch.int32, device=lengths_B.device)
        # Everything that the launches read or write must live as long as this object.
        self._kept = (prefix, tuple(bodies), table, lengths_B)
        for index, body in enumerate(bodies):
            check_body(driver.count_nodes(body.raw_cuda_graph()), index=index)
        self.graph = driver.new_graph()
        largest = len(bodies) - 1
        handle = driver.condition(self.graph, default=largest)
        first = driver.add_child(self.graph, [], prefix.raw_cuda_graph())
        setter = driver.add_single_thread(
            self.graph,
            [first],
            driver.function(SET_SWITCH_PTX, KERNEL_NAME),
            [
                ctypes.c_uint64(handle),
                ctypes.c_uint64(table.data_ptr()),
                ctypes.c_uint64(lengths_B.data_ptr()),
                ctypes.c_int(lengths_B.numel()),
                ctypes.c_int(len(body_of_length) - 1),
            ],
        )
        inner = driver.add_switch(self.graph, [setter], handle, len(bodies))
        for graph, body in zip(inner, bodies, strict=True):
            driver.add_child(graph, [], body.raw_cuda_graph())
        self.executable = driver.instantiate(self.graph)
        self._finalizer = weakref.finalize(self, driver.destroy, self.graph, self.executable)
        self._finalizer.atexit = False
        driver.upload(self.executable, torch.cuda.current_stream().cuda_stream)
        torch.cuda.current_stream().synchronize()

    def launch(self) -> None:
        """Launch on torch's current stream without waiting."""
        self._driver.launch(self.executable, torch.cuda.current_stream().cuda_stream)

    def close(self) -> None:
        """Wait for what runs and free the graph; closing twice is harmless."""
        if self._finalizer.alive:
            torch.cuda.synchronize()
            self._finalizer()


def check_table(body_of_length: Sequence[int], *, num_bodies: int) -> None:
    """Refuse a table that names a body that is not there, which would run nothing at all."""
    if not body_of_length or not all(0 <= body < num_bodies for body in body_of_length):
        raise UsageError(
            f"the bodies of lengths 0..{len(body_of_length) - 1} are {list(body_of_length)}; each "
            f"must be one of 0..{num_bodies - 1}"
        )


def check_lengths(lengths_B: torch.Tensor) -> None:
    """Refuse lengths that the kernel would misread."""
    if lengths_B.dtype != torch.int32 or lengths_B.dim() != 1 or lengths_B.numel() == 0:
        raise UsageError(
            f"lengths are {lengths_B.dtype} {list(lengths_B.shape)}; they must be int32 [batch]"
        )
    if not lengths_B.is_contiguous():
        raise UsageError("lengths must lie side by side: use a buffer of their own")


def check_body(counts: dict[str, int], *, index: int) -> None:
    """Refuse a body that hangs (no node, on older drivers) or that CUDA does not allow."""
    if not counts:
        raise UsageError(f"body {index} of the SWITCH node is empty; it needs at least one node")
    foreign = sorted(set(counts) - BODY_KINDS)
    if foreign:
        raise UsageError(
            f"body {index} of the SWITCH node has a node of kind {foreign[0]!r}; a body may hold "
            f"{', '.join(sorted(BODY_KINDS))} only: move it in front of the SWITCH, or use "
            "--graph-control masked"
        )
