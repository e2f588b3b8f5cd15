"""Pools without a state for every row: what is allocated, and what SGLang counts for it.

`install_memory_patch` runs before the pools of the target exist. From then on the hybrid request
pool makes `CompactStatePool`s, and the budget that is left for keys and values counts their buffers
instead of the snapshots that SGLang would have made.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybridspec.compat import sglang_0_5_16_target as compat
from hybridspec.errors import EngineRefusal
from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.sglang_plugin.target.buffers import BlockShape, VerifyBuffers

logger = logging.getLogger(__name__)

MIB = 1 << 20
# Set on what is patched, so that a second call changes nothing.
MARK = "hybridspec_patched"


@dataclass(frozen=True)
class MemoryReport:
    """Memory of verification, bytes.

    Attributes:
        snapshot_bytes_per_request: what SGLang reserves: a state and a conv window for every row.
            Where it lets the windows overlap it allocates less, 14 of 982 MiB at 16 rows.
        factor_bytes_per_request, row_bytes_per_request: what is kept instead.
        requests: that memory was reserved for, the padding row included.
    """

    snapshot_bytes_per_request: int
    factor_bytes_per_request: int
    row_bytes_per_request: int
    requests: int

    @property
    def used_bytes(self) -> int:
        """Memory of all requests."""
        return self.requests * (self.factor_bytes_per_request + self.row_bytes_per_request)

    @property
    def saved_bytes(self) -> int:
        """Memory of SGLang's snapshots that is free now."""
        return self.requests * self.snapshot_bytes_per_request - self.used_bytes

    def sentence(self) -> str:
        """One line for the log."""
        return (
            f"GDN verification keeps {self.factor_bytes_per_request / MIB:.1f} MiB of factors and "
            f"{self.row_bytes_per_request / MIB:.1f} MiB of conv rows a request "
            f"({self.requests} requests, {self.used_bytes / MIB:.0f} MiB) in place of "
            f"{self.snapshot_bytes_per_request / MIB:.0f} MiB that SGLang reserves for states and "
            "windows"
        )


def report_of(cache_params: Any, layer_ids: Any, requests: int, rows: int) -> MemoryReport:
    """Memory of `requests` requests in blocks of `rows` rows."""
    shape = BlockShape.of(cache_params, layer_ids)
    one_layer = cache_params.mamba_cache_per_req // len(cache_params.layers)
    return MemoryReport(
        snapshot_bytes_per_request=one_layer * len(shape.layer_ids) * rows,
        factor_bytes_per_request=shape.factor_bytes(),
        row_bytes_per_request=shape.row_bytes(),
        requests=requests,
    )


def compact_pool_class() -> type:
    """A state pool that keeps factors for verification instead of a state for every row."""
    StatePool: Any = compat.state_pool_class()

    class CompactStatePool(StatePool):
        """SGLang's state pool with `hybridspec_buffers` and `hybridspec_memory`."""

        hybridspec_buffers: VerifyBuffers | None = None
        hybridspec_memory: MemoryReport | None = None

        def __init__(
            self,
            *,
            spec_state_size: int,
            cache_params: Any,
            mamba_layer_ids: list[int],
            device: str,
            speculative_num_draft_tokens: int | None = None,
            **options: Any,
        ) -> None:
            _refuse_other_rings(options)
            # As if there was no speculation: then there are no snapshots.
            super().__init__(
                spec_state_size=spec_state_size,
                cache_params=cache_params,
                mamba_layer_ids=mamba_layer_ids,
                device=device,
                speculative_num_draft_tokens=None,
                **options,
            )
            if speculative_num_draft_tokens is None:
                return
            if speculative_num_draft_tokens > BLOCK_ROWS:
                raise EngineRefusal(
                    f"blocks of {speculative_num_draft_tokens} rows; the kernels take at most "
                    f"{BLOCK_ROWS}: lower --speculative-num-draft-tokens"
                )
            shape = BlockShape.of(cache_params, mamba_layer_ids)
            rows = spec_state_size + 1
            buffers = VerifyBuffers.allocate(shape, rows, device=device)
            self.hybridspec_buffers = buffers
            self.hybridspec_memory = report_of(
                cache_params, mamba_layer_ids, rows, speculative_num_draft_tokens
            )
            plain = self.mamba_cache
            # Verification of SGLang asks for this type; nothing in it is left to read.
            self.mamba_cache = self.SpeculativeState(
                conv=plain.conv,
                temporal=plain.temporal,
                intermediate_ssm=None,
                intermediate_conv_window=[],
            )
            self._intermediate_conv_window_phys = []
            self.mem_usage += compat.gibibytes(buffers.bytes())
            logger.info("HYBRIDSPEC: %s.", self.hybridspec_memory.sentence())

    return CompactStatePool


def _refuse_other_rings(options: dict[str, Any]) -> None:
    for name in ("enable_linear_replayssm", "enable_gdn_replayssm_spec", "envelope_layout"):
        if options.get(name):
            raise EngineRefusal(
                f"{name} is set; it lays out states or rolls them back in a way of its own, beside "
                "the factors of HYBRIDSPEC: leave its flag out"
            )


def count_compact(handle: Callable[[Any, float], float]) -> Callable[[Any, float], float]:
    """`_handle_max_mamba_cache` that counts factors where SGLang counts snapshots."""

    @functools.wraps(handle)
    def handle_max_mamba_cache(configurator: Any, total_rest_memory: float) -> float:
        rest = handle(configurator, total_rest_memory)
        if not compat.verifies_with_gdn(configurator):
            return rest
        args = configurator.server_args
        params = configurator.mambaish_config.mamba2_cache_params
        requests = compat.most_requests(configurator)
        report = report_of(params, params.layers, requests, args.speculative_num_draft_tokens)
        one = report.used_bytes // max(requests, 1)
        # The pool has one row more, for padding.
        own_bytes = report.used_bytes + one
        snapshot_bytes = requests * report.snapshot_bytes_per_request
        return rest + compat.gibibytes(snapshot_bytes - own_bytes)

    setattr(handle_max_mamba_cache, MARK, True)
    return handle_max_mamba_cache


def install_memory_patch() -> None:
    """Make SGLang's pools of this process compact. To be called before they are allocated.

    Classes are patched, because no pool exists yet; a second call changes nothing. Processes that
    do not run a HYBRIDSPEC worker never call it.
    """
    request_pool: Any = compat.request_pool_class()
    if not hasattr(request_pool.mamba_pool_cls, "hybridspec_buffers"):
        if request_pool.mamba_pool_cls is not compat.state_pool_class():
            raise EngineRefusal(
                f"another plugin makes state pools of {request_pool.mamba_pool_cls.__name__}; "
                "HYBRIDSPEC makes its own: set SGLANG_PLUGINS to hybridspec alone"
            )
        request_pool.mamba_pool_cls = compact_pool_class()
    configurator: Any = compat.memory_configurator_class()
    if not getattr(configurator._handle_max_mamba_cache, MARK, False):
        configurator._handle_max_mamba_cache = count_compact(configurator._handle_max_mamba_cache)
