"""Requests with scattered slots in a pool whose other slots hold NaN."""

from __future__ import annotations

from typing import Any

import torch

from hybridspec.kernels.block_attention import naive
from hybridspec.kernels.block_attention.attention import Scratch, Tiling, attend

BF16 = torch.bfloat16
NAN = float("nan")


class Case:
    """Random queries and caches; the table of every request names slots in a random order."""

    def __init__(
        self,
        device: torch.device,
        contexts: list[int],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        rows: int = 16,
        dtype: torch.dtype = BF16,
        extra_slots: int = 13,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.rows, self.dim, self.device = rows, dim, device
        batch, width = len(contexts), max(contexts) + rows + 3
        used = sum(contexts) + batch * rows
        order = torch.randperm(used + extra_slots, generator=generator, device=device).int()
        # Entries past a request's block name a slot of nobody.
        self.table_XP = torch.full((batch + 2, width), int(order[-1]), device=device).int()
        requests = torch.randperm(batch + 2, generator=generator, device=device)[:batch]
        shape = (used + extra_slots, kv_heads, dim)
        self.keys_SGD, self.values_SGD = (
            torch.full(shape, NAN, device=device, dtype=dtype) for _ in range(2)
        )
        first = 0
        for request, context in zip(requests.tolist(), contexts, strict=True):
            slots = order[first : first + context + rows]
            self.table_XP[request, : len(slots)] = slots
            for pool in (self.keys_SGD, self.values_SGD):
                pool[slots.long()] = normal(len(slots), kv_heads, dim).to(dtype)
            first += len(slots)
        self.requests_B = requests
        self.starts_B = torch.tensor(contexts, device=device)
        # Rows of a fused projection: queries in front, a tail behind.
        self.q_RHD = (
            normal(batch * rows, heads * dim + 32)
            .to(dtype)[:, : heads * dim]
            .unflatten(1, (heads, dim))
        )
        self.scale = dim**-0.5
        self.scratch = Scratch.allocate(batch, rows, heads, dim, device)
        self.poison_scratch()

    def poison_scratch(self) -> None:
        """Nothing of an earlier round may be read."""
        for kept in (self.scratch.sums, self.scratch.peaks, self.scratch.parts):
            kept.fill_(NAN)

    def lengths(self, *lengths: int) -> torch.Tensor:
        return torch.tensor(lengths, dtype=torch.int32, device=self.device)

    def slots_of(self, b: int, first: int, last: int) -> torch.Tensor:
        """Slots of positions first .. last - 1 of request b."""
        return self.table_XP[int(self.requests_B[b]), first:last].long()

    def run(
        self,
        *,
        causal: bool,
        lengths_B: torch.Tensor | None = None,
        tiling: Tiling | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Output of the kernels, poisoned before."""
        out = torch.full(self.q_RHD.shape, NAN, device=self.device, dtype=self.q_RHD.dtype)
        attend(
            self.q_RHD,
            self.keys_SGD,
            self.values_SGD,
            self.table_XP,
            self.requests_B,
            self.starts_B,
            self.scratch,
            out,
            scale=self.scale,
            causal=causal,
            lengths_B=lengths_B,
            tiling=tiling,
            **options,
        )
        return out

    def exact(self, *, causal: bool, lengths_B: torch.Tensor | None = None) -> torch.Tensor:
        """The same in float64, one row at a time."""
        return naive.attend(
            self.q_RHD.double(),
            self.keys_SGD,
            self.values_SGD,
            self.table_XP,
            self.requests_B,
            self.starts_B,
            scale=self.scale,
            causal=causal,
            lengths_B=lengths_B,
        )


def assert_near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Within the rounding of weights and outputs to bf16, of values of size one."""
    assert torch.isfinite(found).all()
    tolerance = 2e-2 if found.dtype == BF16 else 1e-4
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
