"""Checks of what the verify kernels are given. One place, so that every form refuses alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.gdn.factors import BLOCK_ROWS, Factors

HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Shape:
    """Sizes of one verify call."""

    batch: int
    rows: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def check_inputs(
    mixed_BTC: torch.Tensor,
    a_BTH: torch.Tensor,
    b_BTH: torch.Tensor,
    state_SHVK: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    factors: Factors,
    out_BTHV: torch.Tensor,
    key_heads: int,
) -> Shape:
    """Shape of a call, or a refusal that says value, rule and remedy.

    Raises:
        UsageError: shapes, dtypes or strides that the kernels cannot take.
    """
    batch, rows, width = mixed_BTC.shape
    _, value_heads, value_dim, key_dim = state_SHVK.shape
    _require(
        1 <= rows <= BLOCK_ROWS,
        f"block of {rows} rows; the kernels take 1 to {BLOCK_ROWS}: split the block",
    )
    _require(
        key_dim in HEAD_DIMS and value_dim in HEAD_DIMS,
        f"head dims K = {key_dim}, V = {value_dim}; the kernels take {HEAD_DIMS}",
    )
    _require(
        value_heads % key_heads == 0,
        f"{value_heads} value heads over {key_heads} key heads; the first must be a multiple",
    )
    expected = 2 * key_heads * key_dim + value_heads * value_dim
    _require(width == expected, f"mixed rows are {width} wide; q, k and v take {expected}")
    for name, tensor in (("a", a_BTH), ("b", b_BTH)):
        _require(
            tensor.shape == (batch, rows, value_heads) and tensor.stride(2) == 1,
            f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; expected "
            f"({batch}, {rows}, {value_heads}) with contiguous heads",
        )
    _require(
        mixed_BTC.dtype == torch.bfloat16 and mixed_BTC.stride(2) == 1,
        f"mixed rows are {mixed_BTC.dtype} with strides {mixed_BTC.stride()}; expected bfloat16 "
        "with contiguous channels: the kernels count on exact products",
    )
    _require(
        state_SHVK.dtype in (torch.float32, torch.bfloat16)
        and state_SHVK.stride()[2:] == (key_dim, 1),
        f"state pool is {state_SHVK.dtype} with strides {state_SHVK.stride()}; expected float32 or "
        "bfloat16 with contiguous [V, K] tiles",
    )
    for name, tensor in (("slots", slots_B), ("lengths", lengths_B)):
        _require(
            tensor.dtype == torch.int32 and tensor.shape == (batch,) and tensor.is_contiguous(),
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected contiguous int32 ({batch},)",
        )
    _require(
        out_BTHV.shape == (batch, rows, value_heads, value_dim) and out_BTHV.stride(3) == 1,
        f"out has shape {tuple(out_BTHV.shape)}; expected "
        f"({batch}, {rows}, {value_heads}, {value_dim}) with contiguous channels",
    )
    _require(
        out_BTHV.dtype in (torch.bfloat16, torch.float32),
        f"out is {out_BTHV.dtype}; the kernels write bfloat16 or float32",
    )
    _, held_rows, held_keys, _, held_key_dim = factors.key_XRHTK.shape
    _, _, held_values, _, held_value_dim = factors.update_XRHTV.shape
    _require(
        held_rows >= batch
        and (held_keys, held_values) == (key_heads, value_heads)
        and (held_key_dim, held_value_dim) == (key_dim, value_dim),
        f"factors hold {held_rows} rows of {held_keys} key heads of {held_key_dim} and "
        f"{held_values} value heads of {held_value_dim}; this call needs {batch} of {key_heads} of "
        f"{key_dim} and {value_heads} of {value_dim}: allocate them for the largest batch",
    )
    return Shape(batch, rows, key_heads, value_heads, key_dim, value_dim)


def check_parameters(
    A_log_H: torch.Tensor, dt_bias_H: torch.Tensor, shape: Shape, value_block: int
) -> None:
    """Refuse gate parameters of other heads, and tiles that leave rows of V out.

    Raises:
        UsageError: with value, rule and remedy.
    """
    for name, tensor in (("A_log", A_log_H), ("dt_bias", dt_bias_H)):
        _require(
            tensor.shape == (shape.value_heads,) and tensor.is_contiguous(),
            f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; expected "
            f"contiguous ({shape.value_heads},), one value a value head",
        )
    _require(
        shape.value_dim % value_block == 0,
        f"value block of {value_block} rows does not divide V = {shape.value_dim}: use 16 or 32",
    )
