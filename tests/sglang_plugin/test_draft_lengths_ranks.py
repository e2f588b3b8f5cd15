"""Two ranks with a shard of the vocabulary each choose as one rank with all of it, to the bit."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

pytest.importorskip("triton", reason="kernels need triton")

VOCAB, SHARDS = 96, (64, 32)


class Ranks:
    """The part of SGLang's group that the tail of the draft uses, over gloo."""

    world_size = len(SHARDS)

    def all_gather_into_tensor(self, output: torch.Tensor, own: torch.Tensor) -> None:
        dist.all_gather(list(output.chunk(self.world_size)), own)


def choose(logits: torch.Tensor, start: int, group: Any) -> dict[str, torch.Tensor]:
    """Lengths, survivals and tokens of two requests from these columns."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import policy_kit
    import select_kit

    from hybridspec.kernels.draft_features.split import Tiling
    from hybridspec.sglang_plugin.draft_lengths import DraftLengths
    from hybridspec.sglang_plugin.policy import DevicePolicy
    from hybridspec.sglang_plugin.round_state import RoundState

    tables = select_kit.packed(policy_kit.random_policy(3), torch.device("cpu"))
    policy = DevicePolicy(tables, None, (1, 4), (1e-3, 1e-3), 6, "off", 0, "")
    state = RoundState(4, "cpu")
    state.lam_B.fill_(1e-3)
    drafts = DraftLengths(
        state,
        policy,
        vocab=logits.shape[1],
        vocab_start=start,
        dtype=logits.dtype,
        tp_group=group,
        tiling=Tiling(vectors=1, num_warps=1),
    )
    drafts(logits.contiguous(), torch.arange(32))
    return {
        "lengths": state.lengths_B[:2].clone(),
        "tokens": drafts.tokens_R[:30].clone(),
        "survival": state.selection.survival_BL[:2].clone(),
    }


def all_logits() -> torch.Tensor:
    logits = torch.randn(30, VOCAB, generator=torch.Generator().manual_seed(7)) * 3
    # A tie across the shards goes to the lower id.
    logits[4, 10] = logits[4, 70] = 50.0
    return logits


def work(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=len(SHARDS),
        timeout=timedelta(seconds=60),
    )
    start = sum(SHARDS[:rank])
    shard = all_logits()[:, start : start + SHARDS[rank]]
    torch.save(choose(shard, start, Ranks()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_choose_as_one(tmp_path: Path) -> None:
    spawn(work, (str(tmp_path),), nprocs=len(SHARDS))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(len(SHARDS)))
    alone = choose(all_logits(), 0, None)
    for name, values in first.items():
        assert torch.equal(values, second[name]), name
    assert torch.equal(first["tokens"], alone["tokens"])
    assert first["tokens"][4] == 10
    assert torch.equal(first["lengths"], alone["lengths"])
    torch.testing.assert_close(first["survival"], alone["survival"], rtol=1e-5, atol=1e-6)
