"""Rounds of a batch without an engine: lengths in the draft's tail, acceptance, counters, slots."""

from __future__ import annotations

import json
from pathlib import Path

import hazard_trees_kit
import policy_kit
import pytest
import select_kit
import torch

from hybridspec.kernels.draft_features.split import Tiling
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.controls import LengthRequest, Row
from hybridspec.sglang_plugin.policy import DevicePolicy, fixed_policy
from hybridspec.sglang_plugin.round_counters import RoundCounters
from hybridspec.sglang_plugin.rounds import Rounds

pytest.importorskip("triton", reason="kernels need triton")

VOCAB = 64
SMALL = Tiling(vectors=1, num_warps=1)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_policy(*, trees: bool = False, correction: str = "off") -> DevicePolicy:
    policy = policy_kit.random_policy(3)
    return DevicePolicy(
        tables=select_kit.packed(policy, DEVICE),
        trees=hazard_trees_kit.packed(hazard_trees_kit.random_trees(5), DEVICE) if trees else None,
        batch_sizes=tuple(int(n) for n in policy.throughput.batch_sizes),
        tokens_per_us=tuple(float(lam) for lam in policy.throughput.tokens_per_us),
        fixed_length=6,
        correction=correction,
        lookahead=0 if correction == "off" else 1,
        note="random",
    )


def make_rounds(policy: DevicePolicy, *, path: Path | None = None) -> Rounds:
    rounds = Rounds(
        PluginConfig(history_entries=16),
        policy,
        max_requests=4,
        history_slots=10,
        device=DEVICE,
        counters=RoundCounters(DEVICE, max_requests=4, path=path, interval_s=1000.0),
    )
    rounds.make_drafts(vocab=VOCAB, vocab_start=0, dtype=torch.float32, tp_group=None, tiling=SMALL)
    return rounds


def rows_of(*lengths: LengthRequest) -> list[Row]:
    return [Row((i,), i + 2, asked) for i, asked in enumerate(lengths)]


def begin(rounds: Rounds, rows: list[Row]) -> None:
    slots = torch.tensor([row.history_slot + 20 for row in rows], dtype=torch.int32)
    rounds.begin(tuple(row.key for row in rows), lambda: rows, lambda: slots.to(DEVICE))


