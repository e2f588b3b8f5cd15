"""Keys and values of the committed rows of every layer into the caches, in one launch."""

# A jit function seems to return nothing and to take no launch options.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hybridspec.errors import UsageError
from hybridspec.kernels.compilation import CompileCase
from hybridspec.kernels.select.selection import require_column

_KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit
def append_kernel(
    p_keys,
    p_values,
    p_tables,
    p_places,
    p_commit_rows,
    key_stride_layer,
    value_stride_layer,
    cache_stride,
    LAYERS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    """One row of one layer; grid (rows of all blocks, layers)."""
    i_row = tl.program_id(0).to(tl.int64)
    i_layer = tl.program_id(1).to(tl.int64)
    if i_row % ROWS < tl.load(p_commit_rows + i_row // ROWS):
        kind = tl.pointer_type(p_keys.dtype.element_ty)
        # Caches start at multiples of 16 bytes, which the wrapper has seen to.
        p_key_cache = tl.multiple_of(tl.load(p_tables + i_layer).to(kind), 16)
        p_value_cache = tl.multiple_of(tl.load(p_tables + LAYERS + i_layer).to(kind), 16)
        place = tl.load(p_places + i_row).to(tl.int64)
        o_x = tl.arange(0, WIDTH_PADDED)
        m_x = o_x < WIDTH
        b_key = tl.load(p_keys + i_layer * key_stride_layer + i_row * WIDTH + o_x, mask=m_x)
        b_value = tl.load(p_values + i_layer * value_stride_layer + i_row * WIDTH + o_x, mask=m_x)
        tl.store(p_key_cache + place * cache_stride + o_x, b_key, mask=m_x)
        tl.store(p_value_cache + place * cache_stride + o_x, b_value, mask=m_x)


@dataclass(frozen=True)
class Caches:
    """Where the caches of all layers are.

    Attributes:
        tables_2L: int64, addresses of the key caches and of the value caches.
        layers: L.
        width: elements of a row, heads times head dimension.
        stride: elements from one slot to the next.
        dtype: of the elements.
        tensors: the caches themselves, so that they outlive the addresses.
    """

    tables_2L: torch.Tensor
    layers: int
    width: int
    stride: int
    dtype: torch.dtype
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Caches:
        """Of key and value caches by layer, each [slots, heads, D]; waits for the device once.

        Raises:
            UsageError: caches that one launch cannot write.
        """
        tensors = (*keys, *values)
        if not keys or len(keys) != len(values):
            raise UsageError(
                f"{len(keys)} key caches and {len(values)} value caches: pass one of each a layer"
            )
        first = tensors[0]
        for tensor in tensors:
            if (
                tensor.ndim != 3
                or tensor.dtype not in _KINDS
                or tensor.dtype != first.dtype
                or tensor.shape[1:] != first.shape[1:]
                or tensor.stride() != first.stride()
                or tensor.stride()[1:] != (tensor.shape[2], 1)
                or tensor.data_ptr() % 16
            ):
                raise UsageError(
                    f"a cache is {tensor.dtype} {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()}; expected aligned bf16 or fp16 [slots, heads, D], alike "
                    "in all layers, rows contiguous: use --kv-cache-dtype auto"
                )
        addresses = [tensor.data_ptr() for tensor in tensors]
        return cls(
            torch.tensor(addresses, dtype=torch.int64, device=first.device),
            len(keys),
            first.shape[1] * first.shape[2],
            first.stride(0),
            first.dtype,
            tensors,
        )


def append(
    keys_LTHD: torch.Tensor,
    values_LTHD: torch.Tensor,
    caches: Caches,
    places_BR: torch.Tensor,
    commit_rows_B: torch.Tensor,
) -> None:
    """Write the first `commit_rows_B` rows of each block into every layer's caches.

    Args:
        keys_LTHD, values_LTHD: of all rows, [L, B * R, heads, D]; layers may be strided.
        caches: of the L layers.
        places_BR: int64 [B, R], slot of each row; those of rows not written are not looked at.
        commit_rows_B: int32, rows to write, on the device; 0 writes nothing.

    Raises:
        UsageError: shapes, dtypes or strides that do not fit.
    """
    blocks, rows = places_BR.shape
    for name, tensor in (("keys", keys_LTHD), ("values", values_LTHD)):
        if (
            tensor.ndim != 4
            or tensor.dtype != caches.dtype
            or tensor.shape[:2] != (caches.layers, blocks * rows)
            or tensor.shape[2] * tensor.shape[3] != caches.width
            or tensor.stride()[1:] != (caches.width, tensor.shape[3], 1)
        ):
            raise UsageError(
                f"{name} are {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
                f"expected {caches.dtype} [{caches.layers}, {blocks * rows}, heads, D] of rows of "
                f"{caches.width}, adjacent within a layer"
            )
    if places_BR.dtype != torch.int64 or not places_BR.is_contiguous():
        raise UsageError(f"places are {places_BR.dtype}; expected contiguous int64 [B, R]")
    require_column("commit rows", commit_rows_B, blocks, (torch.int32,))
    if blocks * rows == 0:
        return
    append_kernel[(blocks * rows, caches.layers)](
        keys_LTHD,
        values_LTHD,
        caches.tables_2L,
        places_BR,
        commit_rows_B,
        keys_LTHD.stride(0),
        values_LTHD.stride(0),
        caches.stride,
        LAYERS=caches.layers,
        ROWS=rows,
        WIDTH=caches.width,
        WIDTH_PADDED=triton.next_power_of_2(caches.width),
        num_warps=4,
    )


def compile_cases() -> list[CompileCase]:
    """The drafter of Qwen3.6: 8 layers, 8 heads of 128; and rows that are no power of two."""
    cases = []
    for dtype, width in ((torch.bfloat16, 1024), (torch.float16, 320)):
        kind = f"*{_KINDS[dtype]}"
        kinds = {"p_keys": kind, "p_values": kind, "p_tables": "*i64", "p_places": "*i64"}
        kinds |= {"p_commit_rows": "*i32"}
        kinds |= dict.fromkeys(("key_stride_layer", "value_stride_layer", "cache_stride"), "i32")
        constexprs = {
            "LAYERS": 8,
            "ROWS": 16,
            "WIDTH": width,
            "WIDTH_PADDED": triton.next_power_of_2(width),
        }
        kinds |= dict.fromkeys(constexprs, "constexpr")
        cases.append(
            CompileCase(
                f"kv_append-{kind[1:]}-{width}",
                append_kernel,
                kinds,
                constexprs,
                frozenset({"key_stride_layer", "value_stride_layer", "cache_stride"}),
                num_warps=4,
            )
        )
    return cases
