from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hybridspec.demo.drafter_module import Drafter, block_mask
from hybridspec.demo.evaluate import Rounds, loop_period
from hybridspec.demo.generation import Continuation
from hybridspec.demo.presets import PairPreset
from hybridspec.demo.target_module import Target


def greedy(target: Target, prompt: Tensor, count: int) -> list[int]:
    """Decodes by recomputing everything for each token."""
    ids = prompt.unsqueeze(0)
    for _ in range(count):
        best = target.logits(target(ids).hidden[:, -1]).argmax(-1, keepdim=True)
        ids = torch.cat([ids, best], dim=1)
    return ids[0, len(prompt) :].tolist()


def test_cached_continuation_equals_full_recomputation(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, target.preset.vocab, (3, 9), generator=generator)
    continuation = Continuation(target, batch=3, capacity=30)
    still = itertools.repeat(torch.zeros(3))
    continuation.run(prompts.flip(0), still, generator=generator)  # Its states must not remain.
    tokens, forced = continuation.run(prompts, still, generator=generator)
    assert tokens.shape == forced.shape == (3, 30)
    assert not forced.any()
    for row in range(3):
        assert tokens[row, 9:].tolist() == greedy(target, prompts[row], 21)


def test_drawn_tokens_are_marked(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, target.preset.vocab, (4, 9), generator=generator)
    scales = itertools.repeat(torch.tensor([0.0, 0.0, 30.0, 30.0]))
    tokens, forced = Continuation(target, batch=4, capacity=40).run(
        prompts, scales, generator=generator
    )
    assert not forced[:2].any()
    assert forced[2:, 9:].float().mean() > 0.9
    best = target.logits(target(tokens[:, :-1]).hidden).argmax(-1)
    assert torch.equal(forced[:, 9:], (tokens[:, 1:] != best)[:, 8:])


def test_rounds_emit_what_the_target_alone_emits(target: Target, preset: PairPreset) -> None:
    generator = torch.Generator().manual_seed(0)
    drafter = Drafter(preset)
    drafter.initialise(1)
    prompts = [
        torch.randint(0, preset.vocab, (n,), generator=generator).tolist() for n in (5, 23, 11)
    ]
    decoder = Rounds(target, drafter, mask_token=4, ends=())
    rounds, texts = decoder.decode(prompts, new_tokens=40)
    for i, prompt in enumerate(prompts):
        assert texts[i] == greedy(target, torch.tensor(prompt), 40)
        mine = [r for r in rounds if r.request == i]
        assert 40 <= 1 + sum(r.accepted + 1 for r in mine) < 40 + 16
    for r in rounds:
        one, _, sixteen = r.experts
        assert one == preset.experts_per_token
        assert one <= sixteen <= preset.experts


def test_block_rows_see_the_context_before_their_anchor_and_their_own_block() -> None:
    mask = block_mask(torch.tensor([[2, 5]]), 8)[0, 0]
    assert mask.shape == (32, 8 + 32)
    for block, anchor in enumerate((2, 5)):
        for row in range(16 * block, 16 * block + 16):
            assert mask[row].nonzero()[:, 0].tolist() == [
                *range(anchor),
                *range(8 + 16 * block, 8 + 16 * block + 16),
            ]


@pytest.mark.parametrize(
    ("tokens", "period"),
    [([1, 2, 3] * 8, 3), ([7] * 24, 1), (list(range(24)), 0), ([1, 2] * 5, 0),
     (list(range(13)) * 3, 0), ([9] * 30 + [1], 0)],
)  # fmt: skip
def test_loop_period(tokens: list[int], period: int) -> None:
    assert loop_period(tokens) == period
