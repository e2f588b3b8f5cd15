"""GDN layers in verification and their commit, on SGLang's own pools."""

from __future__ import annotations

from typing import Any

import torch

from hybridspec.compat import sglang_0_5_16_target as compat
from hybridspec.errors import EngineRefusal, UsageError
from hybridspec.kernels.conv_window.verify import verify as conv_verify
from hybridspec.kernels.gdn.commit import ConvWindows, commit
from hybridspec.kernels.gdn.dispatch import verify
from hybridspec.kernels.gdn.table import Choice
from hybridspec.sglang_plugin.round_state import RoundState
from hybridspec.sglang_plugin.target.buffers import VerifyBuffers

# The fastest sequential tile at 16 rows of one request, in benchmarks/results/gdn_dispatch.json. A
# form for short lengths alone would let the length decide which bits a row gets.
SEQUENTIAL = Choice("sequential", 8, 1, 8, measured=True)


class GdnVerification:
    """Takes the place of `forward_extend` of one GDN backend where drafts are verified.

    Two launches a layer: conv over the rows that count, then all rows of the block against a state
    that is only read. Lengths are read on the device, so a captured graph serves every round. Rows
    at or past the length, and requests without a slot, come out as zeros whatever they hold.
    """

    def __init__(
        self,
        backend: Any,
        buffers: VerifyBuffers,
        round_state: RoundState,
        *,
        last_router_layer: int,
        dependent_launch: bool,
        sequential: bool = False,
    ) -> None:
        """Nothing is replaced yet; `install` does that.

        Args:
            sequential: of one request the sequential form, see `LaunchOptions`.
            backend: SGLang's `GDNAttnBackend`.
            last_router_layer: layers up to this id run the rows that the first router sees, later
                ones the final length; -1 without a correction.
        """
        self.backend = backend
        self.buffers = buffers
        self.round_state = round_state
        self.last_router_layer = last_router_layer
        self.dependent_launch = dependent_launch
        self.sequential = sequential
        self.forward_extend_of_backend = backend.forward_extend

    def install(self) -> None:
        """Replace `forward_extend` of this backend; prefill goes on to the one that was there."""
        self.backend.forward_extend = self.forward_extend

    def forward_extend(
        self,
        layer: Any,
        forward_batch: Any,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As SGLang's: outputs [1, rows, HV, V] of the packed rows of all requests."""
        if not compat.is_verification(forward_batch):
            return self.forward_extend_of_backend(
                layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs
            )
        return self.verify(layer, mixed_qkv, a, b, rows=forward_batch.spec_info.draft_token_num)

    def verify(
        self, layer: Any, mixed_TC: torch.Tensor, a_TH: torch.Tensor, b_TH: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """Conv and GDN of one layer; keeps raw rows and factors for the commit.

        Args:
            mixed_TC: bf16 rows of all requests before the conv, `rows` of each request.
            a_TH, b_TH: gate and write-strength inputs.
        """
        metadata = self.backend.forward_metadata
        if metadata.retrieve_parent_token is not None:
            raise EngineRefusal(
                "a tree of drafts is to be verified; HYBRIDSPEC verifies one chain a request: set "
                "--speculative-eagle-topk 1"
            )
        batch = mixed_TC.shape[0] // rows
        index = self.buffers.index_of_layer[layer.layer_id]
        lengths_B = first_rows(
            self.round_state.router_rows_B
            if layer.layer_id <= self.last_router_layer
            else self.round_state.lengths_B,
            batch,
        )
        slots_B = metadata.mamba_cache_indices[:batch]
        pool = self.backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        rows_BTC = mixed_TC.view(batch, rows, -1)
        mixed_BTC = conv_verify(
            rows_BTC,
            pool.conv[0],
            layer.conv_weights,
            slots_B,
            lengths_B,
            bias_C=layer.bias,
            raw_out=self.buffers.raw_XRTC[index, :batch, :rows],
            dependent_launch=self.dependent_launch,
        )
        heads, value_dim = layer.num_v_heads, layer.head_v_dim
        out_BTHV = mixed_TC.new_empty(batch, rows, heads, value_dim)
        verify(
            mixed_BTC,
            a_TH.view(batch, rows, heads),
            b_TH.view(batch, rows, heads),
            layer.A_log,
            layer.dt_bias,
            pool.temporal,
            slots_B,
            lengths_B,
            self.buffers.factors,
            index,
            out_BTHV,
            key_heads=layer.num_k_heads,
            dependent_launch=self.dependent_launch,
            choice=SEQUENTIAL if self.sequential and batch == 1 else None,
        )
        return out_BTHV.view(1, batch * rows, heads, value_dim)


class StateCommit:
    """Moves states and conv windows of all GDN layers past the accepted rows, in one launch."""

    def __init__(self, backend: Any, buffers: VerifyBuffers) -> None:
        self.backend = backend
        pool = backend.req_to_token_pool.mamba_pool.mamba_cache
        self.state_XSHVK: torch.Tensor = pool.temporal
        self.windows = ConvWindows(pool.conv[0], buffers.raw_XRTC)
        self.factors = buffers.factors

    def install(self, hybrid: Any) -> None:
        """Replace `update_mamba_state_after_mtp_verify` of this hybrid backend."""
        hybrid.update_mamba_state_after_mtp_verify = self.update_mamba_state_after_mtp_verify

    def compile(self) -> None:
        """Launch for a request without a slot, which changes nothing.

        No graph holds the commit, so no capture compiles it before the first request does.
        """
        nothing = torch.full((1,), -1, dtype=torch.int32, device=self.state_XSHVK.device)
        self(nothing, nothing, 1)

    def __call__(
        self, commit_rows_B: torch.Tensor, state_slots_B: torch.Tensor, num_requests: int
    ) -> None:
        """Commit the first `num_requests` batch rows.

        Args:
            commit_rows_B: int32 rows to keep; 0 or less leaves state and window bit-identical.
            state_slots_B: int32 slots of the state pool; -1 is left alone.
        """
        commit(
            self.state_XSHVK,
            state_slots_B[:num_requests],
            commit_rows_B[:num_requests],
            self.factors,
            windows=self.windows,
        )

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: torch.Tensor | None,
        mamba_steps_to_track: torch.Tensor | None,
        model: Any,
    ) -> None:
        """As SGLang's, for a worker that commits by the index of the last accepted row."""
        del mamba_steps_to_track, model
        refuse_tracking(mamba_track_indices)
        num_requests = last_correct_step_indices.shape[0]
        commit_rows_B = (last_correct_step_indices + 1).to(torch.int32)
        slots_B = self.backend.forward_metadata.mamba_cache_indices
        self(commit_rows_B, slots_B, num_requests)


def refuse_tracking(mamba_track_indices: torch.Tensor | None) -> None:
    """Refuse slots for the radix cache from a worker that is not HYBRIDSPEC's.

    HYBRIDSPEC's takes its snapshots before its own commit (`prefix_snapshots`). DFLASH's, which
    calls this, never finds a boundary to take one at, and the cache would keep stale states.

    Raises:
        EngineRefusal: there are slots to track.
    """
    if mamba_track_indices is not None:
        raise EngineRefusal(
            "a worker that is not HYBRIDSPEC's asks for states of the radix cache "
            "(mamba_track_indices of update_mamba_state_after_mtp_verify), and its rows to take "
            "them at are wrong in SGLang 0.5.16: use --speculative-algorithm HYBRIDSPEC, or add "
            "--disable-radix-cache"
        )


def first_rows(column_B: torch.Tensor, batch: int) -> torch.Tensor:
    """The first rows of a column of the round.

    Raises:
        UsageError: the batch is larger than the round.
    """
    if batch > column_B.shape[0]:
        raise UsageError(
            f"a pass of {batch} requests with columns for {column_B.shape[0]}: make the RoundState "
            "for the largest batch, the size of SGLang's request pool"
        )
    return column_B[:batch]
