"""What the engine tests share: shapes, engines, teacher forcing, states and a scripted drafter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
import torch

from hybridspec.artifacts.tables import BLOCK_SIZE, NUM_DRAFTS
from hybridspec.reference.commit import commit
from hybridspec.reference.drafter import Drafter, DraftSignals
from hybridspec.reference.engine import Engine, Request
from hybridspec.reference.loading import load_pair
from hybridspec.reference.random_pair import PairShape, write_random_pair
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import KVCache
from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.request import LengthRule

SHARED_PAIRS = Path(__file__).parents[2].parent / "shared" / "pairs"
BUNDLED_PAIR = Path(__file__).parents[2] / "hybridspec" / "demo" / "pair"
TRAINED_PAIRS = ("bundled", "micro", "small", "lab")


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


# ---------------------------------------------------------------------------- states


@dataclass
class State:
    """Everything the target remembers of a request: by layer recurrent, conv, keys, values."""

    recurrent: torch.Tensor
    conv: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def distance(self, other: State) -> float:
        pairs = ((getattr(self, n), getattr(other, n)) for n in self.__dataclass_fields__)
        distances = []
        for mine, others in pairs:
            assert mine.shape == others.shape
            assert torch.isfinite(mine).all()
            distances.append(float((mine - others).abs().max()) if mine.numel() else 0.0)
        return max(distances)


def state_of(engine: Engine, request: Request) -> State:
    context = request.context_tokens
    return State(
        engine.pool.recurrent_SXHVK[request.slot].clone(),
        engine.pool.conv_SXWC[request.slot].clone(),
        request.cache.keys[:, :, :context].clone(),
        request.cache.values[:, :, :context].clone(),
    )


def draft_context_of(engine: Engine, request: Request) -> torch.Tensor:
    """Context keys and values of the drafter, those not injected yet included."""
    assert engine.drafter is not None
    assert request.draft_cache is not None
    count = request.drafter_tokens
    old = request.draft_cache
    cache = engine.drafter.new_cache()
    cache.reserve(request.context_tokens + BLOCK_SIZE)
    cache.keys[:, :, :count] = old.keys[:, :, :count]
    cache.values[:, :, :count] = old.values[:, :, :count]
    if request.pending_features:
        with torch.inference_mode():
            features = torch.cat(
                [torch.cat(part) for part in zip(*request.pending_features, strict=True)], -1
            )
            assert count + features.shape[0] == request.context_tokens
            engine.drafter.inject(cache, count, features)
    spans = [x[:, :, : request.context_tokens] for x in (cache.keys, cache.values)]
    return torch.stack(spans).clone()


# ---------------------------------------------------------------------------- scripted drafts


@dataclass
class Script:
    """What to propose for one request in its next draft pass.

    Attributes:
        continuation: the true tokens of the request from position 0.
        right: drafts that are right before the first wrong one, 0..15.
        certain: drafts that get a top-1 probability of almost 1; the rest get almost 0.
    """

    continuation: list[int]
    right: int = 0
    certain: int = NUM_DRAFTS


@dataclass
class ScriptedDrafter:
    """A drafter with hand-made proposals; its passes and caches are the real ones.

    Stands in for a drafter's weights: scripts are looked up by the request's cache.
    """

    real: Drafter
    vocab_size: int
    scripts: dict[int, Script] = field(default_factory=dict)

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)

    def draft(
        self, anchors: Sequence[int], starts: Sequence[int], caches: Sequence[KVCache]
    ) -> DraftSignals:
        signals = self.real.draft(anchors, starts, caches)
        tokens, p1 = signals.tokens_BD.clone(), signals.p1_BD.clone()
        for row, (anchor, start, cache) in enumerate(zip(anchors, starts, caches, strict=True)):
            script = self.scripts[id(cache)]
            assert script.continuation[start] == anchor
            truth = script.continuation[start + 1 : start + 1 + NUM_DRAFTS]
            assert len(truth) == NUM_DRAFTS
            wrong = [(t + 1) % self.vocab_size for t in truth]
            tokens[row] = torch.tensor(truth[: script.right] + wrong[script.right :])
            p1[row] = 1e-6
            p1[row, : script.certain] = 1.0 - 1e-6
        return replace(signals, tokens_BD=tokens, p1_BD=p1, p2_BD=torch.zeros_like(p1))


def script_drafts(engine: Engine) -> ScriptedDrafter:
    """Replace the engine's drafter by a scripted one over it."""
    assert engine.drafter is not None
    scripted = ScriptedDrafter(engine.drafter, engine.target_config.vocab_size)
    engine.drafter = cast(Drafter, scripted)
    return scripted


class CallLog:
    """Names, and row counts, of methods in the order in which they ran."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def wrap(self, owner: object, method: str, rows: Callable[..., int], name: str) -> None:
        """Log calls of one bound method, which goes on to run."""
        real = getattr(owner, method)

        def logged(*args: object, **kwargs: object) -> object:
            self.calls.append((name, rows(*args, **kwargs)))
            return real(*args, **kwargs)

        setattr(owner, method, logged)
