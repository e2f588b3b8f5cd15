"""Experts of a verify pass: correction behind the first router, masks behind all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybridspec.compat import sglang_0_5_16_target as compat
from hybridspec.errors import EngineRefusal, HybridSpecError, UsageError
from hybridspec.kernels.route_mask.route_mask import route_mask
from hybridspec.kernels.router.gate import MAX_ROWS as MAX_GATE_ROWS
from hybridspec.kernels.router.gate import allocate_partials, gate, takes
from hybridspec.kernels.router.router import fits, router
from hybridspec.kernels.select.correct import MAX_EXPERTS, RULES, correct
from hybridspec.kernels.small_moe.moe import Scratch, allocate_scratch, small_moe
from hybridspec.kernels.small_moe.tiles import MEASURED_ROWS
from hybridspec.sglang_plugin.round_state import BLOCK_SIZE, RoundState, TargetOptions
from hybridspec.sglang_plugin.target.gdn import first_rows
from hybridspec.sglang_plugin.target.launches import LaunchOptions
from hybridspec.sglang_plugin.target.scope import VerifyScope


class RoutedExperts:
    """Takes the place of `_forward_router_experts` of the blocks of one target.

    Inside the scope, rows at or past the length take the experts of their request's first row with
    weight 0: no further expert is read, and they stay finite. In a captured pass SGLang runs this
    on its second stream; everything here is launched on the current one.
    """

    def __init__(
        self,
        blocks: list[Any],
        scope: VerifyScope,
        round_state: RoundState,
        options: TargetOptions,
        launches: LaunchOptions,
    ) -> None:
        """Nothing is replaced yet; `install` does that.

        Raises:
            UsageError, EngineRefusal: options or blocks that do not fit.
        """
        self.blocks = blocks
        self.scope = scope
        self.round_state = round_state
        self.options = options
        self.launches = launches
        # Distinct experts of every prefix behind the first router, for telemetry.
        self.distinct_BL = torch.zeros(
            round_state.max_requests, BLOCK_SIZE, dtype=torch.int32, device=round_state.device
        )
        self._gate_weights: dict[int, torch.Tensor] = {}
        self._check()
        self.kept_XRK = self._routes_buffer() if launches.keep_routes else None
        self.forced_XRK = self._routes_buffer() if launches.force_routes else None
        self.scratch = self._make_scratch() if launches.small_moe else None
        self.partials = self._make_partials() if launches.fused_gate else None

    @property
    def corrects(self) -> bool:
        """Whether the first router may change lengths."""
        return self.options.correction != "off"

    @property
    def first_router_layer(self) -> int:
        """Layer id of the first block with experts, -1 without one."""
        return self.blocks[0].layer_id if self.blocks else -1

    def install(self) -> None:
        """Replace `_forward_router_experts` of every block, and what runs it beside the shared
        expert.
        """
        for place, block in enumerate(self.blocks):
            block._forward_router_experts = self._replacement(block, place)
            if self._takes_streams(block):
                block.forward_normal_dual_stream = self._two_streams(block)

    def _replacement(self, block: Any, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
        forward_router_experts = block._forward_router_experts

        def forward_masked(hidden_states: torch.Tensor) -> torch.Tensor:
            if not self.scope.active:
                return forward_router_experts(hidden_states)
            routes = self._route(block, place, hidden_states)
            if self.scratch is not None and hidden_states.shape[0] <= MEASURED_ROWS:
                ids_RK, weights_RK = routes.topk_ids, routes.topk_weights
                return self._small(block, hidden_states, ids_RK, weights_RK, self.scratch)
            if block.enable_shared_expert_fusion:
                routes = block._append_shared_to_topk_output(routes, hidden_states)
            return block.experts(hidden_states, routes)

        return forward_masked

    def _takes_streams(self, block: Any) -> bool:
        """Whether captured passes of a block have a second stream, and our experts on it."""
        second = getattr(block, "alt_stream", None)
        ours = self.scratch is not None and self.launches.own_streams
        return second is not None and ours and not compat.overlaps_lora()

    def _two_streams(self, block: Any) -> Callable[..., tuple[torch.Tensor, Any]]:
        """`forward_normal_dual_stream` without its copy of the input, where nothing overwrites it.

        The experts are launched first: they are the longer of the two.
        """
        forward_normal_dual_stream = block.forward_normal_dual_stream

        def forward_two_streams(
            hidden_states: torch.Tensor, use_fused_gate: bool = False
        ) -> tuple[torch.Tensor, Any]:
            small = self.scratch is not None and hidden_states.shape[0] <= MEASURED_ROWS
            if not (self.scope.active and small):
                return forward_normal_dual_stream(hidden_states, use_fused_gate=use_fused_gate)
            current, second = torch.cuda.current_stream(), block.alt_stream
            second.wait_stream(current)
            with torch.cuda.stream(second):
                routed = block._forward_router_experts(hidden_states)
            shared = block._forward_shared_experts(hidden_states, apply_gate=not use_fused_gate)
            current.wait_stream(second)
            return routed, shared

        return forward_two_streams

    def _route(self, block: Any, place: int, hidden_states: torch.Tensor) -> Any:
        """Routes of a block, of the kind its experts take, masked or corrected."""
        limit = self.options.num_layers_masked
        corrects = place == 0 and self.corrects
        masks = not corrects and (limit is None or place < limit)
        num_rows = hidden_states.shape[0]
        kept_RK = None if self.kept_XRK is None else self.kept_XRK[place, :num_rows]
        plain = compat.plain_router(block) if self.launches.fused_router else None
        router_logits = self._logits(block, hidden_states, fused=plain is not None)
        if plain is None or not fits(router_logits, plain.top_k):
            routes = block.topk(hidden_states, router_logits)
            if getattr(routes, "topk_ids", None) is None:
                raise EngineRefusal(
                    f"the router of layer {block.layer_id} gives {type(routes).__name__} without "
                    "expert ids, so no row can be masked: use --moe-runner-backend triton"
                )
        elif self.forced_XRK is not None:
            routes = self._fused(plain, router_logits)
        else:
            routes = self._fused(plain, router_logits, masks=masks, kept_RK=kept_RK)
            masks, kept_RK = False, None
        ids_RK, weights_RK = routes.topk_ids, routes.topk_weights
        if self.forced_XRK is not None:
            ids_RK.copy_(self.forced_XRK[place, :num_rows])
        if kept_RK is not None:
            kept_RK.copy_(ids_RK)
        if corrects:
            self._correct(block, ids_RK, weights_RK)
        elif masks:
            self._mask(ids_RK, weights_RK)
        return routes

    def _logits(self, block: Any, hidden_states: torch.Tensor, *, fused: bool) -> torch.Tensor:
        """[rows, experts], or its partial sums for the fused router of a small pass."""
        if fused and self.partials is not None and hidden_states.shape[0] <= MAX_GATE_ROWS:
            weight_EH = self._gate_weight(block)
            return gate(hidden_states, weight_EH, out=self.partials)
        return block.gate(hidden_states)[0]

    def _fused(
        self,
        plain: compat.PlainRouter,
        router_logits: torch.Tensor,
        *,
        masks: bool = False,
        kept_RK: torch.Tensor | None = None,
    ) -> Any:
        rows = self.round_state.block
        requests = router_logits.shape[-2] // rows
        ids_RK, weights_RK = router(
            router_logits,
            plain.top_k,
            renormalize=plain.renormalize,
            lengths_B=first_rows(self.round_state.lengths_B, requests) if masks else None,
            mode=self.launches.mask_mode,
            rows_per_request=rows,
            kept_RK=kept_RK,
        )
        return plain.routes(weights_RK, ids_RK, router_logits)

    def _mask(self, ids_RK: torch.Tensor, weights_RK: torch.Tensor) -> None:
        rows = self.round_state.block
        lengths_B = first_rows(self.round_state.lengths_B, ids_RK.shape[0] // rows)
        route_mask(
            ids_RK, weights_RK, lengths_B, mode=self.launches.mask_mode, rows_per_request=rows
        )

    def _correct(self, block: Any, ids_RK: torch.Tensor, weights_RK: torch.Tensor) -> None:
        """Final lengths of the round, and the first router's mask, in one launch."""
        state, options = self.round_state, self.options
        top_k = ids_RK.shape[1]
        batch = ids_RK.shape[0] // BLOCK_SIZE
        assert options.tables is not None
        correct(
            ids_RK.view(batch, BLOCK_SIZE, top_k),
            state.selection_of(batch),
            first_rows(state.caps_B, batch),
            options.tables,
            num_experts=block.num_experts,
            rule=options.correction,  # pyright: ignore[reportArgumentType]
            lookahead=options.lookahead,
            out=(state.lengths_B[:batch], self.distinct_BL[:batch]),
            mask=(self.launches.mask_mode, weights_RK.view(batch, BLOCK_SIZE, top_k)),
        )

    def _small(
        self,
        block: Any,
        hidden_states: torch.Tensor,
        ids_RK: torch.Tensor,
        weights_RK: torch.Tensor,
        scratch: Scratch,
    ) -> torch.Tensor:
        gate_up_EFH, down_EHI = self._weights(block)
        return small_moe(hidden_states, gate_up_EFH, down_EHI, ids_RK, weights_RK, scratch)

    def _weights(self, block: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights = compat.unquantised_weights(block)
        if weights is None or block.enable_shared_expert_fusion:
            raise EngineRefusal(
                f"small_moe with the experts of layer {block.layer_id}; it needs unquantised "
                "weights in SGLang's Triton runner and a shared expert of its own: leave small_moe "
                "off"
            )
        return weights

    def _make_scratch(self) -> Scratch:
        """Scratch for all layers; every block is tried on its shapes before the first capture."""
        scratch: Scratch | None = None
        for block in self.blocks:
            gate_up_EFH, down_EHI = self._weights(block)
            _, hidden, width = down_EHI.shape
            top_k = block.topk.topk_config.top_k
            device = down_EHI.device
            scratch = scratch or allocate_scratch(
                MEASURED_ROWS, top_k, width, device, hidden=hidden
            )
            try:
                small_moe(
                    torch.zeros(1, hidden, dtype=torch.bfloat16, device=device),
                    gate_up_EFH,
                    down_EHI,
                    torch.zeros(1, top_k, dtype=torch.int32, device=device),
                    torch.zeros(1, top_k, device=device),
                    scratch,
                )
            except HybridSpecError as error:
                raise EngineRefusal(
                    f"small_moe does not take layer {block.layer_id}: {error}; leave it off"
                ) from error
        if scratch is None:
            raise EngineRefusal("small_moe without experts in the model; leave it off")
        return scratch

    def _gate_weight(self, block: Any) -> torch.Tensor:
        """Of a gate that is a plain product, as it was before anything of it was replaced."""
        weight_EH = self._gate_weights.get(block.layer_id)
        if weight_EH is None:
            weight_EH = compat.plain_gate(block)
            if weight_EH is None:
                raise EngineRefusal(
                    f"the gate of layer {block.layer_id} is not a plain product; leave fused_gate "
                    "off"
                )
            self._gate_weights[block.layer_id] = weight_EH
        return weight_EH

    def _make_partials(self) -> torch.Tensor:
        """Partial sums for the gates of all layers, whose shapes are tried."""
        for block in self.blocks:
            weight_EH = self._gate_weight(block)
            row = torch.zeros(1, weight_EH.shape[1], dtype=torch.bfloat16, device=weight_EH.device)
            top_k = block.topk.topk_config.top_k
            if not (takes(row, weight_EH) and fits(allocate_partials(weight_EH), top_k)):
                raise EngineRefusal(
                    f"the gate of layer {block.layer_id} is {weight_EH.dtype} "
                    f"{tuple(weight_EH.shape)} with top {top_k}, which kernels/router does not "
                    "take; leave fused_gate off"
                )
        return allocate_partials(self._gate_weight(self.blocks[0]))

    def _routes_buffer(self) -> torch.Tensor:
        """Experts of every layer and row of the largest batch, int32 [blocks, rows, top_k]."""
        if not self.blocks:
            raise EngineRefusal("routes of a model without experts; leave keep and force off")
        top_k = self.blocks[0].topk.topk_config.top_k
        rows = self.round_state.max_requests * self.round_state.block
        return torch.zeros(
            len(self.blocks), rows, top_k, dtype=torch.int32, device=self.round_state.device
        )

    def _check(self) -> None:
        rule = self.options.correction
        if rule not in RULES:
            raise UsageError(f"correction {rule!r} is unknown; take one of {', '.join(RULES)}")
        for block in self.blocks:
            if getattr(block.experts, "moe_ep_size", 1) > 1:
                raise EngineRefusal(
                    "experts are distributed over ranks; masked rows take the experts of their "
                    "request's first row, which another rank may hold: set --ep-size 1"
                )
        if not self.corrects:
            return
        if self.options.tables is None:
            raise UsageError(
                f"correction {rule!r} without tables to price experts with: load a bundle with "
                "routing tables, or set it to 'off'"
            )
        if not self.blocks or self.blocks[0].num_experts > MAX_EXPERTS:
            found = self.blocks[0].num_experts if self.blocks else "no"
            raise EngineRefusal(
                f"correction {rule!r} with {found} experts in the first layer that has any; it "
                f"counts up to {MAX_EXPERTS}: set it to 'off'"
            )
