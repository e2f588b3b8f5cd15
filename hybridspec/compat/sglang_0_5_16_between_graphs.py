"""Steps of HYBRIDSPEC between the two graphs of a round of SGLang 0.5.16, where launches count.

The host queues a round ahead, so the device goes from launch to launch; every one that is left out,
shortened or moved beside others makes the round shorter. What is computed stays the same.

| step of DFLASH | here |
|---|---|
| argmax over whole rows of logits | rows below the length alone; drafts end there in the same launch |
| commit of states, in line | beside the append and the drafter, in captured launches |
| append to the drafter's caches, in line, a writer a layer | beside the next round's start, one writer |
| slots of states copied into the target's graph | only if the batch is another |
| tokens of the block copied into the target's graph | the block lies there |
| rotary positions of three axes behind the drafter | of text, before it |
"""  # noqa: E501

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hybridspec.compat.sglang_0_5_16_drafter_cache import DrafterCaches
from hybridspec.compat.sglang_0_5_16_logits import GreedyChoice
from hybridspec.compat.sglang_0_5_16_rotary_positions import RotaryPositions
from hybridspec.compat.sglang_0_5_16_state_metadata import StateMetadata
from hybridspec.compat.sglang_0_5_16_target import gdn_backend
from hybridspec.kernels.select.tables import BLOCK_SIZE
from hybridspec.sglang_plugin.commit_graphs import CommitGraphs
from hybridspec.sglang_plugin.rounds import Rounds
from hybridspec.sglang_plugin.side_stream import SideStream
from hybridspec.sglang_plugin.target.install import InstalledTarget


@dataclass(frozen=True)
class BetweenOptions:
    """Which steps are HYBRIDSPEC's; without one of them DFLASH's own runs.

    Attributes:
        split_argmax: choices of the target in rows below the length alone.
        commit_beside: states are committed on a second stream.
        append_at_once: all caches of the drafter in one launch.
        append_beside: the append runs on a second stream.
        hold_slots: slots of states are written when the batch changes.
        block_in_place: the block's tokens lie in the buffer of the target's graph.
        early_positions: rotary positions of three axes are written before the drafter runs.
    """

    split_argmax: bool = True
    commit_beside: bool = True
    append_at_once: bool = True
    append_beside: bool = True
    hold_slots: bool = True
    block_in_place: bool = True
    early_positions: bool = True


