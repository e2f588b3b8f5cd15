"""What the engine tests share: pairs, engines, teacher forcing, decoding and ties."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hybridspec.reference.commit import commit
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.reference.random_pair import PairShape, write_random_pair
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import KVCache
from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.request import LengthRule

SHARED_PAIRS = Path(__file__).parents[2].parent / "shared" / "pairs"
BUNDLED_PAIR = Path(__file__).parents[2] / "hybridspec" / "demo" / "pair"
TRAINED_PAIRS = ("bundled", "micro", "small", "lab")
# A target whose joint law of a few tokens can be written down.
NINE_TOKENS = PairShape(
    vocab_size=9,
    hidden_size=16,
    num_layers=2,
    full_attention_interval=2,
    head_dim=16,
    gdn_key_dim=8,
    gdn_value_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_width=8,
    shared_width=8,
    drafter_head_dim=8,
    drafter_mlp_width=16,
    target_layer_ids=(0, 1),
    tied_embeddings=False,
)


def trained_pair(name: str) -> Path:
    """Folder of a trained pair; the test is skipped where it is not."""
    folder = BUNDLED_PAIR if name == "bundled" else SHARED_PAIRS / name
    if not (folder / "target" / "config.json").is_file():
        pytest.skip(f"the trained pair {name} is not here")
    return folder


def prompts_of(folder: Path) -> list[list[int]]:
    """Token ids of all test prompts of a trained pair, category by category."""
    lines = folder / "prompts.jsonl"
    if lines.is_file():
        tokenizer = Tokenizer.load(folder / "target")
        rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
        return [tokenizer.encode(row["text"]) for row in rows if row["split"] == "test"]
    rows = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    return [row["ids"] for row in rows if row["split"] == "test"]


def spread(prompts: list[list[int]], count: int) -> list[list[int]]:
    """A few prompts from all over the list."""
    return prompts[len(prompts) // (2 * count) :: len(prompts) // count][:count]


# Heads, key heads, dims, experts and embeddings all differ from one another and from the pairs.
SHAPES = {
    "plain": PairShape(),
    "grouped": PairShape(
        vocab_size=203,
        hidden_size=72,
        num_layers=6,
        full_attention_interval=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        partial_rotary_factor=0.5,
        gdn_key_heads=2,
        gdn_value_heads=4,
        gdn_key_dim=24,
        gdn_value_dim=8,
        num_experts=16,
        experts_per_token=4,
        expert_width=12,
        shared_width=20,
        tied_embeddings=False,
        drafter_layers=2,
        drafter_heads=4,
        drafter_kv_heads=2,
        drafter_head_dim=16,
        target_layer_ids=(1, 2, 5),
    ),
    "odd": PairShape(
        vocab_size=97,
        hidden_size=55,
        num_layers=5,
        full_attention_interval=3,
        num_heads=3,
        num_kv_heads=1,
        head_dim=22,
        partial_rotary_factor=0.75,
        gdn_key_heads=3,
        gdn_value_heads=3,
        gdn_key_dim=15,
        gdn_value_dim=9,
        num_experts=64,
        experts_per_token=1,
        expert_width=5,
        shared_width=7,
        tied_embeddings=False,
        drafter_layers=3,
        drafter_heads=3,
        drafter_kv_heads=3,
        drafter_head_dim=14,
        drafter_mlp_width=33,
        target_layer_ids=(4,),
    ),
    "wide-values": PairShape(
        vocab_size=64,
        hidden_size=48,
        num_layers=3,
        full_attention_interval=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        partial_rotary_factor=1.0,
        gdn_key_heads=2,
        gdn_value_heads=6,
        gdn_key_dim=8,
        gdn_value_dim=32,
        num_experts=8,
        experts_per_token=8,
        expert_width=24,
        shared_width=16,
        target_layer_ids=(0, 1, 2),
    ),
}


def random_engine(
    folder: Path,
    shape: PairShape,
    *,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
    max_batch: int = 4,
    max_context: int = 1024,
) -> Engine:
    """An engine over a pair of random weights, written once a folder."""
    if not (folder / "target").is_dir():
        write_random_pair(folder, shape, seed=seed)
    return load_pair(
        folder / "target",
        folder / "drafter",
        dtype=dtype,
        max_batch=max_batch,
        max_context=max_context,
    )


def random_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


# ---------------------------------------------------------------------------- teacher forcing


@dataclass
class Forced:
    """Logits [T, V] and routes, one int64 [T, top-k] a layer, of given tokens."""

    logits: torch.Tensor
    routes: list[torch.Tensor]


def new_kv_cache(engine: Engine, tokens: int) -> KVCache:
    config = engine.target_config
    cache = KVCache(
        len(config.attention_layers),
        config.num_kv_heads,
        config.head_dim,
        engine.target.dtype,
        engine.device,
    )
    cache.reserve(tokens)
    return cache


@torch.inference_mode()
def teacher_forced(engine: Engine, tokens: Sequence[int], blocks: Sequence[int]) -> Forced:
    """The target over `tokens` in blocks: 0 marks the rest as one prefill, n a verified block.

    A verified block is committed in full, so the next one starts from its factors.
    """
    slot = engine.pool.take()
    cache = new_kv_cache(engine, len(tokens))
    logits, routes, start = [], [], 0
    try:
        for size in blocks:
            rows = size or len(tokens) - start
            layout = RowLayout([slot], [start], [rows], engine.device)
            state, routed = engine.target.first_router(
                torch.tensor(tokens[start : start + rows]), layout, engine.pool, in_place=size == 0
            )
            hidden = engine.target.finish(state, routed, engine.pool, [cache])
            if size:
                commit(engine.pool, state.factors, layout, [rows])
            logits.append(engine.target.logits(hidden))
            routes.append(state.routes)
            start += rows
    finally:
        engine.pool.give_back(slot)
    assert start == len(tokens)
    return Forced(torch.cat(logits), [torch.cat(layer) for layer in zip(*routes, strict=True)])


# ---------------------------------------------------------------------------- decoding


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    rule: LengthRule,
    max_new_tokens: int,
) -> list[list[int]]:
    """Generated tokens of prompts that are decoded together, cut to `max_new_tokens`."""
    requests = [engine.add(prompt, length_rule=rule) for prompt in prompts]
    try:
        while live := [r for r in requests if not r.finished and r.num_emitted < max_new_tokens]:
            engine.step(live)
        return [r.tokens[r.num_prompt_tokens :][:max_new_tokens] for r in requests]
    finally:
        for request in requests:
            engine.remove(request)


MAX_TIE_MARGIN = 1e-3


def tie_margin(
    engine: Engine, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> float | None:
    """None where both texts are equal, else the top-1/top-2 margin at their first difference.

    Sums of another order may turn a tie of the target; anything else is a fault.
    """
    if list(plain) == list(other):
        return None
    pairs = zip(plain, other, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    assert place is not None, f"lengths {len(plain)} and {len(other)} differ without a difference"
    tokens = [*prompt, *plain[:place]]
    top = teacher_forced(engine, tokens, [0]).logits[-1].topk(2).values
    return float(top[0] - top[1])


def assert_same_text(
    engine: Engine, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> float | None:
    """Equal token by token, or a tie at the first difference, whose margin is returned."""
    margin = tie_margin(engine, prompt, plain, other)
    assert margin is None or margin < MAX_TIE_MARGIN, (
        f"texts differ where the target prefers its token by {margin}"
    )
    return margin
