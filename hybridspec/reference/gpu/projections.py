"""Dense products of a pass: the few-row kernel where it was measured faster, else cuBLAS.

Which kernel runs follows from the shapes alone, so all lengths of a masked graph take the same one,
and a body of 2..15 rows has the bits of 16. One row stays with cuBLAS, whose product of a vector
plain decoding is compared with.
"""

from __future__ import annotations

import torch

from hybridspec.kernels.gdn.dispatch import architecture_of
from hybridspec.kernels.skinny_linear.linear import skinny_linear
from hybridspec.kernels.skinny_linear.table import tiles_for


def project(x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MN: torch.Tensor) -> None:
    """`out = x weight^T`; one launch that reads nothing on the host."""
    rows, (outputs, inputs) = x_MK.shape[0], weight_NK.shape
    tiles = None
    if rows > 1 and x_MK.dtype == torch.bfloat16:
        tiles = tiles_for(rows, outputs, inputs, architecture_of(x_MK.device), fused=True)
    if tiles is None:
        torch.mm(x_MK, weight_NK.t(), out=out_MN)
    else:
        skinny_linear(x_MK, weight_NK, tiles, out=out_MN)
