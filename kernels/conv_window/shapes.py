"""Checks that the conv kernels share: every refusal names the value, the rule and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridspec.errors import UsageError
from hybridspec.kernels.conv_window.naive import COLUMNS, WIDTH

MAX_ROWS = 16
DTYPES = (torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


def require(condition: bool, message: str) -> None:
    """Raise `UsageError(message)` unless the condition holds."""
    if not condition:
        raise UsageError(message)


def check_rows(name: str, rows: Tensor, *, dimensions: int) -> None:
    """Rows [..., T, C] with T <= 16 and adjacent channels."""
    require(
        rows.dim() == dimensions,
        f"{name} has shape {list(rows.shape)}: it needs {dimensions} dimensions, rows and channels "
        "last; view it as [batch, rows, channels]",
    )
    require(
        1 <= rows.shape[-2] <= MAX_ROWS,
        f"{name} has {rows.shape[-2]} rows a request: 1 to {MAX_ROWS} are handled; verify a longer "
        "block in pieces",
    )
    require(
        rows.stride(-1) == 1,
        f"{name} has stride {rows.stride(-1)} between channels: it must be 1; make it contiguous",
    )
    require(
        rows.dtype in DTYPES,
        f"{name} is {rows.dtype}: rows are bfloat16 or float32; convert them",
    )


def check_pool(pool: Tensor, rows: Tensor, *, dimensions: int) -> None:
    """Pool [..., slots, C, 3] that holds columns of rows [..., C] without loss."""
    channels = rows.shape[-1]
    require(
        pool.dim() == dimensions and pool.shape[-1] == COLUMNS and pool.shape[-2] == channels,
        f"the window pool has shape {list(pool.shape)}: it must end in [slots, {channels}, "
        f"{COLUMNS}] (only conv width {WIDTH} is handled); use the engine's own conv for others",
    )
    require(
        pool.dtype in DTYPES,
        f"the window pool is {pool.dtype}: bfloat16 or float32 is handled; allocate it so",
    )
    require(
        pool.dtype == torch.float32 or rows.dtype == torch.bfloat16,
        f"the window pool is {pool.dtype} and rows are {rows.dtype}: its columns are copies of "
        "rows and must not lose bits; allocate the pool in float32",
    )


def check_weight(weight: Tensor, bias: Tensor | None, rows: Tensor) -> None:
    """Weights [C, 4] in the dtype of the rows, bias [C]."""
    require(
        weight.dim() == 2 and weight.shape[1] == WIDTH,
        f"conv weights have shape {list(weight.shape)}: [channels, {WIDTH}] is handled, no other "
        "width; use the engine's own conv for others",
    )
    channels = rows.shape[-1]
    require(
        weight.shape[0] == channels and (bias is None or bias.shape == (channels,)),
        f"conv weights {list(weight.shape)} and bias {None if bias is None else list(bias.shape)} "
        f"do not fit rows of {channels} channels; pass those of this layer and rank",
    )
    require(
        weight.dtype == rows.dtype,
        f"conv weights are {weight.dtype} and rows {rows.dtype}: the two must agree; convert the "
        "weights once when the model is loaded",
    )


def check_indices(name: str, values: Tensor, batch: int) -> None:
    """One integer a request, adjacent."""
    require(
        values.shape == (batch,) and values.dtype in INDEX_DTYPES and values.is_contiguous(),
        f"{name} is {values.dtype} of shape {list(values.shape)}: one int32 or int64 a request, "
        f"contiguous [{batch}], is needed; slice it to the batch",
    )


def check_like(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """An output of the given shape and dtype with adjacent elements in its last dimension."""
    require(
        tuple(value.shape) == shape and value.dtype == dtype and value.stride(-1) == 1,
        f"{name} is {value.dtype} of shape {list(value.shape)} and strides "
        f"{list(value.stride())}: {dtype} {list(shape)} with adjacent last elements is needed; "
        "allocate it so",
    )
