"""Calls of attention over one pool: every call has its own requests, slots, queries and rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

SEED = 0
ROWS = 16
# Twice the L2 cache of an H200: keys and values of a call come from memory where enough calls fit.
COLD_BYTES = 120 << 20
MIN_CALLS, MAX_CALLS = 8, 320
# Where a slot of the pool lies is random, as after hours of serving.


@dataclass(frozen=True)
class Shape:
    """Attention layers of one model."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    causal: bool

    def bytes_of(self, batch: int, context: int) -> int:
        """Keys and values that one call reads, bf16."""
        return 4 * batch * (context + ROWS) * self.kv_heads * self.dim


SHAPES = (Shape("target", 16, 2, 256, True), Shape("drafter", 32, 4, 128, False))


@dataclass
class Workload:
    """Tensors of all calls.

    Attributes:
        q_NRHD: queries of every call. k_NRGD, v_NRGD: rows of the blocks, also in the pools.
        table_XP: slots; call n has rows n x batch .. of it, all the same context.
        indptr, indices: what SGLang's kernels take in place of the table, by call.
    """

    shape: Shape
    batch: int
    context: int
    device: torch.device
    calls: int = field(init=False)

    def __post_init__(self) -> None:
        shape, batch, context, device = self.shape, self.batch, self.context, self.device
        wanted = -(-COLD_BYTES // shape.bytes_of(batch, context))
        self.calls = max(MIN_CALLS, min(MAX_CALLS, wanted))
        generator = torch.Generator(device).manual_seed(SEED)

        def normal(*sizes: int) -> torch.Tensor:
            values = torch.randn(sizes, generator=generator, device=device)
            return values.to(torch.bfloat16)

        requests, width = self.calls * batch, context + ROWS
        slots = requests * width
        order = torch.randperm(slots, generator=generator, device=device)
        self.table_XP = order.view(requests, width).int()
        self.keys_SGD = normal(slots, shape.kv_heads, shape.dim)
        self.values_SGD = normal(slots, shape.kv_heads, shape.dim)
        self.q_NRHD = normal(self.calls, batch * ROWS, shape.heads, shape.dim)
        self.out_NRHD = torch.full_like(self.q_NRHD, float("nan"))
        self.requests_NB = torch.arange(requests, device=device).view(self.calls, batch)
        self.starts_B = torch.full((batch,), context, dtype=torch.int64, device=device)
        block = self.table_XP[:, context:].reshape(self.calls, batch * ROWS).long()
        self.k_NRGD, self.v_NRGD = self.keys_SGD[block], self.values_SGD[block]
        self.indices_NK = self.table_XP[:, :context].reshape(self.calls, -1).long()
        steps = torch.arange(batch + 1, device=device)
        self.qo_indptr = steps * ROWS
        self.kv_indptr = (steps * context).int()
        self.mask_indptr = steps * ROWS * (context + ROWS)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.shape.dim**-0.5

    def exact(self, call: int) -> torch.Tensor:
        """Output of one call in float64, [rows, heads, D]."""
        shape, outs = self.shape, []
        group = shape.heads // shape.kv_heads
        for b in range(self.batch):
            slots = self.table_XP[self.requests_NB[call, b]].long()
            keys, values = (
                pool[slots].double().repeat_interleave(group, 1)
                for pool in (self.keys_SGD, self.values_SGD)
            )
            q = self.q_NRHD[call, b * ROWS : (b + 1) * ROWS].double()
            scores = torch.einsum("thd,nhd->htn", q, keys) * self.scale
            if shape.causal:
                behind = torch.ones_like(scores[0]).triu(self.context + 1).bool()
                scores = scores.masked_fill(behind, float("-inf"))
            outs.append(torch.einsum("htn,nhd->thd", scores.softmax(-1), values))
        return torch.cat(outs)

    def lengths(self, length: int) -> torch.Tensor:
        """The same length for every request."""
        return torch.full((self.batch,), length, dtype=torch.int32, device=self.device)


def sglang_kernels() -> tuple[Any, Any] | None:
    """`extend_attention_fwd` and `verify_splitkv_fwd` of the installed SGLang."""
    try:
        from sglang.kernels.ops.attention.extend_attention import (  # pyright: ignore
            extend_attention_fwd,
        )
        from sglang.kernels.ops.attention.verify_splitkv import (  # pyright: ignore
            verify_splitkv_fwd,
        )
    except ImportError:
        return None
    return extend_attention_fwd, verify_splitkv_fwd
