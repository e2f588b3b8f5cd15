"""The worker of HYBRIDSPEC in SGLang 0.5.16: the DFLASH worker with a length for every request.

The round stays DFLASH's. These small steps of it are ours:

| step | how |
|---|---|
| draft tokens and lengths | sampler inside the drafter's graph; without a graph in `_greedy_sample_from_vocab_parallel_head` |
| around the target's verify pass | the target worker's `forward_batch_generation`, on this instance |
| acceptance | unchanged; candidates and chain end at the length before it |
| choice of the target in every row | where acceptance takes the argmax of the logits |
| commit of recurrent states | before the append, beside it and the drafter; without our target `_update_target_mamba_state_after_verify` |
| states for the radix cache | ahead of that commit, in rounds that may pass a boundary; never DFLASH's |
| append to the drafter's caches | beside what follows, `_append_target_hidden_fused` in one launch |
| telemetry, recording | after the round |
"""  # noqa: E501

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative import dflash_utils
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from hybridspec import environ
from hybridspec.compat.sglang_0_5_16_between_graphs import BetweenGraphs, BetweenOptions
from hybridspec.compat.sglang_0_5_16_drafts import LengthSampler, draft_logits, vocabulary_of
from hybridspec.compat.sglang_0_5_16_prefix_states import expect, track_interval
from hybridspec.compat.sglang_0_5_16_recording import make_recorder, members_of
from hybridspec.compat.sglang_0_5_16_requests import refuse_wrong_requests
from hybridspec.compat.sglang_0_5_16_target import has_measured_experts
from hybridspec.errors import EngineRefusal, UsageError
from hybridspec.kernels.select.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.sglang_plugin import state_probe
from hybridspec.sglang_plugin.boot_check import BootCheck, start_check
from hybridspec.sglang_plugin.config import PluginConfig, read_config
from hybridspec.sglang_plugin.controls import LengthRequest, Row, length_request
from hybridspec.sglang_plugin.policy import DevicePolicy, fixed_policy, load_policy, report
from hybridspec.sglang_plugin.round_counters import RoundCounters
from hybridspec.sglang_plugin.round_recorder import RoundRecorder
from hybridspec.sglang_plugin.round_state import TargetOptions
from hybridspec.sglang_plugin.rounds import Rounds, default_lengths
from hybridspec.sglang_plugin.target.experts import RoutedExperts
from hybridspec.sglang_plugin.target.forced_routes import ForcedRoutes
from hybridspec.sglang_plugin.target.install import install_target
from hybridspec.sglang_plugin.target.launches import LaunchOptions, launch_options, switched

logger = logging.getLogger(__name__)


