"""Products of a pass without a table for the device: plain ones of every dtype."""

from __future__ import annotations

import pytest
import torch

from hybridspec.reference.gpu.projections import project


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 128])
def test_every_element_is_the_product(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    weight = torch.randn(2048, 96, generator=generator).to(dtype)
    out = torch.full((rows, 2048), float("nan"), dtype=dtype)
    project(x, weight, out)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-2, atol=1e-1)
    torch.testing.assert_close(out, x @ weight.T)
