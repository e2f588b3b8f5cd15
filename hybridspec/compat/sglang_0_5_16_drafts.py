"""Draft tokens and lengths of SGLang 0.5.16's drafter: the sampler in its graph, and its logits."""

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.dflash_worker_v2 import _DflashDraftSampler

from hybridspec.errors import EngineRefusal
from hybridspec.kernels.select.tables import BLOCK_SIZE
from hybridspec.sglang_plugin.draft_lengths import DraftLengths


class LengthSampler(_DflashDraftSampler):
    """Draft tokens as DFLASH takes them, and the lengths of the round, in the drafter's graph.

    Args:
        stock: the sampler that it stands in for.
        drafts: what reads the logits.

    Attributes:
        positions: of the rows that are captured next; the hook before the sampler's sets it.
    """

    def __init__(self, stock: _DflashDraftSampler, drafts: DraftLengths) -> None:
        self.__dict__.update(vars(stock))
        self.drafts = drafts
        self.out = drafts.tokens_R
        self.positions: torch.Tensor | None = None

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> None:
        """Hidden states of whole blocks, [B * 16, H]; the anchor's are not read."""
        width = hidden_states.shape[-1]
        rows = hidden_states.view(-1, BLOCK_SIZE, width)[:, 1:].reshape(-1, width)
        assert self.positions is not None
        self.drafts(draft_logits(rows, self.weight, self.num_org), self.positions)

    def remember_positions(
        self, runner: Any, out: Any, forward_batch: Any, num_tokens: int
    ) -> None:
        """Hook of the drafter's graph: its static buffer of positions."""
        del runner, out
        self.positions = forward_batch.positions[:num_tokens]


def draft_logits(hidden_RH: torch.Tensor, weight_VH: torch.Tensor, vocab: int) -> torch.Tensor:
    """Logits of drafts over this rank's columns, as DFLASH computes them."""
    if hidden_RH.dtype != weight_VH.dtype:
        hidden_RH = hidden_RH.to(weight_VH.dtype)
    return torch.matmul(hidden_RH, weight_VH[:vocab].T)


def vocabulary_of(model: Any, ranks: int) -> tuple[torch.Tensor, int, int]:
    """Weight of the target's head, its real columns on this rank, and the id of the first.

    Raises:
        EngineRefusal: a head whose logits cannot be read that way.
    """
    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if weight is None or not torch.is_floating_point(weight):
        raise EngineRefusal(
            f"the target's lm_head is a {type(head).__name__} without a floating-point weight; "
            "drafts are taken from it: serve a target whose head is not quantised"
        )
    shard = getattr(head, "shard_indices", None)
    if shard is None:
        if ranks > 1:
            raise EngineRefusal(
                "the target's lm_head does not say which columns this rank holds: set --tp-size 1"
            )
        return weight, int(weight.shape[0]), 0
    if int(shard.num_added_elements) != 0:
        raise EngineRefusal(
            f"the target's lm_head has {shard.num_added_elements} added columns; drafts are of the "
            "original vocabulary: merge them into the checkpoint"
        )
    return weight, int(shard.num_org_elements), int(shard.org_vocab_start_index)
