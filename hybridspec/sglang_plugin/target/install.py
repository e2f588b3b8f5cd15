"""Puts the target half into one model runner of SGLang: instances are patched, no class is.

To be called between the making of the target's attention backend and the capture of its graphs,
which is `init_attention_backends` of the worker.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hybridspec.compat import sglang_0_5_16_target as compat
from hybridspec.errors import EngineRefusal
from hybridspec.kernels.small_moe.tiles import MEASURED_ROWS
from hybridspec.sglang_plugin.prefix_snapshots import PrefixSnapshots
from hybridspec.sglang_plugin.round_state import RoundState, TargetOptions
from hybridspec.sglang_plugin.target.attention import BlockAttention, install_target_attention
from hybridspec.sglang_plugin.target.buffers import VerifyBuffers
from hybridspec.sglang_plugin.target.experts import RoutedExperts
from hybridspec.sglang_plugin.target.gdn import GdnVerification, StateCommit
from hybridspec.sglang_plugin.target.launches import LaunchOptions
from hybridspec.sglang_plugin.target.linears import install_projections
from hybridspec.sglang_plugin.target.memory import MemoryReport
from hybridspec.sglang_plugin.target.scope import VerifyScope

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InstalledTarget:
    """The target half of one worker; what `round_state.TargetHalf` asks for.

    Attributes:
        memory: what verification keeps in place of SGLang's snapshots.
        attention: of full-attention layers; None: SGLang's kernels.
        snapshots: of states for the radix cache; None: there is none.
    """

    verification: GdnVerification
    state_commit: StateCommit
    experts: RoutedExperts
    scope: VerifyScope
    memory: MemoryReport
    attention: BlockAttention | None
    snapshots: PrefixSnapshots | None

    def commit(
        self, commit_rows_B: torch.Tensor, state_slots_B: torch.Tensor, num_requests: int
    ) -> None:
        """Move state and conv window of every GDN layer past the committed rows. One launch.

        Args:
            commit_rows_B: int32 rows to keep of each batch row, at most the length that was
                verified; 0 or less leaves everything bit-identical.
            state_slots_B: int32 slots of SGLang's state pool; -1 is left alone.
            num_requests: batch rows, without those that pad a graph.
        """
        self.state_commit(commit_rows_B, state_slots_B, num_requests)

    def capture_scope(self) -> AbstractContextManager[None]:
        """On in every verify pass; `forward` of the target enters it too, so captures have it."""
        return self.scope.entered()


def install_target(
    model_runner: Any,
    round_state: RoundState,
    options: TargetOptions,
    *,
    launches: LaunchOptions | None = None,
    block_attention: bool = True,
    skinny_linear: bool = True,
    track_interval: int | None = None,
) -> InstalledTarget:
    """Patch the instances of one target: attention backends, experts and `forward` of the model.

    Args:
        model_runner: of the target, with pools and attention backend, without graphs.
        round_state: for at least as many requests as SGLang's request pool has.
        options: of the correction.
        launches: how kernels are launched.
        block_attention: whether full-attention layers verify in kernels of our own where they can.
        skinny_linear: whether projections do, where their shapes have tiles.
        track_interval: tokens between two states that the radix cache keeps; None: it keeps none.

    Raises:
        EngineRefusal: something in the engine that the kernels cannot serve.
        UsageError: options that do not fit together.
    """
    launches = launches or LaunchOptions()
    hybrid, backend = compat.gdn_backend(model_runner)
    request_pool = model_runner.req_to_token_pool
    buffers = _buffers_of(request_pool)
    _check_pool(request_pool, buffers, round_state, track_interval)
    layers = compat.linear_attention_layers(model_runner.model)
    _check_layers(layers, buffers)

    scope = VerifyScope()
    blocks = [
        block
        for block in compat.expert_blocks(model_runner.model)
        if not getattr(block, "is_nextn", False)
    ]
    experts = RoutedExperts(blocks, scope, round_state, options, launches)
    last_router_layer = experts.first_router_layer if experts.corrects else -1
    verification = GdnVerification(
        backend,
        buffers,
        round_state,
        last_router_layer=last_router_layer,
        dependent_launch=launches.dependent_on(round_state.device),
        sequential=launches.sequential_gdn,
    )
    state_commit = StateCommit(backend, buffers)
    snapshots = None
    if track_interval is not None:
        snapshots = PrefixSnapshots(state_commit, track_interval, round_state.max_requests)
    # Nothing is replaced before everything has been checked.
    scope.watch(model_runner.model)
    experts.install()
    verification.install()
    state_commit.install(hybrid)
    attention = install_target_attention(
        model_runner,
        round_state,
        last_router_layer=last_router_layer,
        launches=launches,
        enabled=block_attention,
    )
    if skinny_linear:
        install_projections(model_runner.model, scope, round_state.device)
    if state_commit.state_XSHVK.is_cuda:
        state_commit.compile()
        if snapshots is not None:
            snapshots.compile()
    memory = request_pool.mamba_pool.hybridspec_memory
    logger.info(
        "HYBRIDSPEC target: %d GDN layers, %d layers of experts, correction %s, %s launch, "
        "experts %s; %s.",
        len(layers),
        len(blocks),
        options.correction,
        "dependent" if verification.dependent_launch else "plain",
        f"small_moe up to {MEASURED_ROWS} rows" if launches.small_moe else "of the engine",
        memory.sentence(),
    )
    return InstalledTarget(verification, state_commit, experts, scope, memory, attention, snapshots)


def _buffers_of(request_pool: Any) -> VerifyBuffers:
    pool = getattr(request_pool, "mamba_pool", None)
    buffers = getattr(pool, "hybridspec_buffers", None)
    if buffers is None:
        raise EngineRefusal(
            f"the state pool is a {type(pool).__name__} without buffers of HYBRIDSPEC; "
            "install_memory_patch must run before the pools of the target are allocated"
        )
    return buffers


def _check_pool(
    request_pool: Any,
    buffers: VerifyBuffers,
    round_state: RoundState,
    track_interval: int | None,
) -> None:
    if request_pool.enable_mamba_extra_buffer_lazy:
        raise EngineRefusal(
            "the radix cache gets a slot for a state only where the text passes a boundary, which "
            "the host cannot tell of a round: use --mamba-radix-cache-strategy extra_buffer"
        )
    if request_pool.enable_mamba_extra_buffer != (track_interval is not None):
        raise EngineRefusal(
            f"the pool has slots for states of the radix cache: "
            f"{request_pool.enable_mamba_extra_buffer}, and snapshots are taken every "
            f"{track_interval} tokens; without both the cache keeps stale states: pass "
            "track_interval with --mamba-radix-cache-strategy extra_buffer alone"
        )
    if round_state.max_requests < request_pool.size or buffers.batch_rows < request_pool.size:
        raise EngineRefusal(
            f"columns for {round_state.max_requests} requests and buffers for "
            f"{buffers.batch_rows}; SGLang's request pool has {request_pool.size}: make the "
            "RoundState as large"
        )
    state = request_pool.mamba_pool.mamba_cache
    conv, temporal = state.conv[0], state.temporal
    fits = temporal.dtype in (torch.float32, torch.bfloat16) and conv.dtype == torch.bfloat16
    if not fits or not (conv.is_contiguous() and temporal.is_contiguous()):
        raise EngineRefusal(
            f"states are {temporal.dtype} and conv windows {conv.dtype} with strides "
            f"{temporal.stride()} and {conv.stride()}; the kernels take float32 or bfloat16 states "
            "and bfloat16 windows in contiguous pools: use --mamba-ssm-dtype float32 and leave "
            "--enable-page-major-kv-layout and SGLANG_MAMBA_CONV_DTYPE out"
        )


def _check_layers(layers: list[Any], buffers: VerifyBuffers) -> None:
    shape = buffers.shape
    ids = tuple(layer.layer_id for layer in layers)
    if ids != shape.layer_ids:
        raise EngineRefusal(
            f"the model has GDN layers {ids}, the state pool {shape.layer_ids}; every layer must "
            "be on this rank: set --pp-size 1"
        )
    for layer in layers:
        found = (layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        held = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim)
        if found != held or layer.num_q_heads != layer.num_k_heads:
            raise EngineRefusal(
                f"layer {layer.layer_id} has {found} key heads, value heads, K and V, the pool "
                f"{held}: heads must divide by --tp-size"
            )
        weights = layer.conv_weights
        if layer.activation != "silu" or weights.dtype != torch.bfloat16:
            raise EngineRefusal(
                f"the conv of layer {layer.layer_id} is {weights.dtype} with "
                f"{layer.activation}; the kernels take bfloat16 with silu: use --dtype bfloat16"
            )
