"""SGLang's launches in front of GDN, called as its backend calls them, and ours."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conv.workload import Workload

CONV = "kernels/ops/mamba/causal_conv1d_triton.py"
SCATTER = "kernels/ops/mamba/mamba_state_scatter_triton.py"
SPLIT = "jit_kernel/triton/gdn_fused_proj.py"


def sglang_files(hopper: bool) -> types.SimpleNamespace | None:
    """SGLang's three kernel files by themselves, without importing the package (seconds)."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(next(iter(found.submodule_search_locations)))
    for name in ("triton", "triton.language"):
        importlib.import_module(name)
    # The conv asks this one function of another file; it answers whether the card is Hopper.
    utils: Any = types.ModuleType("sglang.jit_kernel.utils")
    utils.is_arch_support_pdl = lambda: hopper
    parents = {name: types.ModuleType(name) for name in ("sglang", "sglang.jit_kernel")}
    loaded = {}
    with mock.patch.dict(sys.modules, {**parents, "sglang.jit_kernel.utils": utils}):
        for name, relative in (("conv", CONV), ("scatter", SCATTER), ("split", SPLIT)):
            spec = importlib.util.spec_from_file_location(f"sglang_{name}", folder / relative)
            assert spec is not None
            assert spec.loader is not None
            loaded[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[name])
    # Triton looks functions up through their module.
    sys.modules.update({f"sglang_{name}": module for name, module in loaded.items()})
    return types.SimpleNamespace(**loaded)


class Stock:
    """SGLang's launches."""

    def __init__(self, workload: Workload, files: types.SimpleNamespace) -> None:
        self.w, self.files = workload, files

    def conv(self, n: int, x: int) -> torch.Tensor:
        """Rows after the conv [B*T, C]."""
        w = self.w
        rows_BCT = w.rows_NXBTC[n, x].flatten(0, 1).view(w.batch, w.tokens, -1).transpose(1, 2)
        out_BCT = self.files.conv.causal_conv1d_update(
            rows_BCT,
            w.pool_NXSCW[n, x],
            w.weight_NXCW[n, x],
            None,
            "silu",
            conv_state_indices=w.slots_B,
            intermediate_conv_window=w.windows_XBTCW[x],
            intermediate_state_indices=w.rows_B,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_parent_token=None,
        )
        return out_BCT.transpose(1, 2).view(w.batch * w.tokens, -1)

    def conv_and_split(self, n: int, x: int) -> tuple[torch.Tensor, ...]:
        w = self.w
        heads = (w.key_heads, w.key_heads, w.value_heads)
        return self.files.split.fused_qkv_split_gdn_prefill(
            self.conv(n, x), *heads, *[w.head_dim] * 3
        )

    def commit(self, n: int, accepted_B: torch.Tensor) -> None:
        w = self.w
        self.files.scatter.fused_conv_window_scatter_with_mask(
            w.pool_NXSCW[n], w.windows_XBTCW, w.slots_B, accepted_B
        )


class Ours:
    """This package's launches."""

    def __init__(self, workload: Workload, *, dependent: bool = False) -> None:
        from hybridspec.kernels.conv_window import commit, prepare, verify

        w = self.w = workload
        self.modules = (verify, prepare, commit)
        self.options = {"dependent_launch": dependent}
        sizes = (w.batch, w.tokens, w.key_heads, w.value_heads, w.head_dim)
        self.prepared = prepare.allocate(*sizes, dtype=w.dtype, device=w.device)
        self.out_BTC = torch.empty_like(w.rows_NXBTC[0, 0])
        for tensor in (*self.prepared, self.out_BTC):
            tensor.fill_(float("nan"))

    def _inputs(self, n: int, x: int) -> tuple[torch.Tensor, ...]:
        w = self.w
        layer = (w.rows_NXBTC[n, x], w.pool_NXSCW[n, x], w.weight_NXCW[n, x])
        return (*layer, w.slots_B, w.full_B)

    def conv(self, n: int, x: int) -> torch.Tensor:
        raw = self.w.raw_XBTC[x]
        return self.modules[0].verify(
            *self._inputs(n, x), out=self.out_BTC, raw_out=raw, **self.options
        )

    def conv_without_raw(self, n: int, x: int) -> torch.Tensor:
        return self.modules[0].verify(*self._inputs(n, x), out=self.out_BTC, **self.options)

    def prepare(self, n: int, x: int) -> Any:
        w = self.w
        return self.modules[1].prepare(
            *self._inputs(n, x),
            w.a_XBTH[x],
            w.b_XBTH[x],
            w.a_log_XH[x],
            w.dt_bias_XH[x],
            num_key_heads=w.key_heads,
            head_dim=w.head_dim,
            out=self.prepared,
            raw_out=w.raw_XBTC[x],
            **self.options,
        )

    def commit(self, n: int, accepted_B: torch.Tensor) -> None:
        w = self.w
        self.modules[2].commit(w.pool_NXSCW[n], w.raw_XBTC, w.slots_B, accepted_B, **self.options)
