"""Bytes of verification, and what the engine's accounting makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from hybridspec.errors import EngineRefusal
from hybridspec.sglang_plugin.target.buffers import BlockShape, VerifyBuffers
from hybridspec.sglang_plugin.target.memory import count_compact, report_of

GIB, MIB = 1 << 30, 1 << 20


def cache_params(*, layers: int = 30, tp: int = 1, channels: int | None = None) -> Any:
    """Of Qwen3.6-35B-A3B, as SGLang's `Mamba2CacheParams` has them on one rank."""
    heads, key_heads, dim = 32 // tp, 16 // tp, 128
    width = channels or (2 * key_heads + heads) * dim
    one = 2 * width * 3 + 4 * heads * dim * dim
    return SimpleNamespace(
        shape=SimpleNamespace(
            temporal=(heads, dim, dim), conv=[(width, 3)], num_k_heads_per_tp=key_heads
        ),
        layers=list(range(layers)),
        is_kda=False,
        mamba_cache_per_req=one * layers,
    )


def test_bytes_of_the_real_shape() -> None:
    params = cache_params()
    report = report_of(params, params.layers, requests=9, rows=16)
    assert report.factor_bytes_per_request / MIB == pytest.approx(9.43, abs=0.01)
    assert report.row_bytes_per_request / MIB == 7.5
    assert report.snapshot_bytes_per_request == 16 * params.mamba_cache_per_req
    assert report.used_bytes == 9 * (report.factor_bytes_per_request + 7.5 * MIB)
    assert report.saved_bytes + report.used_bytes == 9 * report.snapshot_bytes_per_request


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_buffers_hold_what_is_reported(tp: int) -> None:
    params = cache_params(layers=2, tp=tp)
    buffers = VerifyBuffers.allocate(BlockShape.of(params, [0, 2]), 3, device="cpu")
    report = report_of(params, [0, 2], requests=3, rows=16)
    assert buffers.bytes() == report.used_bytes
    assert buffers.index_of_layer == {0: 0, 2: 1}
    assert buffers.batch_rows == 3
    assert buffers.factors.key_XRHTK.shape == (2, 3, 16 // tp, 16, 128)
    assert buffers.raw_XRTC.dtype == torch.bfloat16


def test_states_of_other_layers_are_refused() -> None:
    for params in (cache_params(channels=8000), cache_params()):
        params.is_kda = params.shape.conv[0][0] == 8192
        with pytest.raises(EngineRefusal, match="use --speculative-algorithm DFLASH"):
            BlockShape.of(params, params.layers)


@pytest.mark.parametrize("speculates", [True, False])
def test_keys_and_values_get_what_snapshots_leave(speculates: bool) -> None:
    params, requests = cache_params(), 48
    configurator = SimpleNamespace(
        server_args=SimpleNamespace(
            max_running_requests=requests,
            max_mamba_cache_size=requests,
            speculative_num_draft_tokens=16,
        ),
        ps=SimpleNamespace(attn_dp_size=1),
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        hybrid_gdn_config=object(),
        is_draft_worker=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: not speculates),
        _calculate_mamba_ratio=lambda: 1,
    )

    def handle(configurator: Any, total: float) -> float:
        return total - requests * params.mamba_cache_per_req * (1 + 16 * speculates) / GIB

    left = count_compact(handle)(configurator, 100.0)
    report = report_of(params, params.layers, requests, 16)
    own = (requests + 1) * (report.used_bytes // requests) * speculates
    expected = 100.0 - (requests * params.mamba_cache_per_req + own) / GIB
    assert left == pytest.approx(expected, abs=1e-9)