def draft(rounds: Rounds, requests: int, seed: int = 0) -> torch.Tensor:
    """Draft a padded batch, as a graph would; gives the logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests * 15, VOCAB, generator=generator).mul(4).to(DEVICE)
    positions = torch.arange(requests * 16, dtype=torch.int64, device=DEVICE) + 100
    assert rounds.drafts is not None
    rounds.drafts(logits, positions)
    return logits


def test_tail_of_the_draft() -> None:
    policy = device_policy(correction="select")
    rounds = make_rounds(policy)
    rows = rows_of(LengthRequest(), LengthRequest(cap=3), LengthRequest(forced=11))
    begin(rounds, rows)
    logits = draft(rounds, 4)
    state = rounds.state
    assert state.state_slots_B.tolist() == [22, 23, 24, -1]
    assert state.context_B.tolist() == [100, 116, 132, 148]
    assert rounds.drafts is not None
    assert torch.equal(rounds.drafts.tokens_R, logits.argmax(-1))

    probabilities = logits.double().softmax(-1)
    top = probabilities.topk(2, -1).values.float().view(4, 15, 2)
    entropy = torch.special.entr(probabilities).sum(-1).float().view(4, 15)
    host = policy_kit.random_policy(3)
    lam = host.lam(3)
    expected = host.select(
        top[:, :, 0].cpu(),
        top[:, :, 1].cpu(),
        entropy.cpu(),
        [100, 116, 132, 148],
        [lam] * 4,
        [16, 3, 16, 1],
        3,
    )
    lengths = state.lengths_B.tolist()
    assert lengths[:2] == expected.lengths[:2]
    assert lengths[2:] == [11, 0]
    assert state.fallback_B.tolist() == [0, 0, 3, 0]
    ahead = [min(n + 1, cap) if n > 1 else n for n, cap in zip(lengths[:2], (16, 3), strict=True)]
    assert state.router_rows_B.tolist() == [*ahead, 11, 0]
    assert torch.equal(state.selection.lengths_B, state.lengths_B)


def test_without_a_bundle_every_round_takes_the_fixed_length() -> None:
    rounds = make_rounds(fixed_policy(8, "no bundle"))
    begin(rounds, rows_of(LengthRequest(), LengthRequest(cap=4), LengthRequest(16, 16)))
    draft(rounds, 4)
    assert rounds.state.lengths_B.tolist() == [8, 4, 16, 0]
    assert rounds.state.fallback_B.tolist() == [2, 2, 3, 0]


def test_broken_signals_take_the_fixed_length_of_the_table() -> None:
    rounds = make_rounds(device_policy())
    begin(rounds, rows_of(LengthRequest(), LengthRequest()))
    assert rounds.drafts is not None
    logits = torch.randn(30, VOCAB, device=DEVICE)
    logits[3, 5] = float("nan")
    rounds.drafts(logits, torch.zeros(32, dtype=torch.int64, device=DEVICE))
    fallback = rounds.state.fallback_B.tolist()
    assert fallback[:2] == [1, 0]
    fixed = policy_kit.random_policy(3).fixed_length(2)
    assert rounds.state.lengths_B[0].item() == fixed
    assert rounds.drafts.tokens_R[:30].min() >= 0
    assert rounds.drafts.tokens_R[:30].max() < VOCAB


def test_a_round_ends_with_counters_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.json"
    rounds = make_rounds(fixed_policy(5, "no bundle"), path=path)
    rounds.compile()
    begin(rounds, rows_of(LengthRequest(), LengthRequest(2, 16)))
    draft(rounds, 2)
    candidates = torch.arange(32, device=DEVICE).view(2, 16)
    rounds.limit(candidates, None)
    assert (candidates >= 0).sum(1).tolist() == [5, 2]
    commit_rows = torch.tensor([4, 2], dtype=torch.int32, device=DEVICE)
    assert not rounds.commit(commit_rows)
    assert rounds.state.commit_rows_B.tolist()[:2] == [4, 2]
    emitted = torch.zeros(32, dtype=torch.int64, device=DEVICE)
    first = rounds.end(commit_rows, emitted)
    assert first.tolist() == [5, 2]
    second = rounds.end(commit_rows, emitted)
    # The lengths of the round before are still there for a scheduler that is one round late.
    assert first.data_ptr() != second.data_ptr()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    rounds.counters.close()
    written = json.loads(path.read_text())
    assert written["request_rounds"] == 4
    assert written["emitted_tokens"] == 12
    assert written["mean_verify_length"] == 3.5
    assert written["length_histogram"][5] == 2
    assert written["length_histogram"][2] == 2
    assert written["lengths_by"] == {
        "chosen": 0,
        "not_finite": 0,
        "static_policy": 2,
        "forced": 2,
    }


def test_history_of_trees_follows_the_slot_not_the_row() -> None:
    """A request's hazards are the same alone and in a batch that changes around it."""

    def lengths(company: bool) -> list[list[float]]:
        rounds = make_rounds(device_policy(trees=True))
        assert rounds.history is not None
        rounds.compile()
        slots = torch.tensor([3, 7], device=DEVICE)
        rounds.prefilled(slots, torch.tensor([11, 12], device=DEVICE))
        row, other = Row(("r",), 3, LengthRequest()), Row(("o",), 7, LengthRequest())
        found = []
        for turn in range(3):
            batch = [row]
            if company and turn != 1:
                batch = [other, row] if turn else [row, other]
            begin(rounds, batch)
            i = batch.index(row)
            count = len(batch)
            generator = torch.Generator().manual_seed(turn)
            mine = torch.randn(15, VOCAB, generator=generator).mul(4)
            logits = torch.randn(count * 15, VOCAB, generator=generator).mul(4)
            logits[i * 15 : i * 15 + 15] = mine
            assert rounds.drafts is not None
            positions = torch.full((count * 16,), 50 + turn, dtype=torch.int64, device=DEVICE)
            rounds.drafts(logits.to(DEVICE), positions)
            found.append(rounds.state.selection.survival_BL[i].tolist())
            rows = torch.tensor([3] * count, dtype=torch.int32, device=DEVICE)
            emitted = torch.randint(0, VOCAB, (count, 16), generator=generator)
            emitted[i] = torch.arange(16) + turn
            rounds.end(rows, emitted.to(DEVICE).view(-1))
        return found

    alone = lengths(company=False)
    assert alone == lengths(company=True)
    assert alone[0] != alone[1]
