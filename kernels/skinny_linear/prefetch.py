"""Weights asked into L2 ahead of their use, while memory has nothing else to do; sm_90."""

# Triton's decorators and constexprs are outside what pyright can follow.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.interpreter import INTERPRETED

# Bytes that a thread asks for at once.
CHUNK_BYTES = tl.constexpr(2048)


@triton.jit
def prefetch_to_l2(pointers, num_bytes):
    """Ask for `num_bytes` (int32, a multiple of 16, 0: nothing) from each pointer on.

    One element a thread; pointers are multiples of 16 bytes. Nothing waits for it, neither this
    kernel's end nor those behind it, and nothing can be told from it but time.
    """
    if not INTERPRETED:
        # Not `prefetch.global.L2`, which leaves open how much of a line it fetches.
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred wanted;
            setp.gt.s32 wanted, $2, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r",
            [pointers.to(tl.int64), num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_share(
    p_weight,
    i_program,
    NUM_BYTES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """One program's share of the first `NUM_BYTES` (a multiple of 16) from a bf16 pointer on.

    Neighbouring chunks go to different programs, so that what is there early is spread evenly over
    a matrix whose use begins everywhere at once.
    """
    CHUNKS: tl.constexpr = (NUM_BYTES + CHUNK_BYTES - 1) // CHUNK_BYTES
    SHARE: tl.constexpr = (CHUNKS + NUM_PROGRAMS - 1) // NUM_PROGRAMS
    for start in tl.static_range(0, SHARE, THREADS):
        i_chunk = (start + tl.arange(0, THREADS)) * NUM_PROGRAMS + i_program
        o_byte = i_chunk * CHUNK_BYTES
        size = tl.minimum(tl.maximum(NUM_BYTES - o_byte, 0), CHUNK_BYTES)
        prefetch_to_l2(p_weight + o_byte // 2, size)
