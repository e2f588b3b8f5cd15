"""Random inputs of the conv kernels, and how closely outputs must agree."""

from __future__ import annotations

import torch

from hybridspec.kernels.conv_window import naive
from hybridspec.kernels.conv_window.prepare import allocate

NAN = float("nan")
BF16, FP32 = torch.bfloat16, torch.float32


class Case:
    """Random inputs of a batch: rows inside a wider projection, a pool larger than the batch."""

    def __init__(self, device, batch, rows, channels, *, dtype=BF16, pool=BF16, bias=True, seed=0):
        torch.manual_seed(seed)
        self.batch, self.num_rows, self.channels = batch, rows, channels
        self.device, self.dtype = device, dtype
        wide_BTC = torch.randn(batch, rows, channels + 24, device=device).to(dtype)
        self.rows_BTC = wide_BTC[..., 8 : 8 + channels]
        self.pool_SCW = torch.randn(batch + 3, channels, 3, device=device).to(dtype).to(pool)
        self.weight_CW = (torch.randn(channels, 4, device=device) / 2).to(dtype)
        self.bias_C = torch.randn(channels, device=device).to(dtype) if bias else None
        self.slots_B = self.indices(torch.randperm(batch + 3)[:batch].tolist())

    def indices(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def poisoned(self) -> torch.Tensor:
        return torch.full_like(self.rows_BTC, NAN).contiguous()

    def naive(self, lengths_B, *, dtype=None) -> torch.Tensor:
        rows_BTC, pool_SCW, weight_CW, bias_C = (
            x if x is None or dtype is None else x.to(dtype)
            for x in (self.rows_BTC, self.pool_SCW, self.weight_CW, self.bias_C)
        )
        assert rows_BTC is not None
        assert pool_SCW is not None
        assert weight_CW is not None
        return naive.verify(rows_BTC, pool_SCW, weight_CW, self.slots_B, lengths_B, bias_C=bias_C)


class Gated(Case):
    """A case whose channels are heads, with gate projections inside a wider one."""

    def __init__(self, device, batch, rows, heads, value_heads, dim, **options):
        super().__init__(device, batch, rows, (2 * heads + value_heads) * dim, **options)
        self.heads, self.value_heads, self.dim = heads, value_heads, dim
        ba_BTH = torch.randn(batch, rows, 2 * value_heads, device=device)
        ba_BTH[..., value_heads:] *= 12
        ba_BTH = ba_BTH.to(self.dtype)
        self.b_BTH, self.a_BTH = ba_BTH[..., :value_heads], ba_BTH[..., value_heads:]
        self.a_log_H = torch.rand(value_heads, device=device) * 3 - 1
        self.dt_bias_H = torch.randn(value_heads, device=device).to(self.dtype)

    def arguments(self, lengths_B, convert=lambda x: x) -> tuple:
        floats = [convert(x) for x in (self.rows_BTC, self.pool_SCW, self.weight_CW)]
        gates = [convert(x) for x in (self.a_BTH, self.b_BTH, self.a_log_H, self.dt_bias_H)]
        return (*floats, self.slots_B, lengths_B, *gates)

    def ungated(self, lengths_B) -> tuple:
        return self.rows_BTC, self.pool_SCW, self.weight_CW, self.slots_B, lengths_B

    def outputs(self):
        made = allocate(
            self.batch,
            self.num_rows,
            self.heads,
            self.value_heads,
            self.dim,
            dtype=self.dtype,
            device=self.device,
        )
        for value in made:
            value.fill_(NAN)
        return made


def assert_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def assert_rounded_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits but for rare neighbours: exp differs in its last bit between libraries."""
    assert torch.isfinite(found).all()
    torch.testing.assert_close(
        found, expected, rtol=2**-7 if found.dtype == BF16 else 1e-5, atol=1e-6
    )
    if found.dtype == BF16:
        assert (found != expected).double().mean() < 5e-3
