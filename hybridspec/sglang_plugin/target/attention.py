"""Attention of a round's blocks: the target's verification and the drafter's block pass.

Takes the place of two methods of one instance of SGLang's Triton backend. Everything but passes
over blocks goes on to the methods that were there.

Tables of slots are read while the graph runs, and SGLang lets its scheduler write them once a
graph has been launched. What it writes then is positions behind the block, or rows of requests
that have ended, whose results it drops, or with a radix cache a prefix that another request has
filed too, whose keys and values are of the same tokens; entries are valid slots before and after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridspec.compat import sglang_0_5_16_attention as compat
from hybridspec.compat.sglang_0_5_16_target import is_verification
from hybridspec.kernels.block_attention.attention import Scratch, attend
from hybridspec.sglang_plugin.round_state import BLOCK_SIZE, RoundState
from hybridspec.sglang_plugin.target.gdn import first_rows
from hybridspec.sglang_plugin.target.launches import LaunchOptions

logger = logging.getLogger(__name__)

# Lengths of the rows of a batch at a layer, by layer id and batch.
Lengths = Callable[[int, int], torch.Tensor]


class BlockAttention:
    """Attention of blocks in one backend.

    Attributes:
        served: sizes of batches that a pass ran or was captured with here.
        left: sizes with any layer that was left to SGLang's kernel; its metadata is kept up to
            date in their graphs.
    """

    def __init__(
        self,
        backend: Any,
        causal_of_layer: Mapping[int, bool],
        scratch: Scratch,
        *,
        lengths: Lengths | None,
        dependent_launch: bool,
    ) -> None:
        """Nothing is replaced yet; `install` does that.

        Args:
            backend: SGLang's `TritonAttnBackend`.
            causal_of_layer: layers that are served, and whether a row sees the rows behind it.
            lengths: None: every row counts.
        """
        self.backend = backend
        self.causal_of_layer = dict(causal_of_layer)
        self.scratch = scratch
        self.lengths = lengths
        self.dependent_launch = dependent_launch
        self.served: set[int] = set()
        self.left: set[int] = set()
        self.forward_extend_of_backend = backend.forward_extend
        self.out_graph_of_backend = backend.init_forward_metadata_out_graph
        # A kernel launch is nothing to trace, as in the backend itself.
        self.attend: Any = torch.compiler.disable(attend)

    def install(self) -> None:
        """Replace `forward_extend` and `init_forward_metadata_out_graph` of this backend."""
        self.backend.forward_extend = self.forward_extend
        self.backend.init_forward_metadata_out_graph = self.init_forward_metadata_out_graph

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As SGLang's: attention of the packed rows of all requests, [rows, heads x D]."""
        if is_verification(forward_batch):
            batch = int(forward_batch.batch_size)
            if (
                k is not None
                and v is not None
                and save_kv_cache
                and not any(value is not None for value in kwargs.values())
                and self._serves(q, layer, forward_batch, batch)
            ):
                self.served.add(batch)
                return self._attend(q, k, v, layer, forward_batch, batch)
            self.left.add(batch)
        return self.forward_extend_of_backend(
            q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """As SGLang's; before the replay of a graph that reads none of it, nothing."""
        batch = int(forward_batch.batch_size)
        if (
            not in_capture
            and is_verification(forward_batch)
            and batch in self.served
            and batch not in self.left
        ):
            return
        self.out_graph_of_backend(forward_batch, in_capture=in_capture)

    def _serves(self, q: torch.Tensor, layer: Any, forward_batch: Any, batch: int) -> bool:
        return (
            layer.layer_id in self.causal_of_layer
            and batch <= self.scratch.batch
            and q.shape[0] == batch * BLOCK_SIZE
            and forward_batch.req_pool_indices.shape[0] == batch
            and not compat.masks(self.backend, forward_batch)
            and q.dtype == compat.caches(layer, self.backend)[0].dtype
        )

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        batch: int,
    ) -> torch.Tensor:
        compat.save_rows(self.backend, layer, forward_batch, k, v)
        keys_SGD, values_SGD = compat.caches(layer, self.backend)
        heads = (layer.tp_q_head_num, layer.qk_head_dim)
        out = compat.out_of(forward_batch, q)
        self.attend(
            q.view(-1, *heads),
            keys_SGD,
            values_SGD,
            self.backend.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self.scratch,
            out.view(-1, *heads),
            scale=layer.scaling,
            causal=self.causal_of_layer[layer.layer_id],
            lengths_B=None if self.lengths is None else self.lengths(layer.layer_id, batch),
            dependent_launch=self.dependent_launch,
        )
        return out


def install_target_attention(
    model_runner: Any,
    round_state: RoundState,
    *,
    last_router_layer: int,
    launches: LaunchOptions,
    enabled: bool,
) -> BlockAttention | None:
    """Verify the blocks of a target here where its backend and layers allow it; never refuses.

    Args:
        last_router_layer: layers up to this id run the rows that the first router sees, later ones
            the final length; -1 without a correction.
        enabled: the key of the configuration.
    """

    def lengths(layer_id: int, batch: int) -> torch.Tensor:
        column = (
            round_state.router_rows_B if layer_id <= last_router_layer else round_state.lengths_B
        )
        return first_rows(column, batch)

    return _install("target", model_runner, round_state, lengths, launches, enabled)


def install_drafter_attention(
    model_runner: Any, round_state: RoundState, *, enabled: bool
) -> BlockAttention | None:
    """The same for the block pass of a drafter; all rows of a block are drafted."""
    return _install("drafter", model_runner, round_state, None, LaunchOptions(), enabled)


def _install(
    name: str,
    model_runner: Any,
    round_state: RoundState,
    lengths: Lengths | None,
    launches: LaunchOptions,
    enabled: bool,
) -> BlockAttention | None:
    def off(reason: str) -> None:
        logger.info("HYBRIDSPEC block attention of the %s: off, %s.", name, reason)

    if not enabled:
        return off("block_attention is false")
    backend = compat.full_attention_backend(model_runner)
    reason = compat.backend_does_not_fit(backend, BLOCK_SIZE)
    if reason is not None:
        return off(reason)
    layers = compat.attention_layers(model_runner.model)
    forms = {layer.layer_id: compat.form_of(layer, backend) for layer in layers}
    causal_of_layer = {layer: form for layer, form in forms.items() if isinstance(form, bool)}
    left = sorted({form for form in forms.values() if isinstance(form, str)})
    shapes = {(layer.tp_q_head_num, layer.qk_head_dim) for layer in layers}
    if not causal_of_layer:
        return off(f"layers have {', '.join(left)}" if left else "it has no attention layers")
    if len(shapes) > 1:
        return off(f"layers differ in their shape: {sorted(shapes)}")
    ((heads, dim),) = shapes
    device = round_state.device
    scratch = Scratch.allocate(round_state.max_requests, BLOCK_SIZE, heads, dim, device)
    attention = BlockAttention(
        backend,
        causal_of_layer,
        scratch,
        lengths=lengths,
        dependent_launch=launches.dependent_on(device),
    )
    attention.install()
    logger.info(
        "HYBRIDSPEC block attention of the %s: on for %d of %d layers%s, %.0f MiB of scratch.",
        name,
        len(causal_of_layer),
        len(layers),
        f" (others have {', '.join(left)})" if left else "",
        scratch.num_bytes / (1 << 20),
    )
    return attention