class BetweenGraphs:
    """The steps of one worker; made when its graphs have been captured.

    Args:
        worker: a `DFlashWorkerV2` with its graphs.
        rounds: of that worker.

    Attributes:
        commits: the worker commits states where it appends, which is behind acceptance too.
    """

    def __init__(self, worker: Any, rounds: Rounds, options: BetweenOptions | None = None) -> None:
        options = options or BetweenOptions()
        state, runner = rounds.state, worker.model_runner
        target_graphs = runner.decode_cuda_graph_runner
        self._rounds = rounds
        self._choice: GreedyChoice | None = None
        self._caches: DrafterCaches | None = None
        self._slots: StateMetadata | None = None
        self.commits = False
        self._appends: SideStream | None = None
        # Positions and slots of the block, of this round and of the one before.
        self._other: tuple[torch.Tensor, torch.Tensor] | None = None
        self._tokens_T: torch.Tensor | None = None
        if options.split_argmax:
            self._choice = GreedyChoice(state)
            self._choice.compile(int(runner.model_config.vocab_size))
        if options.append_at_once:
            self._caches = DrafterCaches.of(worker.draft_model_runner, worker._fused_kv_helper)
        if options.append_beside and not worker.use_compact_draft_cache:
            # The drafter waits for the append; the commit has time.
            self._appends = SideStream(state.device, urgent=True)
        positions = RotaryPositions.of(runner) if options.early_positions else None
        if positions is not None:
            positions.install()
        if self._appends is not None or positions is not None:
            join_before_passes(worker.draft_model_runner, self._appends, positions)
        if options.block_in_place and target_graphs is not None:
            self._tokens_T = target_graphs.buffers.input_ids
        if not isinstance(rounds.target, InstalledTarget):
            return
        # DFLASH copies the sequence lengths before every pass for a commit that is not ours.
        worker._need_mamba_verify_commit = False
        self.commits = True
        if options.hold_slots:
            self._slots = StateMetadata(gdn_backend(runner)[1])
            self._slots.install()
        stream = rounds.side.stream
        if options.commit_beside and stream is not None and target_graphs is not None:
            rounds.commit_graphs = CommitGraphs(
                rounds.target.state_commit,
                state.commit_rows_B,
                state.state_slots_B,
                tuple(int(size) for size in worker.server_args.cuda_graph_config.decode.bs or ()),
                stream,
            )

    def join(self) -> None:
        """Before a pass of the target: everything beside the main stream is behind it."""
        self._rounds.join()
        if self._appends is not None:
            self._appends.join()

    def another_batch(self) -> None:
        """The batch is another one than in the round before, or its slots may be."""
        if self._slots is not None:
            self._slots.forget()
        if self._tokens_T is not None:
            # Ended drafts are no tokens, and a graph for more requests looks up every row.
            self._tokens_T.zero_()

    def place_block(self, worker: Any) -> None:
        """Behind `_ensure_draft_block_buffers`: buffers of this round.

        The append of the round before may still read positions and slots, so there are two of
        each. The block's tokens come to lie in the target's graph, where there is room.
        """
        mine = worker._draft_block_positions_buf, worker._draft_verify_out_cache_loc_buf
        if self._appends is not None:
            other = self._other
            if other is None or other[0].shape != mine[0].shape:
                other = torch.empty_like(mine[0]), torch.empty_like(mine[1])
            worker._draft_block_positions_buf, worker._draft_verify_out_cache_loc_buf = other
            self._other = mine
        rows = worker._draft_block_ids_buf.shape[0]
        if self._tokens_T is not None and self._tokens_T.numel() >= rows * BLOCK_SIZE:
            # The drafter's input is read before its drafts are written, so one buffer is enough.
            block = self._tokens_T[: rows * BLOCK_SIZE].view(rows, BLOCK_SIZE)
            worker._draft_block_ids_buf = worker._draft_block_tokens_buf = block

    def offer(self, output: Any, candidates_BT: torch.Tensor) -> bool:
        """Behind the target's pass of a greedy batch: the choice that ends drafts at the length.

        Returns:
            False: they have to be ended otherwise.
        """
        return self._choice is not None and self._choice.offer(output, candidates_BT)

    def taken(self, output: Any) -> None:
        """Behind the round."""
        if self._choice is not None:
            self._choice.taken(output)

    def appending(self, *read: torch.Tensor) -> AbstractContextManager[None]:
        """Around the append of a round, which reads these tensors."""
        return nullcontext() if self._appends is None else self._appends.beside(*read)

    def append(
        self,
        hidden_TH: torch.Tensor,
        positions_T: torch.Tensor,
        places_BR: torch.Tensor | None,
        commit_rows_B: torch.Tensor | None,
    ) -> bool:
        """Append committed rows to the drafter's caches; False: that is the engine's matter."""
        if self._caches is None or places_BR is None or commit_rows_B is None:
            return False
        self._caches.append(hidden_TH, positions_T, places_BR, commit_rows_B)
        return True


def join_before_passes(
    runner: Any, side: SideStream | None, positions: RotaryPositions | None = None
) -> None:
    """Every pass of a model runner goes behind what runs on `side`, and behind positions.

    Where a captured graph will run the pass, its inputs are copied first and the graph alone waits.

    Args:
        runner: of the drafter, with its graphs.
        side: None: nothing to wait for.
        positions: written for the target in the meantime.
    """

    def join() -> None:
        if side is not None:
            side.join()

    forward, graphs = runner.forward, runner.decode_cuda_graph_runner
    backend = None if graphs is None else graphs.backend
    if backend is not None:
        replay = backend.replay

        def joined_replay(*args: Any, **kwargs: Any) -> Any:
            join()
            return replay(*args, **kwargs)

        backend.replay = joined_replay

    def joined_forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if positions is not None:
            positions.write(forward_batch.positions)
        now = runner.decode_cuda_graph_runner
        # The runner asks the same, and graphs that were made anew later do not wait by themselves.
        replays = (
            now is not None
            and now is graphs
            and now.backend is backend
            and forward_batch.forward_mode.is_cuda_graph()
            and now.can_run_graph(forward_batch)
        )
        if not replays:
            join()
        return forward(forward_batch, *args, **kwargs)

    runner.forward = joined_forward
