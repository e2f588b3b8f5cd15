"""A projection without bias, plain: the oracle of the kernel."""

from __future__ import annotations

import torch


def skinny_linear_naive(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """`out[m, n] = sum_k x[m, k] * weight[n, k]`, in the dtype of `x_MK`.

    Args:
        x_MK: [rows, inputs], any float dtype; all arithmetic is done in it.
        weight_NK: [outputs, inputs].

    Returns:
        [rows, outputs].
    """
    return torch.stack([weight_NK.to(x_MK.dtype) @ x_K for x_K in x_MK])
