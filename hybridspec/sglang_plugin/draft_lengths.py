"""From the drafter's logits to the tokens of the block and its length, inside the drafter's graph.

Logits -> features of each draft (one pass) -> hazards -> select -> forced lengths and lookahead.
Every buffer is allocated once for the largest batch, so the tail can be captured for any batch size
and replayed. With tensor parallelism each rank holds a shard of the vocabulary: ranks gather one
part a row, five numbers, and merge them in rank order, so all get the same bits and the same length.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.draft_features.features import draft_features, row_parts
from hybridspec.kernels.draft_features.rows import NUM_FIELDS, DraftFeatures
from hybridspec.kernels.draft_features.shards import merge_shards
from hybridspec.kernels.draft_features.split import TILING, Tiling, Workspace
from hybridspec.kernels.round_control.finish import finish_lengths
from hybridspec.kernels.select.select import select
from hybridspec.sglang_plugin.hazard_history import HazardHistory
from hybridspec.sglang_plugin.policy import DevicePolicy
from hybridspec.sglang_plugin.round_state import NUM_DRAFTS, RoundState


class DraftLengths:
    """Tail of the drafter's graph.

    Args:
        state: columns that are read and written.
        policy: what chooses.
        vocab: real columns of this rank's logits.
        vocab_start: token id of the first one.
        dtype: of the logits.
        history: hazards from trees, None without.
        tp_group: SGLang's group of the ranks that share the vocabulary, None for one rank.
        tiling: of the pass over the logits.

    Attributes:
        tokens_R: int64 [B * 15], drafts of the round.
        features: of the same rows.
    """

    def __init__(
        self,
        state: RoundState,
        policy: DevicePolicy,
        *,
        vocab: int,
        vocab_start: int,
        dtype: torch.dtype,
        history: HazardHistory | None = None,
        tp_group: Any = None,
        tiling: Tiling = TILING,
    ) -> None:
        self._state = state
        self._policy = policy
        self._vocab = vocab
        self._vocab_start = vocab_start
        self._history = history
        self._tp_group = tp_group
        self._ranks = 1 if tp_group is None else int(tp_group.world_size)
        if self._ranks == 1 and vocab_start != 0:
            raise UsageError(f"one rank holds the vocabulary from id {vocab_start} on; expected 0")
        rows = state.max_requests * NUM_DRAFTS
        self.features = DraftFeatures.empty(rows, state.device)
        self.tokens_R = self.features.tokens_R
        self._tiling = tiling
        self._workspace = Workspace.create(rows, vocab, dtype, state.device, tiling=tiling)
        if self._ranks > 1:
            self._parts = torch.empty(rows * NUM_FIELDS, device=state.device)
            self._gathered = torch.empty(self._ranks * rows * NUM_FIELDS, device=state.device)

    def __call__(self, logits_RV: torch.Tensor, positions_T: torch.Tensor) -> None:
        """Write drafts, selection and lengths of a batch.

        Args:
            logits_RV: [B * 15, >= vocab], this rank's columns.
            positions_T: int64 [B * 16], positions of the blocks' rows.
        """
        state = self._state
        requests = logits_RV.shape[0] // NUM_DRAFTS
        features = self._read(logits_RV)
        context_B = state.context_B[:requests]
        context_B.copy_(positions_T.view(requests, state.block)[:, 0])
        selection = state.selection_of(requests)
        caps_B = state.caps_B[:requests]
        tables = self._policy.tables
        if tables is not None:
            p1_BD, p2_BD, entropy_BD = (
                column.view(requests, NUM_DRAFTS)
                for column in (features.p1_R, features.p2_R, features.entropy_R)
            )
            hazards_BD = None
            if self._history is not None:
                drafts_BD = features.tokens_R.view(requests, NUM_DRAFTS)
                hazards_BD = self._history.hazards(
                    p1_BD, p2_BD, entropy_BD, drafts_BD, state.history_slots_B[:requests]
                )
            select(
                p1_BD,
                p2_BD,
                entropy_BD,
                context_B,
                caps_B,
                state.batch_size,
                tables,
                lam_B=state.lam_B[:requests],
                hazards_BD=hazards_BD,
                out=selection,
            )
        finish_lengths(
            selection.lengths_B,
            selection.fallback_B,
            caps_B,
            state.forced_B[:requests],
            lookahead=self._policy.lookahead,
            out=(state.lengths_B[:requests], state.router_rows_B[:requests]),
            fixed_length=self._policy.fixed_length if tables is None else 0,
        )

    def _read(self, logits_RV: torch.Tensor) -> DraftFeatures:
        rows = logits_RV.shape[0]
        features = DraftFeatures(*(column[:rows] for column in vars(self.features).values()))
        if self._ranks == 1:
            return draft_features(
                logits_RV,
                vocab=self._vocab,
                out=features,
                workspace=self._workspace,
                tiling=self._tiling,
            )
        parts = self._parts[: rows * NUM_FIELDS]
        row_parts(
            logits_RV,
            vocab=self._vocab,
            vocab_offset=self._vocab_start,
            out=parts.view(rows, NUM_FIELDS),
            workspace=self._workspace,
            tiling=self._tiling,
        )
        gathered = self._gathered[: self._ranks * rows * NUM_FIELDS]
        self._tp_group.all_gather_into_tensor(gathered, parts)
        return merge_shards(gathered.view(self._ranks, rows, NUM_FIELDS), out=features)