class HybridSpecWorker(DFlashWorkerV2):
    """DFLASH rounds that verify as many rows as pay, chosen on the device."""

    def __init__(
        self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any
    ) -> None:
        config = read_config()
        if config.target == "hybridspec":
            # Before the pools are made, which this patch makes without snapshots of states.
            from hybridspec.sglang_plugin.target.memory import install_memory_patch

            install_memory_patch()
        super().__init__(server_args, gpu_id, ps, nccl_port, target_worker)
        if self.block_size != BLOCK_SIZE:
            raise EngineRefusal(
                f"the drafter's blocks have {self.block_size} rows; lengths are chosen for blocks "
                f"of {BLOCK_SIZE}: use a drafter with block_size {BLOCK_SIZE}"
            )
        self.plugin_config: PluginConfig = config
        self.default_lengths: LengthRequest = default_lengths(config)
        self.rounds: Rounds | None = None
        self.recorder: RoundRecorder | None = None
        self.boot_check: BootCheck | None = None
        self.between: BetweenGraphs | None = None
        self._batch_requests = 0
        self._samples = False
        self.forced_routes: ForcedRoutes | None = None
        refuse_wrong_requests(
            self.default_lengths, records=config.record is not None, unreachable=self._unreachable
        )
        self._watch_verification(target_worker)

    def init_attention_backends(self) -> None:
        """As DFLASH, then everything that graphs will hold the addresses of."""
        super().init_attention_backends()
        runner = self.model_runner
        weight, vocab, vocab_start = vocabulary_of(runner.model, get_tp_group().world_size)
        policy = self._policy(weight.device)
        first = self.ps.tp_rank == 0
        if first:
            report(policy)
        pool = runner.req_to_token_pool
        most = max(
            int(runner.max_running_requests),
            int(pool.size),
            *(int(size) for size in self.server_args.cuda_graph_config.decode.bs or (1,)),
        )
        config = self.plugin_config
        self.rounds = Rounds(
            config,
            policy,
            max_requests=most,
            history_slots=int(pool.req_to_token.shape[0]),
            device=weight.device,
            counters=RoundCounters(
                weight.device,
                max_requests=most,
                path=config.telemetry if first else None,
                interval_s=config.telemetry_interval_s,
                about={"lengths": policy.note, "warnings": list(policy.warnings)},
            ),
        )
        group = get_tp_group()
        self.rounds.make_drafts(
            vocab=vocab,
            vocab_start=vocab_start,
            dtype=weight.dtype,
            tp_group=group if group.world_size > 1 else None,
        )
        if config.target == "hybridspec":
            small_moe = config.small_moe
            if small_moe is None:
                small_moe = has_measured_experts(runner.model)
            target = install_target(
                runner,
                self.rounds.state,
                TargetOptions(
                    correction=policy.correction,
                    lookahead=policy.lookahead,
                    tables=policy.tables,
                    num_layers_masked=config.masked_layers,
                ),
                launches=launch_options(
                    config.switches,
                    BetweenOptions,
                    small_moe=small_moe,
                    keep_routes=config.record_routes,
                ),
                block_attention=config.block_attention,
                skinny_linear=config.skinny_linear,
                track_interval=track_interval(self.server_args),
            )
            self.rounds.target, self.rounds.snapshots = target, target.snapshots
            self.forced_routes = self._force_routes(target.experts)
            from hybridspec.sglang_plugin.target.attention import install_drafter_attention

            install_drafter_attention(
                self.draft_model_runner, self.rounds.state, enabled=config.block_attention
            )
            if config.skinny_linear:
                from hybridspec.sglang_plugin.target.linears import install_drafter_projections

                install_drafter_projections(self.draft_model, weight.device)
        if config.record is not None and first:
            self.recorder = make_recorder(
                config, self.rounds, vars(self.server_args), dtype=self._dtype()
            )

    def init_cuda_graphs(self) -> None:
        """As DFLASH; the sampler that is captured is `_maybe_build_draft_sampler`'s."""
        super().init_cuda_graphs()
        rounds, config = self.rounds, self.plugin_config
        assert rounds is not None
        rounds.compile()
        options = BetweenOptions(**switched(BetweenOptions, config.switches, LaunchOptions))
        self.between = BetweenGraphs(self, rounds, options)
        if config.bundle is not None and config.self_check and self.ps.tp_rank == 0:
            self.boot_check = start_check(
                rounds.policy,
                rounds.counters,
                vars(self.server_args),
                bundle=config.bundle,
                max_length=config.max_length,
            )

    def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Any:
        """A prefill or a round, as the scheduler asks."""
        rounds = self.rounds
        assert rounds is not None
        if self.boot_check is not None:
            self.boot_check.before_batch(str(req.rid) for req in batch.reqs or ())
            if self.boot_check.done:
                self.boot_check = None
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = super().forward_batch_generation(batch, on_publish)
            rounds.prefilled(batch.req_pool_indices, result.next_token_ids)
            return result
        if batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish)
        reqs = batch.reqs
        self._batch_requests = len(reqs)
        self._samples = batch.sampling_info is not None and not batch.sampling_info.is_all_greedy
        another = rounds.begin(
            tuple((req.rid, req.req_pool_idx) for req in reqs),
            lambda: [self._row(req) for req in reqs],
            lambda: self._state_slots(batch.req_pool_indices),
        )
        if another and self.between is not None:
            self.between.another_batch()
        if another and self.forced_routes is not None:
            self.forced_routes.write([self._row(req).lengths for req in reqs])
        if rounds.snapshots is not None:
            expect(rounds.snapshots, batch)
        # Ranks hold different heads: one file of several ranks would compare nothing.
        if environ.state_digest() is not None and self.ps.tp_rank == 0:
            rounds.join()
            state_probe.watch(self, batch)
        result = super().forward_batch_generation(batch, on_publish)
        if self.between is not None:
            self.between.taken(result.logits_output)
        result.cap_lens = rounds.end(result.accept_lens, result.next_token_ids)
        if self.recorder is not None and (members := members_of(reqs)):
            self.recorder.add(
                members,
                self._draft_block_tokens_buf[: len(reqs), 0],
                result.logits_output.next_token_logits,
                result.accept_lens,
            )
        return result

    def _force_routes(self, experts: RoutedExperts) -> ForcedRoutes | None:
        """What fills the table of a server that routes by one, None of any other."""
        if experts.forced_XRK is None:
            return None
        if self.ps.tp_rank == 0:
            logger.warning(
                "HYBRIDSPEC: routes are forced, for measuring: answers are not the target's"
            )
        return ForcedRoutes(experts.forced_XRK, experts.blocks[0].num_experts)

    def _unreachable(self, lengths: LengthRequest) -> str | None:
        """Why the routes that a request asks for cannot be had here."""
        if not lengths.distinct_experts:
            return None
        if self.forced_routes is None:
            return (
                "custom_params.hybridspec.distinct_experts: routers choose experts here; it is for "
                "servers that are started to measure, with the switch force_routes"
            )
        try:
            self.forced_routes.check(lengths)
        except UsageError as error:
            return str(error)
        return None

    def _row(self, req: Any) -> Row:
        slot = int(req.req_pool_idx or 0)
        try:
            lengths = length_request(req.sampling_params.custom_params, self.default_lengths)
        except UsageError as error:
            # Refused when it arrived; one that came another way must not end the scheduler.
            logger.warning("HYBRIDSPEC: request %s: %s", req.rid, error)
            lengths = self.default_lengths
        return Row((req.rid, slot), slot, lengths)

    def _state_slots(self, req_pool_indices: torch.Tensor) -> torch.Tensor | None:
        pool = self.model_runner.req_to_token_pool
        if not hasattr(pool, "get_mamba_indices"):
            return None
        return pool.translate_mamba_indices(pool.get_mamba_indices(req_pool_indices))

    def _maybe_build_draft_sampler(self) -> LengthSampler | None:
        stock = super()._maybe_build_draft_sampler()
        if stock is None:
            return None
        assert self.rounds is not None
        assert self.rounds.drafts is not None
        sampler = LengthSampler(stock, self.rounds.drafts)
        # Hooks run in order, and the sampler's is appended after this returns.
        self.draft_model_runner.capture_tail_hooks.append(sampler.remember_positions)
        return sampler

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states: torch.Tensor, lm_head: Any, chunk_size: int = 256
    ) -> torch.Tensor:
        del lm_head, chunk_size
        assert self.rounds is not None
        assert self.rounds.drafts is not None
        weight, vocab, _ = vocabulary_of(self.model_runner.model, get_tp_group().world_size)
        requests = hidden_states.shape[0] // NUM_DRAFTS
        positions = self._draft_block_positions_buf[:requests].view(-1)
        self.rounds.drafts(draft_logits(hidden_states, weight, vocab), positions)
        return self.rounds.drafts.tokens_R[: hidden_states.shape[0]]

    def _update_target_mamba_state_after_verify(
        self, *, batch: Any, seq_lens_pre_verify: torch.Tensor, commit_lens: torch.Tensor
    ) -> None:
        assert self.rounds is not None
        if not self.rounds.commit(commit_lens):
            super()._update_target_mamba_state_after_verify(
                batch=batch, seq_lens_pre_verify=seq_lens_pre_verify, commit_lens=commit_lens
            )

    def _append_target_hidden_fused(
        self,
        ctx_hidden: torch.Tensor,
        ctx_positions: torch.Tensor,
        ctx_cache_loc: torch.Tensor,
        ctx_cache_loc_2d: torch.Tensor | None = None,
        commit_lens: torch.Tensor | None = None,
    ) -> None:
        if self.between is None or not self.between.append(
            ctx_hidden, ctx_positions, ctx_cache_loc_2d, commit_lens
        ):
            super()._append_target_hidden_fused(
                ctx_hidden, ctx_positions, ctx_cache_loc, ctx_cache_loc_2d, commit_lens
            )

    def _append_target_hidden_to_draft_kv_by_loc(
        self,
        *,
        target_hidden: torch.Tensor,
        cache_loc: torch.Tensor,
        positions: torch.Tensor,
        cache_loc_2d: torch.Tensor | None = None,
        commit_lens: torch.Tensor | None = None,
    ) -> None:
        append = functools.partial(
            super()._append_target_hidden_to_draft_kv_by_loc,
            target_hidden=target_hidden,
            cache_loc=cache_loc,
            positions=positions,
            cache_loc_2d=cache_loc_2d,
            commit_lens=commit_lens,
        )
        if self.between is None or commit_lens is None:
            append()
            return
        if self.between.commits:
            assert self.rounds is not None
            self.rounds.commit(commit_lens)
        # Only the drafter's next pass reads these caches.
        with self.between.appending(target_hidden, cache_loc, positions, commit_lens):
            append()

    def _ensure_draft_block_buffers(self, bs: int) -> None:
        super()._ensure_draft_block_buffers(bs)
        if self.between is not None:
            self.between.place_block(self)

    def _watch_verification(self, target_worker: Any) -> None:
        """Put the steps around the verify pass into this instance of the target's worker."""
        forward = target_worker.forward_batch_generation

        @functools.wraps(forward)
        def forward_batch_generation(*args: Any, **kwargs: Any) -> Any:
            # Every pass of the target goes through here. It reads and writes states, also where a
            # prefill clears or copies slots, so the last round's commit has to be behind it.
            if self.between is not None:
                self.between.join()
            if not kwargs.get("is_verify") or self.rounds is None:
                return forward(*args, **kwargs)
            with self.rounds.verifying():
                result = forward(*args, **kwargs)
            self._limit_acceptance(result.logits_output)
            return result

        target_worker.forward_batch_generation = forward_batch_generation

    def _limit_acceptance(self, output: Any) -> None:
        assert self.rounds is not None
        candidates = self._draft_block_tokens_buf[: self._batch_requests]
        between = None if self._samples else self.between
        if between is not None and between.offer(output, candidates):
            return
        chain = None
        if self._samples:
            # The chain that sampling walks is made once for each device and kept.
            chain = dflash_utils._get_or_create_chain_verify_buffers(
                bs=self._batch_requests, draft_token_num=BLOCK_SIZE, device=candidates.device
            )[1]
        self.rounds.limit(candidates, chain)

    def _policy(self, device: torch.device) -> DevicePolicy:
        config = self.plugin_config
        if config.bundle is None:
            return fixed_policy(config.fixed_length, "no bundle is configured")
        return load_policy(
            config.bundle,
            current=self._identities,
            device=device,
            fixed_length=config.fixed_length,
            correction=config.correction,
            lookahead=config.lookahead,
            use_trees=config.hazards == "auto",
            allow=config.allow,
        )

    def _dtype(self) -> str:
        return str(self.model_runner.model_config.dtype).removeprefix("torch.")

    def _identities(self, bundle: Any) -> tuple[Any, Any]:
        from sglang.version import __version__

        from hybridspec.sglang_plugin import identity

        server = vars(self.server_args)
        folders = identity.pair_of(server)
        dtype = self._dtype()
        properties = torch.cuda.get_device_properties(self.gpu_id)
        return (
            identity.engine_calibration_identity(folders, bundle.calibration.identity, dtype=dtype),
            identity.engine_cost_identity(
                server,
                folders,
                version=__version__,
                gpu_name=properties.name,
                multiprocessors=properties.multi_processor_count,
                torch_version=torch.__version__,
                max_batch=int(self.model_runner.max_running_requests),
                dtype=dtype,
                kernels=self.plugin_config.kernels,
            ),
        )
